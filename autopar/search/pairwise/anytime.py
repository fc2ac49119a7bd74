"""Which choice is the best that can be found until time is up?

By a guide (what a dual bound leaves over): annealing starts from what its messages suggest, and regions lie where waste
is (`regions`). Short rounds from cold to hot come first, for what is hot differs from graph to graph by orders of
magnitude: where the suggestion is nearly best heat destroys it, elsewhere it must melt. Then regions of the best are
solved and the best is reheated by turns, with rounds from afresh where a hot one did best.
"""

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import numpy as np

from autopar.search.compiled import State, seeded, uniform
from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.anneal import COOLED, Best, Descent, force, harden, keep, soften
from autopar.search.pairwise.forests import work_for
from autopar.search.pairwise.graph import graph_of, usage_of
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.regions import Size, improve, region

_HEATS, _MELTS = (1e-5, 1e-3, 0.1, 3.0, 12.0), 1.0  # times the bound a node: tried first; from which on rounds melt
_TURN, _REHEAT = 0.2, 0.05  # of what is left
_FOLLOW_SWEEPS = 200  # from what a new guide suggests
_TRIAL = 0.04  # of the budget: each of the first rounds
_SHARES = (0.7, 0.1)  # of a round from afresh: soft, forcing; the rest is hard
_AFRESH = 0.2  # of what is left: each of the later rounds from afresh
_REGION_SECONDS, _LEAST_REGION_SECONDS = 4.0, 0.2
_CHUNK_SECONDS = 0.05
_HORIZON_SECONDS = 60.0
_LEAST_ROUND = 20


class SearchOver(Exception):
    """The time is up."""


class Outside(NamedTuple):
    """Who else is at it: `heard` is told every better choice and its cost, `better` asked for one below a cost; the
    `worker` solves programs."""

    heard: Callable[[Ints, float], None]
    better: Callable[[float], Ints | None]
    worker: Worker


class AnytimeSearch:
    """A search under way. `stop` may be set from another thread, and a new `guide`, which it then follows."""

    def __init__(self, guide: Guide, outside: Outside, *, seed: int, stop: float, start: Ints | None = None) -> None:
        self.guide = self.followed = guide
        self.outside, self.stop = outside, stop
        self.problem, self.graph = guide.problem, graph_of(guide.problem)
        self.work = work_for(self.graph)
        self.state: State = seeded(seed)
        self.best = Best(np.zeros(self.problem.num_nodes, np.int64), np.full(1, np.inf))
        self.size = Size()
        self._rate = 0.0
        self._told = np.inf
        self._suggested()
        self.learnt = self.prices
        for known in (self.start, start):
            if known is not None:
                self.know(known)
        descent = Descent(self.start.copy(), self.prices.copy(), 0.0, 1.0, 1.0)  # compile before sweeps are timed
        common = (self.graph, self.work, self.best, descent)
        soften(*common, 0, 0, self.state)
        force(*common, False, 0, self.state)
        harden(*common, 0, 0, self.state)

    def _suggested(self) -> None:
        remainder = self.guide.remainder
        self.start = remainder.choice.copy()
        self.prices = np.maximum(remainder.prices, 0.0) if len(self.graph.base) else np.zeros(0)

    def sweeps(self, part: float) -> int:
        """In such a part of the time left."""
        return max(int(part * self.seconds_left() * self._rate), _LEAST_ROUND)

    def seconds_left(self) -> float:
        """Until the end; as if there were a minute where there is none."""
        return min(max(self.stop - monotonic(), 0.0), _HORIZON_SECONDS)

    def _chunked(self, sweeps: int, run: Callable[[int, int], int]) -> bool:
        """run(first, count) in pieces short enough to look at the clock in between, until one needs fewer sweeps."""
        first = 0
        while first < sweeps:
            began = monotonic()
            if began >= self.stop:
                raise SearchOver
            count = max(1, min(sweeps - first, int(self._rate * _CHUNK_SECONDS)))
            made = run(first, count)
            first += count
            if made:
                pace = made / max(monotonic() - began, 1e-6)
                self._rate = pace if self._rate == 0.0 else 0.8 * self._rate + 0.2 * pace
            self._tell()
            if made < count:
                return True
        return False

    def run(self) -> None:
        """Rounds until the time is up (SearchOver)."""
        unit = self.guide.unit()
        sweeps = self.sweeps(_TRIAL)
        reached = {heat: self.fresh(heat * unit, sweeps) for heat in _HEATS}
        heat = min(reached, key=lambda heat: reached[heat])
        while True:
            if self.guide is not self.followed:  # where the bound has risen, its messages may suggest a better start
                self.followed = self.guide
                self._suggested()
                self.fresh(_HEATS[0] * unit, min(_FOLLOW_SWEEPS, self.sweeps(_TRIAL)))
            if heat >= _MELTS or self.best.cost[0] == np.inf:
                tried = heat * unit * 4.0 ** (2.0 * uniform(self.state) - 1.0)
                self.fresh(tried, self.sweeps(_AFRESH))
            self.polish(_TURN * self.seconds_left())
            warm = heat * unit * 10.0 ** (-4.0 * uniform(self.state))
            self._harden(self.best.choice.copy(), self.learnt, warm, self.sweeps(_REHEAT), self.best)

    def fresh(self, hot: float, sweeps: int) -> float:
        """Anneal from the start; returns the best cost of this round."""
        soft = max(int(sweeps * _SHARES[0]), 1)
        descent = Descent(self.start.copy(), self.prices.copy(), self._floor(hot), hot, COOLED ** (1.0 / soft))
        best = Best(self.best.choice.copy(), np.full(1, np.inf))

        def soft_run(first: int, count: int) -> int:
            soften(self.graph, self.work, best, descent, first, count, self.state)
            self._merge(best)
            return count

        def force_run(hard: bool) -> Callable[[int, int], int]:
            def run(_: int, count: int) -> int:
                made = force(self.graph, self.work, best, descent, hard, count, self.state)
                self._merge(best)
                return made

            return run

        self._chunked(soft, soft_run)
        forcing = max(int(sweeps * _SHARES[1]), 50)
        if not self._chunked(forcing, force_run(False)) and not self._chunked(forcing, force_run(True)):
            return float(best.cost[0])
        self._harden(descent.choice, descent.prices, hot * COOLED * 10.0, max(sweeps - soft, 1), best)
        if best.cost[0] <= self.best.cost[0]:
            self.learnt = descent.prices
        return float(best.cost[0])

    def polish(self, seconds: float) -> None:
        """Solve regions of the best exactly, one after the other."""
        stop = monotonic() + seconds
        while self.best.cost[0] < np.inf and monotonic() < stop and self.guide is self.followed:
            began = monotonic()
            allowed = min(_REGION_SECONDS, 0.25 * (self.stop - began))
            if allowed < _LEAST_REGION_SECONDS:
                return
            self.learn()
            size = int(self.size.nodes * np.exp(uniform(self.state) - 0.5))
            stood = self.best.choice.copy()
            inside = region(self.graph, self.guide, stood, size, self.state)
            choice = improve(self.guide, stood, inside, seconds=allowed, worker=self.outside.worker)
            self.size.adapt(monotonic() - began, allowed, self.problem.num_nodes)
            if choice is not stood:
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
        other = self.outside.better(float(self.best.cost[0]))
        if other is not None:
            self.know(other)
        return other is not None

    def _tell(self) -> None:
        if self.best.cost[0] < self._told:
            self._told = float(self.best.cost[0])
            self.outside.heard(self.best.choice.copy(), self._told)

    def _harden(self, choice: Ints, prices: Floats, hot: float, sweeps: int, best: Best) -> None:
        """Anneal within the limit."""
        descent = Descent(choice, prices, 0.0, hot, COOLED ** (1.0 / sweeps))

        def run(first: int, count: int) -> int:
            harden(self.graph, self.work, best, descent, first, count, self.state)
            self._merge(best)
            return count

        self._chunked(sweeps, run)

    def _floor(self, hot: float) -> float:
        """The first price of a byte: what moves a node whose options differ by the limit against a little noise, or a
        little of the highest price of the bound."""
        if self.graph.limit == np.inf:
            return 0.0
        return max(1e-3 * hot / max(self.graph.limit, 1.0), 1e-3 * float(self.prices.max(initial=0.0)))

    def _merge(self, other: Best) -> None:
        if other.cost[0] < self.best.cost[0]:
            self.best.cost[0] = other.cost[0]
            self.best.choice[:] = other.choice
