"""What is the graph of another batch size? Two captured ones, every size and number in them moved along the line.

A size or an integer that is x at a samples and y at b samples is x + (y - x) (n - a) / (b - a) at n. Where that is no
integer, or constants of the graphs differ, or their nodes do, there is no such line. The points are the whole batch and
one sample, which is asked for in any case; the graph of one may be written differently (a dim of size 1 is broadcast),
and then two samples take its place. Where that is no line either, the model is captured anew. Two points do not show
that a number is on a line: who plans with such a graph compares it with the captured one in the end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.capture.forked import Forked
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.joined_samples import loss_over_samples
from autopar.passes.sample_states import Joined
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel, target_name
from autopar.values.serialize import dump, load

PATIENCE, LEAST_SECONDS = 3.0, 10.0
"""How many times as long as a capture took here one beside is waited for, and how long at least."""


class NotLinearError(Exception):
    """Two graphs differ in more than sizes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLine:
    """Graphs at the ends of a line, alike but for numbers, at `sizes` samples, the second of them the whole batch."""

    small: CapturedModel
    large: CapturedModel
    sizes: tuple[int, int]

    def at(self, size: int) -> CapturedModel:
        """The graph of `size` samples; between the ends a new one.

        Raises:
            NotLinearError: if the ends are not alike in all but numbers.
        """
        for end, graph in zip(self.sizes, (self.small, self.large), strict=True):
            if size == end:
                return graph
        return rebatched(self.small, self.large, self.sizes, size)

    def microbatch(self, count: int) -> CapturedModel:
        """The graph of one of `count` micro-batches."""
        graph = self.at(self.sizes[1] // count)
        is_kept = graph is self.small or graph is self.large
        return accumulate_gradients(graph, count, lambda: self.large, in_place=not is_kept)


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


def rebatched(a: CapturedModel, b: CapturedModel, sizes: tuple[int, int], size: int) -> CapturedModel:
    """The graph at `size` samples from those at `sizes`.

    Raises:
        NotLinearError: if they are not alike in all but numbers.
    """
    line = Between(sizes[0], sizes[1], size)
    check_alike(a, b)
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        moved = line.between((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs)))
        args, kwargs = fx.node.map_arg(moved, env.__getitem__)
        copy = graph.create_node(one.op, one.target, args, kwargs, one.name, one.type)
        copy.meta = dict(one.meta)
        if "val" in one.meta:
            copy.meta["val"] = line.value(one.meta["val"], other.meta["val"])
        env[one] = copy
    return replace(a, graph=graph, **line.specs(a, b))


def check_alike(a: CapturedModel, b: CapturedModel) -> None:
    """Raises NotLinearError if constants, or nodes' names and targets, differ."""
    if len(a.graph.nodes) != len(b.graph.nodes) or set(a.constants) != set(b.constants):
        raise NotLinearError(a.name)
    if not all(torch.equal(value, b.constants[name]) for name, value in a.constants.items()):
        raise NotLinearError(a.name)
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        if (one.op, one.name, target_name(one.target)) != (other.op, other.name, target_name(other.target)):
            raise NotLinearError(f"{one.name} and {other.name}")


class DeferredGraph(CapturedModel):
    """A captured model whose graph is made when it is first looked at."""

    make: Callable[[], CapturedModel]

    @classmethod
    def like(cls, model: CapturedModel, make: Callable[[], CapturedModel], **changes: Any) -> "DeferredGraph":
        """All but the graph a model's, with `changes`; `make` gives the graph."""
        own = {f.name: getattr(model, f.name) for f in fields(CapturedModel) if f.name != "graph"}
        made = object.__new__(cls)
        vars(made).update({**own, **changes, "make": make})
        return made

    @cached_property
    def graph(self) -> fx.Graph:
        """Made once."""
        return self.make().graph


@dataclass(frozen=True, slots=True)
class Between:
    """The point at `n` samples of a line from `a` to `b`. made: tensors without values, by those at the ends."""

    a: int
    b: int
    n: int
    made: dict[object, torch.Tensor] = field(default_factory=dict)

    def between(self, x: Any, y: Any) -> Any:
        """`x` with every integer moved; both have the same structure."""
        if type(x) is not type(y):
            raise NotLinearError(f"{x} and {y}")
        if type(x) is int:
            moved, rest = divmod((y - x) * (self.n - self.a), self.b - self.a)
            if rest:
                raise NotLinearError(f"{x} and {y}")
            return x + moved
        if isinstance(x, (tuple, list)):
            if len(x) != len(y):
                raise NotLinearError(f"{x} and {y}")
            return type(x)(self.between(p, q) for p, q in zip(x, y, strict=True))
        if isinstance(x, dict):
            return {key: self.between(value, y[key]) for key, value in x.items()}
        if isinstance(x, fx.Node):
            if x.name != y.name:
                raise NotLinearError(f"{x} and {y}")
            return x
        if x != y:
            raise NotLinearError(f"{x} and {y}")
        return x

    def specs(self, a: CapturedModel, b: CapturedModel) -> dict[str, Any]:
        """What is said of the model's parameters, buffers and inputs."""
        kinds = ("parameters", "buffers", "inputs")
        pairs = {kind: zip(getattr(a, kind), getattr(b, kind), strict=True) for kind in kinds}
        return {
            kind: tuple(replace(p, shape=self.between(p.shape, q.shape)) for p, q in both)
            for kind, both in pairs.items()
        }

    def value(self, x: Any, y: Any) -> Any:
        """The meta tensor between two; one for all that are alike."""
        if not isinstance(x, torch.Tensor):
            return type(x)(self.value(p, q) for p, q in zip(x, y, strict=True))
        known = (x.shape, x.stride(), x.dtype, y.shape, y.stride())
        if known not in self.made:
            shape = self.between(tuple(x.shape), tuple(y.shape))
            order = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta").stride() == x.stride()
            made = torch.empty(shape, dtype=x.dtype, device="meta")
            strides = () if order else self.between(tuple(x.stride()), tuple(y.stride()))
            self.made[known] = made if order else made.as_strided(shape, strides)
        return self.made[known]
