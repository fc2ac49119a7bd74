"""What may run beside what in a micro-batch? Its tasks as a passage of `cost_models.pipeline`, chained or woven.

In a chain everything waits for what stands before it: that is what the runtime does today, but for the collectives
between two micro-batches that run at once (`beside`). Overlapped, ops keep their
order, and a collective runs on its link as soon as what it sends is there; only what reads its result waits for it:

    parameters' gathers       ahead of their readers, merged in buckets: a bucket starts at the earliest where the
                              bucket `ahead` before it was asked for, so that no more than these lie ready and unused
    parameters' gradients     as they appear, merged in buckets; only the optimizer waits for them
    activations               after the op that makes them, before the op that reads them
    inside an op              (a ring, a sum over classes) after its compute, and everything waits for it

Copies that live for the step are gathered before all else and wait for no bucket.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.pipeline import COMPUTE, Segment, Woven
from autopar.lower.events import Fact
from autopar.search.costs.runs import Task
from autopar.values.domains import NOT_NEGATIVE, Domain, checked_number

BUCKET = Domain(whole=False, least=0, most=2.0**63, instead="give 0 for none")
"""Bytes of a bucket."""

Price = Callable[[str, tuple[int, ...], int], float]
"""Seconds of a collective along mesh axes that sends so many bytes of parameters or their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """bucket_nbytes: messages of parameters and their gradients are merged up to so many bytes; 0: none is.

    ahead: buckets of parameters that may be gathered before the one in use is let go.
    """

    bucket_nbytes: float = 25e6
    ahead: int = 2

    def __post_init__(self) -> None:
        checked_number("bucket_nbytes", self.bucket_nbytes, BUCKET)
        checked_number("ahead", self.ahead, NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesOfTasks:
    """lane: of a collective's axes. name: of a task, for a trace; of several merged, that of the first is given."""

    lane: Callable[[tuple[int, ...]], int]
    name: Callable[[Task, int], str]


def chain(tasks: Iterable[Task], names: NamesOfTasks) -> tuple[Segment, ...]:
    """One after another; what takes no time is left out."""
    return tuple(
        Segment(names.lane(t.axes) if t.axes else COMPUTE, t.seconds, names.name(t, 1)) for t in tasks if t.seconds
    )


def beside(tasks: Iterable[Task], names: NamesOfTasks) -> Woven:
    """One after another, but a collective that is begun runs on its link until what it brings is read."""
    segments, edges = [Segment(COMPUTE, 0.0)], list[tuple[int, int]]()
    sent: dict[Fact, frozenset[int]] = {}
    begun: set[int] = set()
    last = 0

    def add(segment: Segment, after: Iterable[int]) -> int:
        edges.extend((before, len(segments)) for before in sorted({last, *after}))
        segments.append(segment)
        return len(segments) - 1

    for task in tasks:
        waits = frozenset[int]().union(*(sent.get(fact, ()) for fact in task.event.reads))
        if waits and (task.event.begun or not task.seconds):
            last, waits = add(Segment(COMPUTE, 0.0), waits), frozenset()
        made = frozenset[int]()
        if task.seconds:
            lane = names.lane(task.axes) if task.axes else COMPUTE
            number = add(Segment(lane, task.seconds, names.name(task, 1)), waits)
            if task.event.begun:
                begun.add(number)
                made = frozenset({number})
            else:
                last = number
        for fact in task.event.makes:
            sent[fact] = sent.get(fact, frozenset()) | made
    add(Segment(COMPUTE, 0.0), begun)
    return Woven(segments=tuple(segments), edges=tuple(edges))


def weave(
    tasks: Sequence[Task],
    ends: Sequence[Fact],
    leaves: frozenset[Fact],
    names: NamesOfTasks,
    price: Price,
    overlap: Overlap,
) -> Woven:
    """The overlapped passage. ends: what it is for, such as what the next stage receives."""
    return _Weaver(leaves, names, price, overlap).run(tasks, ends)


@dataclass(frozen=True, slots=True)
class _Waits:
    """For what a reader waits: a segment of compute (those before it have ended too; -1 for none), and collectives.

    depth: collectives in the way from a stored parameter.
    """

    compute: int
    sent: frozenset[int] = frozenset()
    depth: int = 0

    def __or__(self, other: "_Waits") -> "_Waits":
        return _Waits(max(self.compute, other.compute), self.sent | other.sent, max(self.depth, other.depth))


@dataclass(slots=True)
class _Bucket:
    segment: int
    first: Task
    asked: int
    depth: int
    nbytes: int = 0
    members: int = 0


@dataclass(slots=True)
class _Weaver:
    leaves: frozenset[Fact]
    names: NamesOfTasks
    price: Price
    overlap: Overlap
    segments: list[Segment] = field(default_factory=lambda: [Segment(COMPUTE, 0.0)])
    edges: dict[tuple[int, int], None] = field(default_factory=dict)
    held: dict[Fact, _Waits] = field(default_factory=dict)
    computed: int = 0
    blocked: frozenset[int] = frozenset()
    open: dict[tuple[object, ...], _Bucket] = field(default_factory=dict)
    windows: list[_Bucket] = field(default_factory=list)
    early: list[int] = field(default_factory=list)

    def run(self, tasks: Sequence[Task], ends: Sequence[Fact]) -> Woven:
        for task in tasks:
            waits = self._waits(task.event.reads)
            if task.axes and task.seconds:
                made = self._sent(task, waits)
            elif task.seconds:
                made = self._compute(task.seconds, self.names.name(task, 1), waits)
            else:
                made = waits
            for fact in task.event.makes:
                held = self.held.get(fact)
                self.held[fact] = made if held is None else held | made
        self._compute(0.0, "", self._waits(tuple(ends)))
        ahead = self.overlap.ahead
        release = self.windows[-ahead].asked if 0 < ahead <= len(self.windows) else 0
        return Woven(segments=tuple(self.segments), edges=tuple(self.edges), early=tuple(self.early), release=release)

    def _waits(self, reads: tuple[Fact, ...]) -> _Waits:
        waits = _Waits(-1)
        for fact in reads:
            found = self.held.get(fact)
            if found is None:  # what backward finds kept is sent again where it is asked for, not before
                found = _Waits(-1 if fact in self.leaves else self.computed if fact[0] == "again" else 0)
            waits = waits | found
        return waits

    def _add(self, segment: Segment, waits: Iterable[int]) -> int:
        number = len(self.segments)
        self.segments.append(segment)
        self.edges.update(((before, number), None) for before in waits)
        return number

    def _compute(self, seconds: float, name: str, waits: _Waits) -> _Waits:
        before = {self.computed} | self.blocked | waits.sent
        self.computed, self.blocked = self._add(Segment(COMPUTE, seconds, name), sorted(before)), frozenset()
        return _Waits(self.computed)

    def _sent(self, task: Task, waits: _Waits) -> _Waits:
        if task.stored and (task.event.makes[0][0] == "gradient" or waits.compute < 0):
            return self._merged(task, waits)
        before = {self.computed} | self.blocked if task.event.inside or waits.compute < 0 else {waits.compute}
        segment = Segment(self.names.lane(task.axes), task.seconds, self.names.name(task, 1))
        number = self._add(segment, sorted(before | waits.sent))
        if task.event.inside:
            self.blocked = frozenset({number})
        return _Waits(self.computed if task.event.inside else max(waits.compute, 0), frozenset({number}))

    def _merged(self, task: Task, waits: _Waits) -> _Waits:
        """A parameter's message, in the bucket of its kind that is open."""
        is_gather = waits.compute < 0
        key = (task.event.kind, task.axes, waits.depth, task.event.once, is_gather)
        bucket = self.open.get(key)
        if bucket is None or bucket.nbytes + task.nbytes > self.overlap.bucket_nbytes:
            number = self._add(Segment(self.names.lane(task.axes), 0.0), ())
            # a bucket further on its way must not wait for one that opens now: ops before this may wait for it
            self.open = {k: b for k, b in self.open.items() if k[-1] != is_gather or b.depth <= waits.depth}
            bucket = self.open[key] = _Bucket(number, task, self.computed, waits.depth)
            if is_gather and not task.event.once:
                self._window(bucket)
        bucket.nbytes += task.nbytes
        bucket.members += 1
        before = waits.sent if is_gather else {waits.compute} | waits.sent
        self.edges.update(((number, bucket.segment), None) for number in sorted(before))
        seconds = task.seconds if bucket.members == 1 else self.price(task.event.kind, task.axes, bucket.nbytes)
        name = self.names.name(bucket.first, bucket.members)
        self.segments[bucket.segment] = Segment(self.names.lane(task.axes), seconds, name)
        return _Waits(waits.compute, frozenset({bucket.segment}), waits.depth + 1)

    def _window(self, bucket: _Bucket) -> None:
        """When a bucket may start: asked[k] is the op before the one for which bucket k is gathered first."""
        self.windows.append(bucket)
        place = len(self.windows) - 1 - self.overlap.ahead
        if place < 0:
            self.early.append(bucket.segment)
        else:
            self.edges[self.windows[place].asked, bucket.segment] = None
