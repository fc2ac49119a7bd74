"""Which part of a backward pass that is cut in two runs what? The part of the weights may run later.

As `runtime.split_backward` cuts it: values that depend on what the stage received are *on the way*; the others with a
gradient form branches, and calls on the way that read a branch, or results of the stage in it, are its heads. The
first part runs every call on the way, and branches with several heads; the second runs the others from their heads.

A head runs in both: first towards what is on the way, later towards its branch, and what it gathers for that is
gathered twice. Collectives inside a head run once, in the first part. Autograd takes all that a head has saved whenever
it runs, so a recomputed call is the first part's if any reader is. What is paid once a step follows the second part,
which ends last.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.lower.calls import LoweredCall
from autopar.lower.events import Event
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.recomputation import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which part runs what. way: values whose gradients the first part hands on; later: those of the second; heads:
    numbers of the calls that run in both."""

    way: set[Value]
    later: set[Value]
    heads: set[int]

    def is_first(self, call: LoweredCall) -> bool:
        """Whether the first part runs a call's backward pass, or some of it."""
        return any(value in self.way for value in call.results) or not any(v in self.later for v in call.results)


def find_cut(step: LoweredStep) -> Cut:
    """Where a stage's backward pass is cut."""
    way = _on_the_way(step)
    later, heads = _later(step, way)
    return Cut(way=way, later=later, heads=heads)


def split_events(step: LoweredStep, events: Iterable[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """The events of both parts of a backward pass, each in the order of the whole."""
    cut = find_cut(step)
    late = recomputed_late(step, cut)
    first: list[Event] = []
    second: list[Event] = []
    for event in events:
        if event.once:
            second.append(event)
        elif event.again:
            (second if event.call in late else first).append(event)
        else:
            for part, own in zip((first, second), _halves(event, step.calls[event.call], cut), strict=True):
                part += own
    return tuple(first), tuple(second)


def _halves(event: Event, call: LoweredCall, cut: Cut) -> tuple[list[Event], list[Event]]:
    """What each part runs of a call's backward pass, and of a gather for it."""
    wanted = [slot for slot, has_gradient in enumerate(call.gradients) if has_gradient]
    later = frozenset(slot for slot in wanted if call.operands[slot] in cut.later)
    if not later:
        return [event], []
    if len(later) == len(wanted):
        return [], [event]
    if event.makes[0][0] == "gathered":
        return [event], [event]
    if event.inside:
        return [event], []
    return [_towards(event, call, frozenset(wanted) - later)], [_towards(event, call, later)]


def _towards(event: Event, call: LoweredCall, slots: frozenset[int]) -> Event:
    """A head's backward pass, the part that gives these operands their gradients."""
    makes = tuple(("gradient", *call.operands[slot], -1) for slot in sorted(slots))
    return replace(event, towards=slots, makes=makes)


def recomputed_readers(step: LoweredStep) -> dict[Value, list[int]]:
    """Calls that are replayed, by what they read."""
    readers: dict[Value, list[int]] = defaultdict(list)
    for number in step.replay:
        for operand in step.calls[number].operands:
            readers[step.root(*operand)].append(number)
    return readers


def recomputed_late(step: LoweredStep, cut: Cut) -> set[int]:
    """Calls that are replayed for the second part alone."""
    readers = recomputed_readers(step)
    late: set[int] = set()
    for number in sorted(step.replay, reverse=True):
        call, waiting = step.calls[number], set[int]()
        if call.op is not None and call.op.has_backward and call.op.rule.saves_nbytes:
            waiting.add(number)
        for value in call.results:
            if value is not None:
                waiting.update(step.at[position] for position in step.recomputation.savers.get(value, ()))
        again = [reader for value in call.results if value is not None for reader in readers.get(value, ())]
        if not any(cut.is_first(step.calls[saver]) for saver in waiting) and all(reader in late for reader in again):
            late.add(number)
    return late


def _on_the_way(step: LoweredStep) -> set[Value]:
    """Values with a gradient that depend on what the stage received."""
    received = set(step.program.captured.received)
    way: set[Value] = set()
    for call in step.calls:
        for value, wanted in zip(call.operands, call.gradients, strict=True):
            if wanted and (value in way or value[0] in received):
                way.add(value)
                way.update(result for result in call.results if result is not None)
    return way


def _later(step: LoweredStep, way: set[Value]) -> tuple[set[Value], set[int]]:
    """Values of branches with one head, and the calls on the way that are such heads."""
    leader: dict[Value, Value] = {}

    def of(value: Value) -> Value:
        while leader.setdefault(value, value) != value:
            value = leader[value]
        return value

    heads: dict[Value, set[object]] = defaultdict(set)
    reads: list[tuple[int, Value]] = []
    for number, call in enumerate(step.calls):
        if call.step is not None and step.is_once_a_step(call.operands[0][0]):
            continue  # leaves are what it makes
        wanted = [v for v, w in zip(call.operands, call.gradients, strict=True) if w and v not in way]
        results = [v for v in call.results if v is not None]
        if any(v in way for v in results):
            reads += [(number, value) for value in wanted]
        elif wanted:
            for value in (*wanted[1:], *results):
                leader[of(value)] = of(wanted[0])
    for number, value in reads:
        heads[of(value)].add(number)
    for name in step.program.captured.ends:
        for _, _, layout in (w for w in step.redistributed[name].wanted if w[0] < 0):
            if (name, layout) not in way:
                heads[of((name, layout))].add(name)
    later = {value for value in leader if len(heads[of(value)]) == 1}
    return later, {number for number, value in reads if value in later}
