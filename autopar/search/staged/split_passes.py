"""What does each part of a backward pass hold where the part of the weights runs later?

`lower.split_backward` says what each part runs. The first frees nothing, since autograd's graph stays, and notes the
gradients that heads of branches of the second get, which runs those branches from their heads.
"""

from collections import Counter
from dataclasses import dataclass, replace

from autopar.lower.gradients import Gradients
from autopar.lower.holding import LEAVES, Holding
from autopar.lower.live import Live
from autopar.lower.split_backward import Cut, find_cut, recomputed_late, recomputed_readers
from autopar.rules.spare import gives_all


@dataclass(frozen=True, slots=True, kw_only=True)
class PassParts:
    """What is live while a part runs, `first` and `second`, and between the two: `left`. returned: bytes of gradients
    that the first part gives back."""

    first: tuple[Holding, ...]
    second: tuple[Holding, ...]
    left: tuple[Holding, ...]
    returned: float


NO_PARTS = PassParts(first=(), second=(), left=(), returned=0.0)
"""Of a backward pass in one piece."""


def split_passes(live: Live, kept: list[Holding], back: list[Holding]) -> PassParts:
    """Both parts, of what is kept from forward and what a whole backward pass holds."""
    cut = find_cut(live.step)
    later, heads = cut.later, cut.heads
    spans = _Spans(live, cut)
    beside: tuple[list[Holding], list[Holding]] = [], []
    for holding in back:
        if holding.first >= spans.turn and not holding.role:
            number = spans.number_at[holding.first]
            is_first = number not in spans.late and cut.is_first(live.calls[number])
            beside[not is_first].append(holding)
            if is_first and number in heads and holding.first == live.backward[number]:
                beside[1].append(holding)
    stored = [*kept, *(h for h in beside[0] if _is_stored(h))]
    stays = [(h, span) for h in stored if (span := spans.second(h)) is not None]
    first = live.gradients(wanted=lambda value: value not in later, copies=False, noted=heads)
    second = live.gradients(heads, wanted=lambda value: value in later, copies=False)
    given = {id(g) for (name, _), g in first.held.items() if live.redistributed[name].tensor.kind != "parameter"}
    noted = {number: g for number in sorted(heads) if (g := first.arrived.get(number)) is not None}
    until: dict[int, int] = {}
    for number, g in noted.items():
        until[id(g)] = max(until.get(id(g), 0), _over(live, cut, number))
    for number in sorted(heads):
        mine, other = _made_beside(live, cut, number)
        beside[0].append(mine)
        beside[1].append(other)
    noting = {
        key: Holding("working", g.name, g.nbytes, g.since, until[key])
        for key, g in {id(g): g for g in noted.values()}.items()
    }
    return PassParts(
        first=(
            *map(spans.first, stored),
            *(replace(h, last=spans.end - 1) for key, h in noting.items() if key not in given),
            *(h for h in beside[0] if not _is_stored(h)),
            *(replace(h, last=spans.end - 1) if h.role in LEAVES else h for h in live.holdings_of(first)),
        ),
        second=(
            *(span for _, span in stays),
            *(replace(h, first=0) for h in noting.values()),
            *beside[1],
            *live.holdings_of(second),
        ),
        left=(*(replace(h, first=0, last=spans.end - 1) for h, _ in stays), *noting.values()),
        returned=_returned(live, first, set(noting)),
    )


def _over(live: Live, cut: Cut, head: int) -> int:
    """The last moment of the branch below a head, whose gradient is there until then."""
    below, last = set(live.calls[head].operands) & cut.later, live.backward[head]
    for number in reversed(range(head)):
        call = live.calls[number]
        if not below.isdisjoint(call.results):
            last = live.backward[number]
            below.update(cut.later.intersection(call.operands))
    return last


def _made_beside(live: Live, cut: Cut, number: int) -> tuple[Holding, Holding]:
    """What a head's kernel makes in each part though only the other one asks for it."""
    call, moment = live.calls[number], live.backward[number]
    in_part = [0.0, 0.0]
    if call.op is not None and gives_all(call.op.node):
        for (name, layout), wanted in zip(call.operands, call.gradients, strict=True):
            if wanted:
                in_part[(name, layout) in cut.way] += live.target.local_nbytes(live.redistributed[name].tensor, layout)
    first, second = (
        Holding("working", call.results[0][0] if call.results[0] else "", n, moment, moment) for n in in_part
    )
    return first, second


def _is_stored(holding: Holding) -> bool:
    """Whether a replay makes it, or a call in a replay keeps it."""
    return holding.layout is not None or holding.kind == "activations"


def _returned(live: Live, found: Gradients, noted: set[int]) -> float:
    """Bytes of gradients of what a stage received. What is noted, or passes through, is copied."""
    total, counted = 0.0, set[int]()
    shared = Counter(id(gradient) for gradient in found.held.values())  # copied for all but one, which has it
    for name in live.program.captured.received:
        one = live.redistributed[name]
        value = name, one.source
        gradient = found.held.get(value)
        if not one.tensor.requires_grad or (gradient is not None and id(gradient) in counted):
            continue
        is_shared = gradient is not None and shared[id(gradient)] > 1
        is_others = value in found.lent or gradient in found.passed
        if gradient is None or is_shared or is_others or id(gradient) in noted:
            total += live.target.local_nbytes(one.tensor, one.source)
        else:
            total += gradient.nbytes
            counted.add(id(gradient))
    return total


class _Spans:
    """From when to when something that is kept, or replayed in the first part, is there in each part.

    The first part frees nothing that a call has saved; what only replays read goes with the last of them. After it
    stays what calls below heads have saved: to the backward pass of the call, if the second part runs it, else to that
    of the last head above it.
    """

    def __init__(self, live: Live, cut: Cut) -> None:
        self.live, self.turn, self.end = live, len(live.calls), live.end
        self.number_at = {moment: i for moments in (live.backward, live.replay) for i, moment in moments.items()}
        self.late = recomputed_late(live.step, cut)
        self.readers = recomputed_readers(live.step)
        self.until = self._until(cut)

    def _until(self, cut: Cut) -> dict[int, int]:
        """Of calls below heads, the moment at which the second part lets go of them."""
        maker = {value: number for number, call in enumerate(self.live.calls) for value in call.results if value}
        until: dict[int, int] = {}
        for number in reversed(range(self.turn)):
            call = self.live.calls[number]
            if number in cut.heads or any(value in cut.later for value in call.results):
                until[number] = self.live.backward[number]
            if number in until:
                for value, wanted in zip(call.operands, call.gradients, strict=True):
                    if wanted and value in maker:
                        below = maker[value]
                        until[below] = max(until.get(below, 0), until[number])
        return until

    def _users(self, holding: Holding) -> tuple[list[int], list[int]]:
        """Calls that have saved it, and those that are replayed with it."""
        if holding.layout is None:
            return [self.number_at[min(holding.last, self.end - 1)]], []
        value = holding.name, holding.layout
        return [self.live.at[p] for p in self.live.recomputation.savers.get(value, ())], self.readers.get(value, [])

    def first(self, holding: Holding) -> Holding:
        """In the first part."""
        savers, readers = self._users(holding)
        if holding.last == self.end - 1 or savers or any(number in self.late for number in readers):
            return replace(holding, last=self.end - 1)
        return holding

    def second(self, holding: Holding) -> Holding | None:
        """In the second part, None if it is gone."""
        if holding.role == "end" and holding.layout is None:
            return None
        if holding.role == "sent":
            return replace(holding, first=0)
        savers, readers = self._users(holding)
        moments = [self.until[number] for number in savers if number in self.until]
        moments += [self.live.replay[number] for number in readers if number in self.late]
        return replace(holding, first=0, last=max(moments)) if moments else None
