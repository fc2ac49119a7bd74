"""What is the graph of another batch size? One on the line between two captured ones (`passes.batch_line`), or its own.

The two are those of the whole batch and of one sample, which is asked for in any case; the graph of one may be written
differently (a dim of size 1 is broadcast), and then two samples take its place. Where that is no line either, the model
is captured anew. Two points do not show that a number is on a line: who plans with such a graph compares it with the
captured one in the end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.capture.forked import Forked
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.batch_line import BatchLine, NotLinearError, check_alike
from autopar.passes.joined_samples import loss_over_samples
from autopar.passes.sample_states import Joined
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.serialize import dump, load

PATIENCE, LEAST_SECONDS = 3.0, 10.0
"""How many times as long as a capture took here one beside is waited for, and how long at least."""


@dataclass(slots=True, kw_only=True)
class Batches:
    """The graphs of a model by batch size up to `batch`, the whole one; `capture` is asked for few of them.

    shared: finds what captures of all sizes have in common, and gives one that takes it for granted; it serves the ends
    of lines. lines: pairs of sizes of which the first, as far as is known, gives all others; without one each is
    captured. line: that one, once both ends are captured.
    """

    capture: Callable[[int], CapturedModel]
    batch: int
    shared: Callable[[], Callable[[int], CapturedModel]] | None = None
    lines: list[tuple[int, int]] = field(init=False)
    line: BatchLine | None = field(init=False, default=None)
    _captured: dict[int, CapturedModel] = field(default_factory=dict)
    _ends: dict[int, CapturedModel] = field(default_factory=dict)
    _beside: dict[int, Forked] = field(default_factory=dict)
    _ends_beside: dict[int, Forked] = field(default_factory=dict)
    _longest: float = 0.0

    def __post_init__(self) -> None:
        self.lines = [(few, self.batch) for few in (1, 2) if few + 1 < self.batch]

    def at(self, size: int) -> CapturedModel:
        """The graph of `size` samples."""
        while self.lines and size not in self._captured and size != self.batch:
            few, _ = self.lines[0]
            if size < few:
                break
            if size == few:
                return self._end(few)
            try:
                if (line := self.find_line()) is not None:
                    return line.at(size)
            except (NotLinearError, ValueError):
                self.distrust()
        return self.captured(size)

    def find_line(self) -> BatchLine | None:
        """The first line, whose ends may have to be captured, if graphs are on any."""
        while self.line is None and self.lines:
            few, whole = self.lines[0]
            try:
                large = self.captured(whole)  # first: the other may come from beside meanwhile
                small = self._end(few)
                check_alike(small, large)
                self.line = BatchLine(small=small, large=large, sizes=(few, whole))
            except (NotLinearError, ValueError):  # some models do not run on so few; those that do may not be linear
                self.distrust()
        return self.line

    def microbatch(self, count: int) -> CapturedModel:
        """The graph of one of `count` micro-batches of the whole batch.

        Raises:
            BatchError: if its loss does not follow from theirs.
        """
        graph = self.at(self.batch // count)
        is_kept = any(graph is one for one in (*self._captured.values(), *self._ends.values()))
        return accumulate_gradients(graph, count, lambda: self.at(self.batch), in_place=not is_kept)

    def why_whole(self) -> str | None:
        """What joins the samples of a batch, so that a step is one micro-batch; None if nothing does.

        Of a line where there is one, else of as many samples as the fewest micro-batches have.
        """
        if self.batch == 1:
            return None
        whole, line = self.captured(self.batch), self.find_line()
        few = divisors(self.batch)[-2]
        found = loss_over_samples(whole, self.captured(few) if line is None else line.small)
        return found.why if isinstance(found, Joined) else None

    def captured_microbatch(self, count: int) -> CapturedModel:
        """The same as it is captured, not moved along a line."""
        return accumulate_gradients(self.captured(self.batch // count), count, lambda: self.captured(self.batch))

    def captured(self, size: int) -> CapturedModel:
        """The graph of `size` samples as it is captured, with nothing taken for granted."""
        if size not in self._captured:
            self._captured[size] = self._made(size, self._beside, self.capture)
        return self._captured[size]

    def _end(self, size: int) -> CapturedModel:
        """The same at the end of a line."""
        if size in self._captured:
            return self._captured[size]
        if size not in self._ends:
            capture = self.capture if self.shared is None else self.shared()
            self._ends[size] = self._made(size, self._ends_beside, capture)
            if self.shared is None:
                self._captured[size] = self._ends[size]
        return self._ends[size]

    def _made(self, size: int, beside: dict[int, Forked], capture: Callable[[int], CapturedModel]) -> CapturedModel:
        patience = max(PATIENCE * self._longest, LEAST_SECONDS)
        came = beside.pop(size).answer(patience) if size in beside else None
        began = time.monotonic()
        made = capture(size) if came is None else load(came)
        self._longest = max(self._longest, time.monotonic() - began)
        return made

    def begin_line(self) -> None:
        """Capture beside this process what, with the whole batch, gives all others."""
        if not self.lines:
            return
        end, capture = self.lines[0][0], self.capture if self.shared is None else self.shared()
        self._ends_beside[end] = Forked(lambda: dump(capture(end)))

    def begin(self, size: int) -> None:
        """Capture the graph of so many samples beside this process, if it is not there; of no other size then."""
        for other in self._beside.keys() - {size}:
            self._beside.pop(other).close()
        if size not in self._captured and size not in self._beside:
            self._beside[size] = Forked(lambda: dump(self.capture(size)), nice=True)

    def close(self) -> None:
        """Begin nothing more, and end what was not asked for."""
        for one in (*self._beside.values(), *self._ends_beside.values()):
            one.close()
        self._beside.clear()
        self._ends_beside.clear()

    def distrust(self) -> None:
        """The first line does not give the graphs of other sizes."""
        del self.lines[:1]
        self.line = None
