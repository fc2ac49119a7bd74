"""Which choice is the best that can be found in so many seconds, or so many sweeps over forests?

Rounds. The first ones anneal from afresh (soft, forced to fit, hard) at several temperatures, for what is hot differs
from graph to graph by orders of magnitude; later ones anneal longer around the temperature that did best, or reheat the
best choice within the limit. With a budget in seconds, regions are also solved in between (`regions`). With a guide
(what a dual bound leaves over) annealing starts from what its messages suggest, and regions lie where waste is. A run
with a budget in sweeps depends on nothing but the seed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.errors import ArgumentError, InfeasibleError
from autopar.search.compiled import State, below, seeded, uniform
from autopar.search.pairwise.anneal import COOLED, Best, force, harden, keep, soften
from autopar.search.pairwise.forests import sweep, work_for
from autopar.search.pairwise.graph import cost_of, graph_of, usage_of
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, evaluate
from autopar.search.pairwise.regions import Program, Size, improve, in_process, region

_HEAT = 4.0  # times the cost a node above its least: the first temperature
_RUNG, _RUNGS = 8.0, 7  # from one temperature to the next, and how many are tried
_GUIDED_HEATS, _MELTS = (1e-5, 1e-3, 0.1, 3.0, 12.0), 1.0  # times the bound a node: tried first where there is a guide
_GUIDED_TURN, _GUIDED_REHEAT = 0.2, 0.05  # of what is left
_FOLLOW_SWEEPS = 200  # from what a new guide suggests
_TRIAL = 0.04  # of the budget: each of the first rounds
_SHARES = (0.7, 0.1)  # of a round from afresh: soft, forcing; the rest is hard
_SCALES = np.array([1.0, 0.3, 0.0])
_AFRESH = 0.2  # of what is left: each of the later rounds from afresh
_TURNS, _TURN = 16, 0.05  # after it, each of so much of what is left
_GUIDED_NODES = 150.0  # of a region, at first: what is wasted has causes farther away
_REGION_SECONDS, _LEAST_REGION_SECONDS = 4.0, 0.2
_CHUNK_SECONDS = 0.05
_HORIZON_SECONDS = 60.0
_LEAST_ROUND = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A choice that fits; its cost; how many sweeps were made and how many choices of regions improved."""

    choice: Ints
    cost: float
    sweeps: int
    regions: int


class SearchOver(Exception):
    """The budget is spent."""


class Search:
    """A search under way; `search` is how it is used."""

    def __init__(
        self,
        problem: Pairwise,
        *,
        seed: int,
        stop: float,
        sweeps: int | None,
        start: Ints | None,
        prices: Floats | None,
        on_progress: Callable[[float], None] | None,
        guide: Guide | None = None,
        program: Program = in_process,
        others: Callable[[float], Ints | None] | None = None,
    ) -> None:
        self.others = others
        self.problem, self.graph = problem, graph_of(problem)
        self.guide, self.program = guide, program
        self.followed = guide
        self.work = work_for(self.graph)
        self.state: State = seeded(seed)
        self.best = Best(np.zeros(problem.num_nodes, np.int64), np.full(1, np.inf), np.full(1, np.inf))
        self.stop, self.budget, self.done, self.regions = stop, sweeps, 0, 0
        times = len(self.graph.base)
        self.prices = np.zeros(times) if prices is None or not times else np.maximum(prices, 0.0)
        self.learnt = self.prices
        self.start = np.zeros(problem.num_nodes, np.int64) if start is None else start.copy()
        self.on_progress = on_progress
        self.size = Size() if guide is None else Size(nodes=_GUIDED_NODES)
        self._rate = 0.0
        self._told = np.inf
        self.know(self.start)
        self._compile()

    def _compile(self) -> None:
        """Before sweeps are timed."""
        choice, prices = self.start.copy(), self.prices.copy()
        common = (self.graph, self.work, self.best, choice, prices)
        soften(*common, 0.0, 1.0, 1.0, 0, 0, self.state)
        force(*common, 0.0, 1.0, False, 0, self.state)
        harden(*common, _SCALES, 1.0, 1.0, 0, 0, self.state)

    def left(self) -> float:
        """Sweeps that may still be made."""
        if self.budget is not None:
            return float(self.budget - self.done)
        return self.seconds_left() * self._rate

    def seconds_left(self) -> float:
        """Until the end; as if there were a minute where there is none."""
        return min(max(self.stop - monotonic(), 0.0), _HORIZON_SECONDS)

    def chunked(self, sweeps: int, run: Callable[[int, int], int]) -> bool:
        """run(first, count) in pieces short enough to look at the clock in between, until one needs fewer sweeps."""
        first = 0
        while first < sweeps:
            began = monotonic()
            if self.budget is None and began >= self.stop:
                raise SearchOver
            count = max(1, min(sweeps - first, int(self._rate * _CHUNK_SECONDS) if self.budget is None else 16))
            if self.budget is not None:
                count = min(count, self.budget - self.done)
                if count <= 0:
                    raise SearchOver
            made = run(first, count)
            first += count
            self.done += made
            if made:
                pace = made / max(monotonic() - began, 1e-6)
                self._rate = pace if self._rate == 0.0 else 0.8 * self._rate + 0.2 * pace
            self._tell()
            if made < count:
                return True
        return False

    def explore(self) -> float:
        """A few sweeps without noise; returns the cost a node above its least, what temperatures are measured in."""
        if self.guide is not None:
            return self.guide.unit()
        before = np.concatenate([np.zeros(1), np.cumsum(self.prices)])

        def run(_: int, count: int) -> int:
            for _ in range(count):
                sweep(self.graph, self.work, self.start, before, 0.0, False, 0.0, self.state)
            return count

        self.chunked(10, run)
        self.know(self.start)
        problem = self.problem
        low = np.minimum.reduceat(problem.cost, problem.first_option[:-1]).sum()
        if problem.num_edges:
            low += np.minimum.reduceat(problem.pair_cost, problem.first_pair[:-1]).sum()
        above = cost_of(self.graph, self.start) % self.graph.wall - low
        spread = above if 0.0 < above < np.inf else self.graph.wall / 1000.0
        return max(float(spread) / problem.num_nodes, 1e-9)

    def run(self) -> None:
        """Rounds until the budget is spent."""
        unit = self.explore()
        if self.guide is not None:
            hot, least = self._from_the_guide(unit)
        else:
            hot, least = self._ladder(_HEAT * unit)
        while True:
            tried = hot * 4.0 ** (2.0 * uniform(self.state) - 1.0)
            cost = self.fresh(tried, max(int(_AFRESH * self.left()), _LEAST_ROUND))
            if cost < least:
                hot, least = tried, cost
            if self.best.cost[0] < np.inf:
                self._refine(hot)

    def _from_the_guide(self, unit: float) -> tuple[float, float]:
        """Short rounds from cold to hot: where the start is nearly best heat destroys it, elsewhere it must melt. Then,
        with a budget in seconds, rounds at the best heat (if that melts), regions and reheating to the end."""
        sweeps = max(int(_TRIAL * self.left()), _LEAST_ROUND)
        reached = {heat: self.fresh(heat * unit, sweeps) for heat in _GUIDED_HEATS}
        heat = min(reached, key=lambda heat: reached[heat])
        while self.budget is None:
            if self.guide is not self.followed:
                self._follow(unit)
            if heat >= _MELTS or self.best.cost[0] == np.inf:
                tried = heat * unit * 4.0 ** (2.0 * uniform(self.state) - 1.0)
                self.fresh(tried, max(int(_AFRESH * self.left()), _LEAST_ROUND))
            self.polish(_GUIDED_TURN * self.seconds_left())
            warm = heat * unit * 10.0 ** (-4.0 * uniform(self.state))
            self.reheat(warm, max(int(_GUIDED_REHEAT * self.left()), _LEAST_ROUND))
        return heat * unit, reached[heat]

    def _follow(self, unit: float) -> None:
        """Where the bound has risen, its messages may suggest a better start."""
        assert self.guide is not None
        self.followed = self.guide
        self.start, self.prices = self.guide.remainder.choice.copy(), self.guide.remainder.prices
        self.fresh(_GUIDED_HEATS[0] * unit, min(_FOLLOW_SWEEPS, max(int(_TRIAL * self.left()), _LEAST_ROUND)))

    def _ladder(self, hot: float) -> tuple[float, float]:
        """Short rounds at temperatures a rung apart, up and down until they get worse; the best one and its cost."""
        sweeps = max(int(_TRIAL * self.left()), _LEAST_ROUND)
        reached = {rung: self.fresh(hot * _RUNG**rung, sweeps) for rung in (0, -1, 1)}
        while len(reached) < _RUNGS:
            best = min(reached, key=lambda rung: reached[rung])
            rung = best - 1 if best == min(reached) else best + 1
            if rung in reached:
                break
            reached[rung] = self.fresh(hot * _RUNG**rung, sweeps)
        best = min(reached, key=lambda rung: reached[rung])
        return hot * _RUNG**best, reached[best]

    def _refine(self, hot: float) -> None:
        """Turns of reheating or regions, mostly whichever gained more when it was last tried."""
        gained = [np.inf, np.inf if self.budget is None else -1.0]
        for _ in range(_TURNS):
            regions = int(np.argmax(gained))
            if self.budget is None and below(self.state, 4) == 0:
                regions = 1 - regions
            before = float(self.best.cost[0])
            if regions:
                self.polish(_TURN * self.seconds_left())
            else:
                warm = hot * 10.0 ** (-4.0 * uniform(self.state))
                self.reheat(warm, max(int(_TURN * self.left()), _LEAST_ROUND))
            gained[regions] = before - float(self.best.cost[0])

    def fresh(self, hot: float, sweeps: int) -> float:
        """Anneal from the start; returns the best cost of this round."""
        graph, work = self.graph, self.work
        choice, prices = self.start.copy(), self.prices.copy()
        round_best = Best(self.best.choice.copy(), np.full(1, np.inf), self.best.peak)
        floor = self._floor(hot)
        soft = max(int(sweeps * _SHARES[0]), 1)
        cooling = COOLED ** (1.0 / soft)

        def soft_run(first: int, count: int) -> int:
            soften(graph, work, round_best, choice, prices, floor, hot, cooling, first, count, self.state)
            self._merge(round_best)
            return count

        def force_run(hard: bool) -> Callable[[int, int], int]:
            def run(_: int, count: int) -> int:
                made = force(graph, work, round_best, choice, prices, floor, hot, hard, count, self.state)
                self._merge(round_best)
                return made

            return run

        self.chunked(soft, soft_run)
        forcing = max(int(sweeps * _SHARES[1]), 50)
        if not self.chunked(forcing, force_run(False)) and not self.chunked(forcing, force_run(True)):
            return float(round_best.cost[0])
        hard = max(sweeps - soft, 1)
        self._harden(choice, prices, hot * COOLED * 10.0, hard, round_best)
        if round_best.cost[0] <= self.best.cost[0]:
            self.learnt = prices
        return float(round_best.cost[0])

    def reheat(self, hot: float, sweeps: int) -> None:
        """Anneal from the best, within the limit."""
        self._harden(self.best.choice.copy(), self.learnt, hot, sweeps, self.best)

    def polish(self, seconds: float) -> None:
        """Solve regions of the best exactly, one after the other."""
        stop = monotonic() + seconds
        while self.best.cost[0] < np.inf and monotonic() < stop and self.guide is self.followed:
            began = monotonic()
            allowed = min(_REGION_SECONDS, 0.25 * (self.stop - began))
            if allowed < _LEAST_REGION_SECONDS:
                return
            self.learn()
            guide, size = self.guide, int(self.size.nodes * np.exp(uniform(self.state) - 0.5))
            stood = self.best.choice.copy()
            inside = region(self.problem, self.graph, stood, size, self.state, guide)
            choice = improve(self.problem, stood, inside, seconds=allowed, guide=guide, program=self.program)
            self.size.adapt(monotonic() - began, allowed, self.problem.num_nodes)
            if choice is not stood:
                self.regions += 1
                self.know(choice)
                if self.learn():  # someone else was at it meanwhile: do both
                    both = self.best.choice.copy()
                    both[inside] = choice[inside]
                    self.know(both)
                self._tell()

    def know(self, choice: Ints) -> None:
        """Of a choice: the best from now on if it is better and fits."""
        keep(self.graph, choice, usage_of(self.graph, choice), self.best)

    def learn(self) -> bool:
        """Whether others know a better choice; it is the best from now on."""
        other = None if self.others is None else self.others(float(self.best.cost[0]))
        if other is not None:
            self.know(other)
        return other is not None

    def _tell(self) -> None:
        if self.on_progress is not None and self.best.cost[0] < self._told:
            self._told = float(self.best.cost[0])
            self.on_progress(self._told)

    def _harden(self, choice: Ints, prices: Floats, hot: float, sweeps: int, best: Best) -> None:
        cooling = COOLED ** (1.0 / sweeps)

        def run(first: int, count: int) -> int:
            harden(self.graph, self.work, best, choice, prices, _SCALES, hot, cooling, first, count, self.state)
            self._merge(best)
            return count

        self.chunked(sweeps, run)

    def _floor(self, hot: float) -> float:
        """The first price of a byte: what moves a node whose options differ by the limit against a little noise, and
        where a bound gave prices, a little of the highest."""
        if self.graph.limit == np.inf:
            return 0.0
        return max(1e-3 * hot / max(self.graph.limit, 1.0), 1e-3 * float(self.prices.max(initial=0.0)))

    def _merge(self, other: Best) -> None:
        if other.cost[0] < self.best.cost[0]:
            self.best.cost[0] = other.cost[0]
            self.best.choice[:] = other.choice


def search(
    problem: Pairwise,
    *,
    seconds: float | None = None,
    sweeps: int | None = None,
    seed: int = 0,
    start: Ints | None = None,
    prices: Floats | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Found:
    """Search for so many seconds or sweeps (one of them); an interrupt ends the search with the best so far.

    `start` need not fit, `prices` are a byte's at every time, such as a dual bound ends with; `on_progress` hears of
    every better cost. InfeasibleError, with the least peak seen, if nothing that fits was found.
    """
    if (seconds is None) == (sweeps is None):
        raise ArgumentError(f"a search takes a budget in seconds or in sweeps; got seconds={seconds}, sweeps={sweeps}")
    stop = np.inf if seconds is None else monotonic() + seconds
    under_way = Search(
        problem, seed=seed, stop=stop, sweeps=sweeps, start=start, prices=prices, on_progress=on_progress
    )
    with suppress(SearchOver, KeyboardInterrupt):
        under_way.run()
    best = under_way.best
    if best.cost[0] == np.inf:
        peak = float(best.peak[0])
        seen = f"the least peak seen is {peak:.0f} bytes" if peak < np.inf else "none seen had only allowed pairs"
        raise InfeasibleError(
            f"no choice within {problem.limit:.0f} bytes found in {under_way.done} sweeps; {seen}: "
            "search longer or raise the limit",
            least_nbytes=None,
        )
    return Found(
        choice=best.choice, cost=evaluate(problem, best.choice), sweeps=under_way.done, regions=under_way.regions
    )
