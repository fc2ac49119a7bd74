"""What does every choice that fits cost at least? Memory prices and messages, climbing together (Lagrange + TRW-S).

    bound = what messages prove of cost + prices * usage  (`messages`)  +  sum of prices * (base - limit)  (`prices`)

One sweep on and one back a step of the prices: far cheaper than letting messages settle, and just as valid. When the
bound stalls, prices go back to the best ones, and step length and temperature shrink. Given the cost of a known choice
(`upper`), options and pairs that have too much left over for any cheaper choice are closed, which raises the bound in
turn. Where all costs are multiples of one number, so are their sums, and the bound is rounded up to the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.search.pairwise.messages import EPS, close_pairs, decode, lay, leave, sweep
from autopar.search.pairwise.prices import blend, granted, mean_usage, priced, step
from autopar.search.pairwise.problem import Floats, Ints, Pairwise

_CAP = 0.02  # of the cost: what a step moves prices by, at most and at first
_HEAT = 0.1  # of the mean cost of a node: the first temperature
_SHRINK = 0.7  # of both, on a stall:
_PATIENCE = 30  # passes that raised the bound by less than
_PROGRESS = 1e-4  # of itself
_SETTLED = 1e-7  # a cap that moves nothing any more
_AIM = 0.05  # of the cost: how far up the bound is to aim where no choice is known
_BETWEEN_CLOSING = 60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remainder:
    """What of all costs the bound leaves: cost(x) = bound + option + pair costs of x, none below zero, + sum over times
    of prices * (limit - usage of x), for every x that beats `upper` (inf: none of these uses it). So an option or pair
    that has so much left over costs no less than `proved` and that, rounding included. `choice` is what the messages
    suggest: often close to the best, not always allowed, rarely within the limit at every time."""

    choice: Ints
    bound: float
    proved: float
    option: Floats
    pair: Floats
    prices: Floats


class DualBound:
    """A bound under way; `ascend` as often as time allows. Runs of as many passes are the same to the bit.

    `bound` never falls: every choice that fits costs as much, or at least `upper`; inf says that nothing fits.
    """

    def __init__(self, problem: Pairwise, *, upper: float = np.inf) -> None:
        self.problem = problem
        self.bound = -np.inf
        self.upper = upper
        self.passes = 0
        self.settled = False
        self.prices: Floats = np.zeros(problem.num_times)
        self._cost = problem.cost.copy()
        self._layout = lay(problem)
        self._messages = np.zeros(int(self._layout.first_message[-1]))
        self._weight = np.zeros(len(problem.cost))
        self._grain, self._dearest = _grain(problem), _dearest(problem)
        self._best, self._best_prices = -np.inf, self.prices
        self._marked, self._stalled = -np.inf, 0
        self._cap, self._heat = _CAP, _HEAT
        self._direction: Floats | None = None
        if problem.num_times and problem.base.max() > problem.limit:
            self.raise_bound(np.inf)

    @property
    def closed(self) -> bool:
        """Whether no choice beats `upper`, or nothing fits."""
        return self.bound >= self.upper

    @property
    def most(self) -> float:
        """What a choice that is allowed and beats `upper` costs at most."""
        below = self.upper
        if self._grain > 0.0 and self.upper < np.inf:
            below = float(np.ceil(self.upper / self._grain) - 1.0) * self._grain
        return min(below, self._dearest)

    def lower_upper(self, cost: float) -> None:
        """A choice that fits and costs this is known."""
        self.upper = min(self.upper, cost)

    def raise_bound(self, value: float) -> None:
        """Every choice that fits is known to cost as much, or at least `upper`."""
        if value > self._dearest:
            value = np.inf
        elif self._grain > 0.0:
            value = np.ceil(value / self._grain) * self._grain
        self.bound = max(self.bound, min(value, self.upper))

    def ascend(
        self,
        *,
        passes: int | None = None,
        seconds: float | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> float:
        """Climb for so many passes or seconds, or until the bound is closed or settled; returns the bound."""
        stop = np.inf if seconds is None else monotonic() + seconds
        last = np.inf if passes is None else self.passes + passes
        while not self.closed and not self.settled and self.passes < last and monotonic() < stop:
            self._pass()
            if self.passes % _BETWEEN_CLOSING == 0 and self.upper < np.inf:
                self._leave()
            if on_progress is not None:
                on_progress(self.bound)
        return self.bound

    def remainder(self) -> Remainder:
        """At the best prices, after a pass."""
        self.prices, self._direction = self._best_prices, None
        return self._leave()

    def _leave(self) -> Remainder:
        """What is left at the prices now; closes what cannot be part of a choice that beats `upper`."""
        problem, layout = self.problem, self._layout
        unary = priced(problem, self._cost, self.prices)
        sweep(layout, unary, self._messages, True, 0.0, self._weight)
        value, rounding = sweep(layout, unary, self._messages, False, 0.0, self._weight)
        self._prove(value, rounding, unary)
        choice = np.zeros(problem.num_nodes, np.int64)
        option, pair = np.full(len(problem.cost), np.inf), np.full(len(problem.pair_cost), np.inf)
        bound = proved = self.bound
        if not self.closed:
            decode(layout, unary, self._messages, choice)
            rest, slack = granted(problem, self.prices)
            bound = leave(layout, unary, self._messages, problem.first_pair, problem.edge_a, option, pair) + rest
            proved = bound - slack - 2.0 * rounding - self._mispriced(unary)
            if self.upper < np.inf:
                option[option > self.most - proved] = np.inf
                pair[pair > self.most - proved] = np.inf
                self._cost[option == np.inf] = np.inf
                close_pairs(layout, problem.first_pair, problem.edge_a, pair)
        return Remainder(choice=choice, bound=bound, proved=proved, option=option, pair=pair, prices=self.prices)

    def _pass(self) -> None:
        self.passes += 1
        problem = self.problem
        scale = max(abs(self.upper) if self.upper < np.inf else 0.0, abs(self._best) if self.passes > 1 else 0.0, 1.0)
        unary = priced(problem, self._cost, self.prices)
        heat = self._heat * scale / problem.num_nodes
        sweep(self._layout, unary, self._messages, True, 0.0, self._weight)
        value, rounding = sweep(self._layout, unary, self._messages, False, heat, self._weight)
        value = self._prove(value, rounding, unary)
        if value > self._best:
            self._best, self._best_prices = value, self.prices
        if self._best > self._marked + _PROGRESS * abs(self._best):
            self._marked, self._stalled = self._best, 0
        else:
            self._stalled += 1
        if self._stalled > _PATIENCE:
            self._cap *= _SHRINK
            self._heat *= _SHRINK
            self._stalled = 0
            self._direction = None
            self.prices = self._best_prices
            self.settled = self._cap < _SETTLED
        elif not self.closed and problem.num_times and problem.limit < np.inf:
            self._direction = blend(self._direction, mean_usage(problem, self._weight) - problem.limit)
            target = self.upper if self.upper < np.inf else self._best + _AIM * scale
            self.prices = step(
                self.prices, self._direction, gap=target - value, most=self._cap * scale, limit=problem.limit
            )

    def _prove(self, value: float, rounding: float, unary: Floats) -> float:
        """Raise the bound to what a backward sweep found, at the prices now; returns it without its rounding."""
        rest, slack = granted(self.problem, self.prices)
        self.raise_bound(value + rest - rounding - slack - self._mispriced(unary))
        return value + rest

    def _mispriced(self, unary: Floats) -> float:
        """Rounding of priced options at most: one of each node counts."""
        if not len(self.problem.member_node):
            return 0.0
        finite = np.where(unary < np.inf, np.abs(unary), 0.0) + np.where(self._cost < np.inf, np.abs(self._cost), 0.0)
        members = np.bincount(self.problem.member_node, minlength=self.problem.num_nodes) + 1
        return float(2.0 * EPS * (members * np.maximum.reduceat(finite, self.problem.first_option[:-1])).sum())


def _grain(problem: Pairwise) -> float:
    """The largest number that every finite cost is a whole multiple of; 0 where they are no whole numbers."""
    costs = np.concatenate([problem.cost, problem.pair_cost])
    costs = costs[np.isfinite(costs)]
    if not len(costs) or np.abs(costs).max() > 2.0**52 or (costs != np.round(costs)).any():
        return 0.0
    return float(np.gcd.reduce(np.abs(costs).astype(np.int64)))


def _dearest(problem: Pairwise) -> float:
    """No choice that is allowed costs more."""
    cost = np.where(problem.cost < np.inf, problem.cost, -np.inf)
    pair = np.where(problem.pair_cost < np.inf, problem.pair_cost, -np.inf)
    nodes = np.maximum.reduceat(cost, problem.first_option[:-1]) if problem.num_nodes else np.zeros(0)
    edges = np.maximum.reduceat(pair, problem.first_pair[:-1]) if problem.num_edges else np.zeros(0)
    most = np.concatenate([nodes, edges])
    return float(most.sum() + 1e-9 * np.abs(most).sum()) if np.isfinite(most).all() else -np.inf
