"""Of many problems, which has the cheapest answer, solving as few as can be? Best first, by proved lower bounds.

Every problem has a lower bound at once; it may be sharpened, then refined, and then solved. Of those of least effort
the bounds are bettered first, the least of them next, then those are solved that are left, the one expected to cost
least next. One whose bound reaches the best answer, less the gap asked for, is proved to be no better; the others have
to be worked at in any case, so that the easy ones go first: their answers exclude many of the hard. Stopped early, by
the clock or by Ctrl-C, the least open bound says how far the best answer can be from the optimum.
"""

import heapq
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
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
AFTER = 4
BETTER = 0.05
"""After so many more bounds a promising one is solved if it is expected so much, as a part, below the best answer."""
AHEAD = 64
"""How many of the next are foreseen; many of them ask for the same bound."""
PATIENCE, PATIENT_PART = 60.0, 0.4
"""Seconds, or which part of those given, after which a quick answer is taken if there is none yet."""
ALIKE = (1.2, 1.03)
"""Of the promising, those expected so near the least are as good: the one of least effort is taken. For a first answer,
then for better ones."""

INTERRUPTED, TIMED_OUT, PROVED = "interrupted", "time limit", "proved"


class Known(IntEnum):
    """What was done for the bound of a problem."""

    LITTLE = 0
    SHARPENED = 1
    REFINED = 2


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

    def foresee(self, keys: Iterable[tuple[Asked, Known]], cutoff: float, seconds: float | None, solve: bool) -> None:
        """These come next, as things stand: what can be done beside may begin.

        solve: whether they will be solved then, if their bounds stay below the cutoff."""

    def sharpen(self, key: Asked, cutoff: float) -> bool:
        """Work for a better bound; afterwards `bound` gives it. True where no further work of this kind would better
        it, or it is at the cutoff, from which on an answer is of no use.

        Raises InfeasibleError if there is no answer.
        """

    def refine(self, key: Asked, cutoff: float) -> None:
        """Work harder for a better bound of one that is sharpened; once, and before it is solved."""

    def tighten(self, key: Asked, cutoff: float, seconds: float | None) -> tuple[Given, float, float] | None:
        """Work for a better bound, no better than the cutoff, of one that `solve` answered, or gave up; where a better
        answer is met on the way, that."""

    def foresee_tightening(self, keys: Sequence[Asked], cutoff: float) -> None:
        """These are tightened next."""

    def quick_plans(self, keys: Sequence[Asked], seconds: float | None) -> Iterator[tuple[Asked, Given, float]]:
        """Answers that are soon found, of some of these, and their costs; better than none at all."""

    def solve(self, key: Asked, cutoff: float, seconds: float | None) -> tuple[Given, float, float]:
        """The best answer found, its cost and a bound.

        Raises CutoffError if none is below the cutoff, InfeasibleError if there is none, SearchTimeoutError.
        """


@dataclass(slots=True, kw_only=True)
class SearchOutcome(Generic[Key, Answer]):
    """The best answer and what is proved of all. `solved`: cost, or None where there is no answer; `bounds`: of those;
    `answers`: of solving, the last of each.

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
    answers: dict[Key, Answer] = field(default_factory=dict)

    def take(self, key: Key, answer: Answer, cost: float) -> None:
        """An answer to a problem, which may be the best."""
        self.solved[key], self.answers[key] = cost, answer
        if cost < self.cost:
            self.key, self.answer, self.cost = key, answer, cost


def best_first(
    problems: Problems[Key, Answer],
    keys: Iterable[Key],
    *,
    relative_gap: float,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> SearchOutcome[Key, Answer]:
    """The cheapest answer of all, proved to `relative_gap`, or the best found in `seconds`; Ctrl-C ends it likewise.

    No answer is found where there is none, as `failures` say, or where some problems have none and the others,
    `excluded`, were given up.

    Raises:
        KeyboardInterrupt: if it came before there was any answer.
        SearchTimeoutError: if the time ended before there was any, or all problems were given up.
    """
    began = time.monotonic()
    outcome: SearchOutcome[Key, Answer] = SearchOutcome()
    keys = list(keys)
    left_open = _Open(problems, outcome)
    for key in keys:
        left_open.add(key)
    scouts = list(problems.scouts(keys))
    tried: set[Key] = set()
    last, handed = 0, math.inf
    patience = PATIENCE if seconds is None else min(PATIENCE, PATIENT_PART * seconds)
    try:
        while (first := left_open.first()) is not None:
            cutoff = outcome.cost * (1 - relative_gap)
            if left_open.bounds[first] >= cutoff:
                left_open.exclude(first)
                continue
            waited = time.monotonic() - began
            left = None if seconds is None else seconds - waited
            if outcome.answer is None and waited > patience:
                patience = math.inf
                handed = _take(problems, [*left_open.bounds, *outcome.excluded], outcome, left, tell)
                continue
            if left is not None and left <= 0:
                outcome.status = TIMED_OUT
                break
            is_first, sharpened = outcome.cost == handed, left_open.sharpened
            aim = min(map(problems.expected, sharpened), default=math.inf) * (1 - relative_gap) if is_first else cutoff
            so_far = f"{len(left_open.bounds)} of {len(keys)} open"
            scouts = [scout for scout in scouts if left_open.of(scout) == Known.LITTLE]
            if is_first and scouts:
                problems.foresee(left_open.following(aim, scouts[1:]), aim, left, False)
                tell(f"bounding {scouts[0]}: {len(scouts)} to go before a first answer, {so_far}")
                left_open.better(scouts[0], cutoff)
                continue
            promising: list[Key] = []
            if len(sharpened) >= (EARLY if is_first else last + AFTER):
                promising = left_open.promising(tried, outcome.cost * (1 - BETTER), ALIKE[not is_first])
            if is_first and promising:  # those that promise as much may turn out to promise more
                problems.foresee(((one, left_open.of(one)) for one in promising[1:]), math.inf, left, False)
            else:
                problems.foresee(left_open.following(aim), aim, left, not is_first)
            key = promising[0] if promising else first
            best = "" if outcome.answer is None else f"best {outcome.cost:.4g} s, "
            if left_open.of(key) != Known.REFINED:
                within = " within memory" if left_open.of(key) == Known.SHARPENED else ""
                tell(f"bounding {key}{within}: {best}bound {left_open.least():.4g} s, {so_far}")
                left_open.better(key, cutoff)
                continue
            if promising:
                tried.add(key)
                last = len(sharpened)
                tell(f"planning {key} for an answer that excludes many: {so_far}")
            else:
                until = "" if left is None else f", {left:.0f} s left"
                tell(f"planning {key}: {best}bound {left_open.least():.4g} s, {so_far}{until}")
            _solve(problems, key, outcome, relative_gap, left)
            left_open.remove(key)  # only now: an interrupted one is still open
        if outcome.answer is None and outcome.excluded and patience < math.inf:
            over = None if seconds is None else seconds - (time.monotonic() - began)
            _take(problems, list(outcome.excluded), outcome, over, tell)
    except KeyboardInterrupt:
        if outcome.answer is None:
            raise
        outcome.status = INTERRUPTED
    outcome.excluded.update({key: max(bound, problems.bound(key)) for key, bound in left_open.bounds.items()})
    if outcome.status == PROVED:
        try:
            deadline = None if seconds is None else began + seconds
            _tighten(problems, outcome, relative_gap, deadline, tell)
        except KeyboardInterrupt:  # the answer stands, with the bounds known so far
            outcome.status = INTERRUPTED
    outcome.bound = min([outcome.cost, *outcome.bounds.values(), *outcome.excluded.values()])
    unsolved = min(outcome.excluded.values(), default=math.inf)
    is_over = outcome.status == TIMED_OUT
    if outcome.status == PROVED and unsolved < outcome.cost * (1 - relative_gap):
        outcome.status = TIMED_OUT  # of a problem that might have been better
    if outcome.answer is None and (is_over or not outcome.failures) and outcome.status == TIMED_OUT:
        raise SearchTimeoutError(
            f"no plan was found in the time given (lower bound {outcome.bound:.4g} s); give more time or memory"
        )
    return outcome


@dataclass(slots=True)
class _Open(Generic[Key, Answer]):
    """Problems without an answer, with their bounds as last seen, in the order in which they are worked at.

    Where work for a bound shows that there is no answer the outcome is told.
    """

    problems: Problems[Key, Answer]
    outcome: SearchOutcome[Key, Answer]
    bounds: dict[Key, float] = field(default_factory=dict)
    sharpened: set[Key] = field(default_factory=set)
    refined: set[Key] = field(default_factory=set)
    _heap: list[tuple[int, bool, float, int, Key]] = field(default_factory=list)
    _numbers: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key) -> None:
        self._numbers[key] = len(self._numbers)
        heapq.heappush(self._heap, self._entry(key))

    def _entry(self, key: Key) -> tuple[int, bool, float, int, Key]:
        """Effort; whether there is nothing left but to solve it; its bound, or then what it is expected to cost."""
        bound = self.bounds[key] = self.problems.bound(key)
        is_refined = key in self.refined
        value = self.problems.expected(key) if is_refined else bound
        return math.floor(self.problems.effort(key)), is_refined, value, self._numbers[key], key

    def first(self) -> Key | None:
        """The next to be worked at."""
        while self._heap:
            entry = self._heap[0]
            if entry[-1] not in self.bounds:
                heapq.heappop(self._heap)
            elif (now := self._entry(entry[-1])) > entry:
                heapq.heapreplace(self._heap, now)
            else:
                return entry[-1]
        return None

    def of(self, key: Key) -> Known:
        return Known.REFINED if key in self.refined else Known.SHARPENED if key in self.sharpened else Known.LITTLE

    def least(self) -> float:
        return min(self.bounds.values())

    def remove(self, key: Key) -> None:
        del self.bounds[key]

    def exclude(self, key: Key) -> None:
        self.outcome.excluded[key] = self.bounds.pop(key)

    def better(self, key: Key, cutoff: float) -> None:
        """Its bound, by the work that comes next."""
        try:
            if key in self.sharpened:
                self.problems.refine(key, cutoff)
                self.refined.add(key)
            elif self.problems.sharpen(key, cutoff):
                self.sharpened.add(key)
        except InfeasibleError as error:
            if key == self.outcome.key:  # a plan of it is at hand, which holds less than was counted
                self.exclude(key)
                return
            self.outcome.solved[key], self.outcome.failures[key] = None, error
            self.remove(key)

    def following(self, aim: float, scouts: Sequence[Key] = ()) -> Iterator[tuple[Key, Known]]:
        """Those that come after the first, if the best will cost so much, and what is known of them."""
        yield from ((key, Known.LITTLE) for key in scouts)
        first = self._heap[0][-1]
        waiting = [e[-1] for e in self._heap if self.bounds.get(e[-1], math.inf) < aim and e[-1] != first]
        fresh = [self._entry(key) for key in waiting if key not in scouts]
        for *_, key in heapq.nsmallest(AHEAD, fresh):
            if self.bounds[key] < aim:
                yield key, self.of(key)

    def promising(self, tried: set[Key], below: float, as_good: float) -> list[Key]:
        """The sharpened one that is solved with least effort, of those expected, as things stand, to cost least or
        nearly so; then the others, those expected to cost least first. None if it is not expected below that."""
        costs = {key: self.problems.expected(key) for key in self.bounds if key in self.sharpened - tried}
        least = min(costs.values(), default=math.inf)
        if not costs or least > min(PROMISING * self.least(), below):
            return []
        alike = [key for key, cost in costs.items() if cost <= as_good * least]
        first = min(alike, key=lambda key: (self.problems.effort(key), costs[key], self._numbers[key]))
        return [first, *sorted(costs.keys() - {first}, key=lambda key: (costs[key], self._numbers[key]))]


def _tighten(
    problems: Problems[Key, Answer],
    outcome: SearchOutcome[Key, Answer],
    relative_gap: float,
    deadline: float | None,
    tell: Callable[[str], None],
) -> None:
    """Better bounds for those that were worked at and are not proved, the least first. One that cannot be brought to
    the cutoff says how far the others are worth while."""
    cutoff = outcome.cost * (1 - relative_gap)
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
        found = problems.tighten(key, cutoff, None if deadline is None else deadline - time.monotonic())
        owners[key][key] = max(owners[key][key], problems.bound(key))
        if found is not None and found[1] < outcome.cost:
            outcome.take(key, found[0], found[1])
            cutoff = min(cutoff, outcome.cost * (1 - relative_gap))
        cutoff = min(cutoff, owners[key][key])


def _take(
    problems: Problems[Key, Answer],
    keys: Sequence[Key],
    outcome: SearchOutcome[Key, Answer],
    left: float | None,
    tell: Callable[[str], None],
) -> float:
    """The best quick answer, if there is one; what it costs."""
    tell("looking for any plan that fits")
    for found in problems.quick_plans(keys, left):
        if found[2] < outcome.cost:  # taken at once, for whoever interrupts the next
            outcome.key, outcome.answer, outcome.cost = found
    return outcome.cost


def _solve(
    problems: Problems[Key, Answer],
    key: Key,
    outcome: SearchOutcome[Key, Answer],
    relative_gap: float,
    left: float | None,
) -> None:
    try:
        answer, cost, bound = problems.solve(key, outcome.cost * (1 - relative_gap), left)
    except CutoffError as error:
        outcome.excluded[key] = max(error.bound, problems.bound(key))
        return
    except InfeasibleError as error:
        if key == outcome.key:  # a plan of it is at hand, which holds less than was counted
            outcome.excluded[key] = min(problems.bound(key), outcome.cost)
            return
        outcome.solved[key] = None
        outcome.failures[key] = error
        return
    except SearchTimeoutError:
        outcome.excluded[key] = problems.bound(key)
        return
    outcome.bounds[key] = max(bound, problems.bound(key))
    outcome.take(key, answer, cost)
