"""What does each part of a backward pass hold where the part of the weights runs later?

As `runtime.split_backward` cuts it: values that depend on what the stage received are *on the way*; the others with a
gradient form branches, and calls on the way that read a branch, or results of the stage in it, are its heads. The
first part runs every call on the way, and branches with several heads. It frees nothing, since autograd's graph stays,
and notes the gradients that heads of other branches get. The second part runs those branches from their heads.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from autopar.search.costs.calls import Call
from autopar.search.costs.live import Holding, Live
from autopar.search.costs.replays import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is live while a part runs, `first` and `second`, and between the two: `left`."""

    first: tuple[Holding, ...]
    second: tuple[Holding, ...]
    left: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which part runs what. way: values whose gradients the first part hands on; later: those of the second; heads:
    numbers of the calls that run in both."""

    way: set[Value]
    later: set[Value]
    heads: set[int]

    def is_first(self, call: Call) -> bool:
        """Whether the first part runs a call's backward pass, or some of it."""
        return any(value in self.way for value in call.results) or not any(v in self.later for v in call.results)


def find_cut(live: Live) -> Cut:
    """Where a stage's backward pass is cut."""
    way = _on_the_way(live)
    later, heads = _later(live, way)
    return Cut(way=way, later=later, heads=heads)


def split_passes(live: Live, kept: list[Holding], back: list[Holding]) -> Parts:
    """Both parts, of what is kept from forward and what a whole backward pass holds."""
    turn, end = len(live.calls), live.end
    cut = find_cut(live)
    way, later, heads = cut.way, cut.later, cut.heads
    number_at = {moment: i for moments in (live.backward, live.replay) for i, moment in moments.items()}
    awaited = _replayed_later(live, later)
    beside: tuple[list[Holding], list[Holding]] = [], []
    for holding in back:
        if holding.first >= turn and not holding.role:
            is_first = cut.is_first(live.calls[number_at[holding.first]])
            beside[not is_first or (holding.name, holding.first) in awaited].append(holding)
    replayed = [h for h in beside[0] if h.kind == "activations"]
    first = live.gradients(wanted=lambda value: value not in later)
    second = live.gradients(heads, wanted=lambda value: value in later)
    given = {id(g) for (name, _), g in first.held.items() if live.journeys[name].tensor.kind != "parameter"}
    noted = {id(g): g for number in heads if (g := first.arrived.get(number)) is not None}
    # What is noted and sent back too is copied when it is sent.
    noting = [
        Holding("working", g.name, g.nbytes, end - 1 if i in given else g.since, end - 1) for i, g in noted.items()
    ]
    passing = [h for h in beside[0] if h.kind != "activations"]
    whole = [replace(h, last=end - 1) for h in (*kept, *replayed)]
    below = _below(live, heads)
    left = [h for h in kept if h.last == end - 1]  # what was sent
    if later:
        stay = [h for h in (*kept, *replayed) if not way or number_at[min(h.last, end - 1)] in below]
        left = [*(replace(h, last=end - 1) for h in {*left, *stay}), *noting]
    return Parts(
        first=(*whole, *noting, *passing, *live.holdings_of(first)),
        second=(*(replace(h, first=0) for h in (left if way else kept)), *beside[1], *live.holdings_of(second)),
        left=tuple(left),
    )


def _replayed_later(live: Live, later: set[Value]) -> set[tuple[str, int]]:
    """Replayed tensors, with their moments, that only gradients of weights wait for: a product's left operand."""
    left: dict[int, Value] = {}
    for call in live.calls:
        product = None if call.op is None else call.op.rule.product
        if call.op is not None and product is not None and call.operands[product.right] in later:
            left[call.op.position] = live.root(*call.operands[product.left])
    found = set()
    for number, call in enumerate(live.calls):
        for value in call.results:
            if value is not None and value in live.replays.first:
                savers = live.replays.savers.get(value, ())
                uses = live.replays.uses[value]
                if all(p in left and (left[p] == value or p not in savers) for p in uses):
                    found.add((value[0], live.replay[number]))
    return found


def _below(live: Live, heads: set[int]) -> set[int]:
    """Calls that autograd's graph holds below heads: those whose results they read, and so on."""
    maker = {value: number for number, call in enumerate(live.calls) for value in call.results if value is not None}
    found = set(heads)
    for number in reversed(range(len(live.calls))):
        if number in found:
            call = live.calls[number]
            sources = (v for v, wanted in zip(call.operands, call.gradients, strict=True) if wanted)
            found.update(maker[value] for value in sources if value in maker)
    return found


def _on_the_way(live: Live) -> set[Value]:
    """Values with a gradient that depend on what the stage received."""
    received = set(live.program.captured.received)
    way: set[Value] = set()
    for call in live.calls:
        for value, wanted in zip(call.operands, call.gradients, strict=True):
            if wanted and (value in way or value[0] in received):
                way.add(value)
                way.update(result for result in call.results if result is not None)
    return way


def _later(live: Live, way: set[Value]) -> tuple[set[Value], set[int]]:
    """Values of branches with one head, and the calls on the way that are such heads."""
    leader: dict[Value, Value] = {}

    def of(value: Value) -> Value:
        while leader.setdefault(value, value) != value:
            value = leader[value]
        return value

    heads: dict[Value, set[object]] = defaultdict(set)
    reads: list[tuple[int, Value]] = []
    for number, call in enumerate(live.calls):
        wanted = [v for v, w in zip(call.operands, call.gradients, strict=True) if w and v not in way]
        results = [v for v in call.results if v is not None]
        if any(v in way for v in results):
            reads += [(number, value) for value in wanted]
        elif wanted:
            for value in (*wanted[1:], *results):
                leader[of(value)] = of(wanted[0])
    for number, value in reads:
        heads[of(value)].add(number)
    for name in live.program.captured.ends:
        for _, _, layout in (w for w in live.journeys[name].wanted if w[0] < 0):
            if (name, layout) not in way:
                heads[of((name, layout))].add(name)
    later = {value for value in leader if len(heads[of(value)]) == 1}
    return later, {number for number, value in reads if value in later}
