"""Which choice of a pairwise graph is cheapest, and how far can any other be below it? Two threads on a reduced graph.

- The *proof* raises a lower bound by prices and messages (`bound`) until it rises no more, then climbs the ladder of
  mixed programs (`restricted`); where these would be too large it ends, and its thread joins the search.
- The *search* anneals and solves regions (`anytime`), guided by what the bound soon leaves over, from what its messages
  suggest.

Each tells the other what it found: costs close options for the proof, choices of the programs join the search. Mixed
programs run in processes of their own, that may be killed. The end comes when the gap is closed, or with the time.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

import numpy as np

from autopar.errors import InfeasibleError, PassError, SearchTimeoutError
from autopar.search.exact.array_worker import Worker
from autopar.search.exact.highs_log import Progress
from autopar.search.graph.strategy_graph import Solution
from autopar.search.pairwise.anytime import AnytimeSearch, Outside, SearchOver
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.least_memory import below, least_memory
from autopar.search.pairwise.problem import Ints, Pairwise, evaluate, fits
from autopar.search.pairwise.reduce.pipeline import Reduced, reduce
from autopar.search.pairwise.restricted import first_rung, solve_restricted
from autopar.search.pairwise.tighten import Tightened, tighten

REDUCTION_SHARE = 0.35
"""Of the time, at most."""
GUIDE_SHARE, GUIDE_SECONDS = 0.03, 5.0
"""Of the time left, and at most: how long the bound climbs before the search begins, by what it leaves over."""
GUIDE_GROWTH = 1.3
"""Of the time the bound has climbed, from one guide to the next."""
SLOW_SECONDS, SLOW_SHARE, SLOW_GAIN = 10.0, 0.2, 0.03
"""A bound is left that in so many seconds, or such a share of those it has climbed, closed less of the gap,"""
CLIMB_SHARE = 0.3
"""but not before such a share of the time."""
LADDER_PAIRS = 250_000
"""Open pairs of the first mixed program beyond which none is tried: V's 78,000 were solved, K's 460,000 never tried."""
TURN_SECONDS, TURN_SHARE = 6.0, 0.1
"""Of what is left, for a turn of closing and reducing."""
AGAIN_GAIN = 0.3
"""Of the gap: what must have been closed before what is left is looked at again."""
JOINED_SECONDS = 5.0
LEAST_SECONDS = 60.0
"""For the least memory that would do, where no time is given."""
WAIT_SECONDS = 0.02
"""Between two looks for the first guide."""
ASCENT_SECONDS = 0.5
"""Between two looks at what the search has found."""
PATIENCE_SECONDS = 0.5
"""At most, for the proof to hear that the time is over: what it proves later is of no use."""
ENDING_SECONDS, ENDING_SECONDS_A_PAIR = 0.3, 5e-8
"""Kept for lifting and evaluating the answer."""


def solve(
    problem: Pairwise,
    *,
    seconds: float | None = None,
    relative_gap: float = 0.0,
    seed: int = 0,
    start: Ints | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The cheapest choice found in `seconds` (None: until it is proved), with a lower bound on every choice's cost.

    Args:
        relative_gap: stop when the choice is proved to be within this of the optimum.
        start: a choice to begin with; it need not fit.
        on_progress: told the best cost and the bound as they improve.

    An interrupt (Ctrl-C) ends the search with the best so far.

    Raises:
        InfeasibleError: if it is proved that no choice is allowed or fits; says the least limit that would do.
        SearchTimeoutError: if none was found in time.
    """
    began = monotonic()
    try:
        return _search_and_prove(
            problem, seconds=seconds, relative_gap=relative_gap, seed=seed, start=start, on_progress=on_progress
        )
    except InfeasibleError as error:
        left = LEAST_SECONDS if seconds is None else max(seconds - (monotonic() - began), 0.0)
        raise _with_least(problem, error, left) from error


def _with_least(problem: Pairwise, error: InfeasibleError, seconds: float) -> InfeasibleError:
    """Told how much would do, as far as that is found in time."""

    def fitting(at: Pairwise, seconds: float) -> Ints:
        return np.asarray(_search_and_prove(at, seconds=seconds).choice, np.int64)

    if problem.limit == np.inf or seconds <= 0.0:
        return error
    known = problem.limit if error.least_nbytes is None else below(error.least_nbytes)
    try:
        least = least_memory(problem, fitting, refuted=max(known, problem.limit), seconds=seconds)
    except InfeasibleError:
        return InfeasibleError("no choice is allowed under any limit: every one has an infinite option or pair")
    except SearchTimeoutError:
        return error
    need = f"the least that would do is {least.reached:,.0f}"
    if not least.proved:
        need = f"more than {least.refuted:,.0f} are needed, {least.reached:,.0f} would do"
    return InfeasibleError(
        f"no choice fits into {problem.limit:,.0f} bytes: {need}; raise the limit", least_nbytes=least.reached
    )


def _search_and_prove(
    problem: Pairwise,
    *,
    seconds: float | None = None,
    relative_gap: float = 0.0,
    seed: int = 0,
    start: Ints | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    began = monotonic()
    ending = ENDING_SECONDS + ENDING_SECONDS_A_PAIR * len(problem.pair_cost)
    stop = np.inf if seconds is None else began + max(seconds - ending, 0.5 * seconds)
    reduced = reduce(problem, seconds=None if seconds is None else REDUCTION_SHARE * seconds)
    reduced_at = monotonic()
    if reduced.problem.num_nodes == 0:
        choice = reduced.lift(np.zeros(0, np.int64))
        phases = {"reduction": reduced_at - began}
        return _solution(problem, choice, reduced.offset, "optimal", phases)
    race = _Race(reduced, stop=stop, relative_gap=relative_gap, seed=seed, began=began, on_progress=on_progress)
    race.run(None if start is None else reduced.lower(start))
    phases = {"reduction": reduced_at - began, "search and proof": monotonic() - reduced_at}
    if race.failed is not None:
        raise race.failed
    if race.best is None:
        if race.dual.bound == np.inf:
            raise InfeasibleError(
                f"no choice fits into {problem.limit:,.0f} bytes, proved by its lower bound; raise the limit"
            )
        raise SearchTimeoutError(
            f"no choice within {problem.limit:,.0f} bytes was found in {monotonic() - began:.0f} s, nor is it proved "
            "that there is none; give more time or raise the limit"
        )
    choice = reduced.lift(race.best)
    status = "optimal" if race.proved() else "interrupted" if race.interrupted else "time limit"
    return _solution(problem, choice, race.dual.bound + reduced.offset, status, phases)


def _solution(problem: Pairwise, choice: Ints, bound: float, status: str, phases: dict[str, float]) -> Solution:
    cost = evaluate(problem, choice)
    if not fits(problem, choice):
        raise PassError("a lifted choice is over the limit")
    return Solution(choice=choice, arcs=(), seconds=cost, bound=min(bound, cost), status=status, phases=phases)


class _Race:
    """Search and proof on one reduced graph; whoever closes the gap ends both."""

    def __init__(
        self,
        reduced: Reduced,
        *,
        stop: float,
        relative_gap: float,
        seed: int,
        began: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.reduced, self.problem = reduced, reduced.problem
        self.stop, self.relative_gap, self.seed, self.began = stop, relative_gap, seed, began
        self.on_progress = on_progress
        self.dual = DualBound(self.problem)
        self.guide: Guide | None = None
        self.lock = threading.Lock()
        self.prover, self.regions = Worker(), Worker()
        self.best: Ints | None = None
        self.cost = np.inf
        self.searching: list[AnytimeSearch] = []
        self.over = False
        self.interrupted = False
        self.failed: BaseException | None = None
        self._told = (np.inf, -np.inf)

    def proved(self) -> bool:
        """Whether the best is; or that there is none."""
        if self.cost == np.inf:
            return self.dual.bound == np.inf
        cost, bound = self.cost + self.reduced.offset, self.dual.bound + self.reduced.offset
        return self.dual.bound >= self.cost or cost - bound <= self.relative_gap * abs(cost)

    def run(self, start: Ints | None) -> None:
        """Until it is proved, or the time is over, or someone interrupts."""
        proof = threading.Thread(target=self._prove, daemon=True)
        with self.regions:
            try:
                proof.start()
                self._search(start)
                while proof.is_alive() and not self._ended():
                    proof.join(0.05)
            except KeyboardInterrupt:
                self.interrupted = True
            self.over = True
        self.prover.close()
        proof.join(PATIENCE_SECONDS)

    def _ended(self) -> bool:
        return self.over or monotonic() >= self.stop

    def _search(self, start: Ints | None) -> None:
        """By the first guide, until someone ends it."""
        while self.guide is None and not self._ended():
            sleep(WAIT_SECONDS)
        if self.guide is not None and not self._ended():
            search = self._searcher(self.guide, self.seed, self.regions, start)
            with suppress(SearchOver):
                search.run()
            self._take(search.best.choice.copy(), float(search.best.cost[0]))
            self.searching.remove(search)

    def _searcher(self, guide: Guide, seed: int, worker: Worker, start: Ints | None = None) -> AnytimeSearch:
        outside = Outside(heard=self._take, better=self._better_than, worker=worker)
        search = AnytimeSearch(guide, outside, seed=seed, stop=self.stop, start=start)
        self.searching.append(search)
        if self.over:  # whoever ended it may not have seen this search
            search.stop = -np.inf
        search.learn()
        return search

    def _better_than(self, cost: float) -> Ints | None:
        with self.lock:
            return self.best.copy() if self.best is not None and self.cost < cost else None

    def _take(self, choice: Ints, cost: float) -> None:
        """A choice that fits, from either side."""
        with self.lock:
            if cost >= self.cost:
                return
            self.best, self.cost = choice, cost
        self._tell()

    def _tell(self) -> None:
        state = (self.cost + self.reduced.offset, min(self.dual.bound, self.cost) + self.reduced.offset)
        if self.on_progress is not None and state != self._told:
            self._told = state
            elapsed = monotonic() - self.began
            self.on_progress(Progress(phase="search", incumbent=state[0], bound=state[1], elapsed=elapsed))

    def _end_search(self) -> None:
        for search in self.searching:
            search.stop = -np.inf

    def _prove(self) -> None:
        try:
            with self.prover:
                self._climb()
        except KeyboardInterrupt:  # from `on_progress`, which is called here too
            self.interrupted = self.over = True
        except BaseException as error:
            self.failed = error
        if self.interrupted or self.failed is not None or self.proved() or self.dual.bound == np.inf:
            self.over = True
            self._end_search()

    def _climb(self) -> None:
        dual, began = self.dual, monotonic()
        guided_at = began + min(GUIDE_SECONDS, GUIDE_SHARE * (self.stop - began))
        small = len(self.problem.pair_cost) <= LADDER_PAIRS
        patient_until = began if small else began + CLIMB_SHARE * (self.stop - began)
        slow_seconds = SLOW_SECONDS * (0.2 if small else 1.0)
        marked_at, marked = began, -np.inf
        while not (dual.closed or dual.settled or self.proved() or self._ended()):
            dual.lower_upper(self.cost)
            dual.ascend(seconds=min(ASCENT_SECONDS, max(self.stop - monotonic(), 0.01)))
            self._tell()
            now = monotonic()
            if now >= guided_at:
                self._show_guide()
                guided_at = began + GUIDE_GROWTH * (now - began)
            if now - marked_at >= max(slow_seconds, SLOW_SHARE * (now - began)):
                if now >= patient_until and dual.bound - marked < SLOW_GAIN * (self.cost - dual.bound):
                    break
                marked_at, marked = now, dual.bound
        dual.lower_upper(self.cost)
        if not (dual.closed or self.proved() or self._ended()):
            self._show_guide()
        while not (dual.closed or self.proved() or self._ended()):
            cost = self.cost
            if self._finish():
                return
            self._join_search(cost)
            dual.lower_upper(self.cost)

    def _finish(self) -> bool:
        """Whether what is left to decide was small enough for mixed programs; they go on until the end."""
        dual = self.dual

        def tell(smaller: DualBound, offset: float) -> None:
            smaller.lower_upper(self.cost - offset)
            dual.raise_bound(min(smaller.bound, smaller.upper) + offset)
            self._tell()

        def climb(smaller: DualBound, offset: float) -> None:
            left = self.stop - monotonic()
            smaller.ascend(seconds=min(TURN_SECONDS, max(TURN_SHARE * left, 0.01)))
            tell(smaller, offset)

        if dual.upper == np.inf:
            if first_rung(dual) > LADDER_PAIRS:
                return False
            last = Tightened(steps=(), offset=0.0, dual=dual)
        else:
            last = tighten(dual, climb, seconds=TURN_SECONDS)
        if last.dual is None:
            if last.choice is not None and fits(self.problem, last.choice):
                self._take(last.choice, evaluate(self.problem, last.choice))
            dual.raise_bound(min(self.cost, dual.upper))
            return True
        if self._ended():
            return True
        if first_rung(last.dual) > LADDER_PAIRS:
            return False
        left = None if self.stop == np.inf else self.stop - monotonic()
        smaller, offset = last.dual, last.offset
        outcome = solve_restricted(
            smaller, seconds=left, on_progress=lambda *_: tell(smaller, offset), worker=self.prover
        )
        if outcome.choice is not None:
            choice = last.lift(outcome.choice)
            self._take(choice, evaluate(self.problem, choice))
        tell(smaller, offset)
        return True

    def _join_search(self, cost: float) -> None:
        """Improve the best by regions, beside the other thread, until it is worth another look or the end has come."""
        assert self.guide is not None
        search = self._searcher(self.guide, ~self.seed, self.prover)
        target = cost - AGAIN_GAIN * (cost - self.dual.bound) if cost < np.inf else np.inf
        while not self._ended() and self.cost >= target:
            search.learn()
            if search.best.cost[0] == np.inf:
                sleep(ASCENT_SECONDS)
                continue
            search.polish(JOINED_SECONDS)
        self.searching.remove(search)

    def _show_guide(self) -> None:
        """The first guide begins the search; a better one joins that under way."""
        self.guide = Guide(problem=self.problem, remainder=self.dual.remainder())
        for search in self.searching:
            search.guide = self.guide
