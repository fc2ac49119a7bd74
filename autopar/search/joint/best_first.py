"""Of many problems, which has the cheapest answer, solving as few as can be? Best first, by proved lower bounds.

Every problem has a lower bound at once; it may be sharpened, and it may be solved. Of those of least effort the one
whose bound is least is taken next: sharpened if it was not, else solved. One whose bound reaches the best answer, less
the gap asked for, is proved to be no better; the others have to be worked at in any case, so that the easy ones go
first: their answers exclude many of the hard. Stopped early, by the clock or by Ctrl-C, the least open bound says how
far the best answer can be from the optimum.
"""

import heapq
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.search.exact.ilp import CutoffError

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
Asked = TypeVar("Asked")
Given = TypeVar("Given", covariant=True)

EARLY = 5
"""Bounds after which a promising problem is solved, though others are open: an answer excludes many."""
PROMISING = 2.0
"""How far above the least open bound the expected cost of one may be that is solved for a first answer."""
AFTER = 12
BETTER = 0.15
"""After so many more bounds a promising one is solved if it is expected so much, as a part, below the best answer."""
AHEAD = 64
"""How many of the next are foreseen; many of them ask for the same bound."""
ALIKE = 1.03
"""Of the promising, those expected so near the least are as good: the one of least effort is taken."""

INTERRUPTED, TIMED_OUT, PROVED = "interrupted", "time limit", "proved"


class Problems(Protocol[Asked, Given]):
    """What is searched. Bounds and costs are in seconds; a bound never falls."""

    def bound(self, key: Asked) -> float:
        """What every answer costs at least, as far as is known without work."""

    def expected(self, key: Asked) -> float:
        """What its answer will probably cost, the bound or more: it guides, and proves nothing."""

    def effort(self, key: Asked) -> float:
        """How hard it is to solve, beside others; those that are less by a whole are worked at first."""

    def scouts(self, keys: Sequence[Asked]) -> Sequence[Asked]:
        """Of many problems those that are bounded before all others: among them a good first answer is expected."""

    def foresee(self, keys: Iterable[tuple[Asked, bool]], cutoff: float, seconds: float | None, solve: bool) -> None:
        """These come next, as things stand: what can be done beside may begin. True: those that are sharpened.

        solve: whether they will be solved then, if their bounds stay below the cutoff."""

    def sharpen(self, key: Asked, cutoff: float) -> bool:
        """Work for a better bound; afterwards `bound` gives it. True where no further work would better it, or it is
        at the cutoff, from which on an answer is of no use.

        Raises InfeasibleError if there is no answer.
        """

    def tighten(self, key: Asked, cutoff: float) -> None:
        """Work for a better bound, no better than the cutoff, of one that `solve` answered, or gave up."""

    def foresee_tightening(self, keys: Sequence[Asked], cutoff: float) -> None:
        """These are tightened next."""

    def solve(self, key: Asked, cutoff: float, seconds: float | None) -> tuple[Given, float, float]:
        """The best answer found, its cost and a bound.

        Raises CutoffError if none is below the cutoff, InfeasibleError if there is none, SearchTimeoutError.
        """


@dataclass(slots=True, kw_only=True)
class Outcome(Generic[Key, Answer]):
    """The best answer and what is proved of all. `solved`: cost, or None where there is no answer; `bounds`: of those.

    excluded: those never solved, or left when that was proved to lead nowhere, with their bounds.
    """

    key: Key | None = None
    answer: Answer | None = None
    cost: float = math.inf
    bound: float = math.inf
    status: str = PROVED
    solved: dict[Key, float | None] = field(default_factory=dict)
    bounds: dict[Key, float] = field(default_factory=dict)
    excluded: dict[Key, float] = field(default_factory=dict)
    failures: dict[Key, InfeasibleError] = field(default_factory=dict)


def best_first(
    problems: Problems[Key, Answer],
    keys: Iterable[Key],
    *,
    relative_gap: float,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome[Key, Answer]:
    """The cheapest answer of all, proved to `relative_gap`, or the best found in `seconds`; Ctrl-C ends it likewise.

    Raises:
        KeyboardInterrupt: if it came before there was any answer.
        SearchTimeoutError: if the time ended before there was any.
    """
    began = time.monotonic()
    outcome: Outcome[Key, Answer] = Outcome()
    keys = list(keys)
    heap = [(math.floor(problems.effort(key)), problems.bound(key), number, key) for number, key in enumerate(keys)]
    scouts = list(problems.scouts(keys))
    heapq.heapify(heap)
    count = len(heap)
    sharpened: set[Key] = set()
    tried: set[Key] = set()
    last = 0
    try:
        while heap:
            cutoff = outcome.cost * (1 - relative_gap)
            tier, bound, number, key = heap[0]
            known = problems.bound(key)
            if known > bound:
                heapq.heapreplace(heap, (tier, known, number, key))
                continue
            if bound >= cutoff:
                outcome.excluded[key] = bound
                heapq.heappop(heap)
                continue
            left = None if seconds is None else seconds - (time.monotonic() - began)
            if left is not None and left <= 0:
                outcome.status = TIMED_OUT
                break
            aim = cutoff
            if outcome.answer is None:
                aim = min((problems.expected(key) for key in sharpened), default=math.inf) * (1 - relative_gap)
            scouts = [key for key in scouts if key not in sharpened and key not in outcome.solved]
            if scouts and outcome.answer is None:
                problems.foresee(_next(problems, heap, sharpened, aim, scouts[1:]), aim, left, False)
                tell(f"bounding {scouts[0]}: {len(scouts)} to go before a first answer, {len(heap)} of {count} open")
                _sharpen(problems, scouts[0], outcome, sharpened, cutoff)
                heap = [entry for entry in heap if entry[3] not in outcome.solved]
                heapq.heapify(heap)
                continue
            problems.foresee(_next(problems, heap, sharpened, aim), aim, left, outcome.answer is not None)
            is_due = len(sharpened) >= (EARLY if outcome.answer is None else last + AFTER)
            if is_due and (ahead := _promising(problems, heap, sharpened - tried, outcome.cost * (1 - BETTER))):
                tried.add(ahead[3])
                last = len(sharpened)
                tell(f"planning {ahead[3]} for an answer that excludes many: {len(heap)} of {count} open")
                _solve(problems, ahead[3], outcome, relative_gap, left)
                heap.remove(ahead)
                heapq.heapify(heap)
                continue
            until = "" if left is None else f", {left:.0f} s left"
            best = f"{outcome.cost:.4g} s, " if outcome.answer is not None else ""
            work = "planning" if key in sharpened else "bounding"
            least = min(entry[1] for entry in heap)
            tell(f"{work} {key}: best {best}bound {least:.4g} s, {len(heap)} of {count} open{until}")
            if key not in sharpened:
                _sharpen(problems, key, outcome, sharpened, cutoff)
                if key in outcome.solved:
                    heapq.heappop(heap)
                continue
            _solve(problems, key, outcome, relative_gap, left)
            heapq.heappop(heap)  # only now: an interrupted one is still open
    except KeyboardInterrupt:
        if outcome.answer is None:
            raise
        outcome.status = INTERRUPTED
    outcome.excluded.update({key: max(bound, problems.bound(key)) for _, bound, _, key in heap})
    if outcome.status == PROVED:
        try:
            deadline = None if seconds is None else began + seconds
            _tighten(problems, outcome, outcome.cost * (1 - relative_gap), deadline, tell)
        except KeyboardInterrupt:  # the answer stands, with the bounds known so far
            outcome.status = INTERRUPTED
    outcome.bound = min([outcome.cost, *outcome.bounds.values(), *outcome.excluded.values()])
    unsolved = min(outcome.excluded.values(), default=math.inf)
    if outcome.status == PROVED and unsolved < outcome.cost * (1 - relative_gap):
        outcome.status = TIMED_OUT  # of a problem that might have been better
    if outcome.answer is None and outcome.status == TIMED_OUT:
        raise SearchTimeoutError(
            f"no plan was found in the time given (lower bound {outcome.bound:.4g} s); give more time or memory"
        )
    return outcome


def _next(
    problems: Problems[Key, Answer],
    heap: list[tuple[int, float, int, Key]],
    sharpened: set[Key],
    aim: float,
    scouts: Sequence[Key] = (),
) -> Iterator[tuple[Key, bool]]:
    """Those that come next but for the one whose turn it is, if the best will cost so much, and whether they are
    sharpened; bounds in the heap may be old."""
    yield from ((key, False) for key in scouts)
    waiting = [entry for entry in heap[1:] if entry[1] < aim and entry[3] not in scouts]
    fresh = [(tier, problems.bound(key), number, key) for tier, _, number, key in waiting]
    yield from ((key, key in sharpened) for _, bound, _, key in heapq.nsmallest(AHEAD, fresh) if bound < aim)


def _promising(
    problems: Problems[Key, Answer], heap: list[tuple[int, float, int, Key]], among: set[Key], below: float
) -> tuple[int, float, int, Key] | None:
    """The entry that is solved with least effort, of those expected, as things stand, to cost least or nearly so."""
    entries = [(problems.expected(entry[3]), entry) for entry in heap if entry[3] in among]
    least = min((cost for cost, _ in entries), default=math.inf)
    if least > min(PROMISING * min(entry[1] for entry in heap), below):
        return None
    alike = [(problems.effort(entry[3]), cost, entry[2], entry) for cost, entry in entries if cost <= ALIKE * least]
    return min(alike, default=(0.0, 0.0, 0, None))[3]


def _tighten(
    problems: Problems[Key, Answer],
    outcome: Outcome[Key, Answer],
    cutoff: float,
    deadline: float | None,
    tell: Callable[[str], None],
) -> None:
    """Better bounds for those that were worked at and are not proved, the least first. One that cannot be brought to
    the cutoff says how far the others are worth while."""
    owners = {key: known for known in (outcome.excluded, outcome.bounds) for key in known}
    left = sorted((key for key in owners if owners[key][key] < cutoff), key=lambda key: owners[key][key])
    while left:
        key, *left = left
        if deadline is not None and time.monotonic() >= deadline:
            return
        if owners[key][key] >= cutoff:
            continue
        problems.foresee_tightening(left, cutoff)
        tell(f"tightening the bound of {key}")
        problems.tighten(key, cutoff)
        owners[key][key] = max(owners[key][key], problems.bound(key))
        cutoff = min(cutoff, owners[key][key])


def _sharpen(
    problems: Problems[Key, Answer], key: Key, outcome: Outcome[Key, Answer], sharpened: set[Key], cutoff: float
) -> None:
    try:
        if problems.sharpen(key, cutoff):
            sharpened.add(key)
    except InfeasibleError as error:
        outcome.solved[key], outcome.failures[key] = None, error


def _solve(
    problems: Problems[Key, Answer], key: Key, outcome: Outcome[Key, Answer], relative_gap: float, left: float | None
) -> None:
    try:
        answer, cost, bound = problems.solve(key, outcome.cost * (1 - relative_gap), left)
    except CutoffError as error:
        outcome.excluded[key] = max(error.bound, problems.bound(key))
        return
    except InfeasibleError as error:
        outcome.solved[key] = None
        outcome.failures[key] = error
        return
    except SearchTimeoutError:
        outcome.excluded[key] = problems.bound(key)
        return
    outcome.solved[key] = cost
    outcome.bounds[key] = max(bound, problems.bound(key))
    if cost < outcome.cost:
        outcome.key, outcome.answer, outcome.cost = key, answer, cost
