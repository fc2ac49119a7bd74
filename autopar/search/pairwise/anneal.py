"""How does a search cool: forests with noise and memory prices (soft), then within the limit (hard)?

Soft: a price per byte at every time rises where the limit is violated and decays where there is slack,
    price <- (price + floor) * (1 + RAISE * min(10 * violation, 1))   or   price * (1 - DECAY * min(10 * slack, 1)),
violation and slack relative to the limit, while temperature falls geometrically. Whatever fits on the way is kept.
Forcing: prices only rise, until the choice fits; in the end what is over the limit may only sink, too. Hard: from a
choice that fits to others that fit, with prices times `SCALES[sweep mod 3]`, since a price that made things fit is too
dear where memory comes in lumps.
"""

from typing import NamedTuple

import numpy as np

from autopar.search.compiled import State, compiled, uniform
from autopar.search.pairwise.forests import Work, sweep
from autopar.search.pairwise.graph import Graph, cost_of, usage_of
from autopar.search.pairwise.problem import Floats, Ints

RAISE, DECAY, FORCE = 0.03, 0.02, 0.05
SCALES = (1.0, 0.3, 0.0)
COOLED = 1 / 300  # of the temperature, from the beginning of a descent to its end


class Best(NamedTuple):
    """The cheapest choice that fits, changed in place; `cost` (one value) is inf before there is one."""

    choice: Ints
    cost: Floats


class Descent(NamedTuple):
    """A choice and prices, moved in place; `floor`: the first price of a byte; temperature hot * cooling**sweep."""

    choice: Ints
    prices: Floats
    floor: float
    hot: float
    cooling: float


@compiled
def keep(graph: Graph, choice: Ints, usage: Floats, best: Best) -> float:
    """Remember a choice if it is the best that fits; returns its peak."""
    peak = usage.max() if len(usage) > 0 else 0.0
    cost = cost_of(graph, choice)
    if cost < min(graph.wall, best.cost[0]) and peak <= graph.limit:
        best.cost[0] = cost
        best.choice[:] = choice
    return peak


@compiled
def add_up(prices: Floats, scale: float, before: Floats) -> None:
    """before[t] = scale * sum of the prices of earlier times."""
    before[0] = 0.0
    for t in range(len(prices)):
        before[t + 1] = before[t] + scale * prices[t]


@compiled
def soften(graph: Graph, work: Work, best: Best, descent: Descent, first: int, sweeps: int, state: State) -> None:
    """Sweeps `first` to `first + sweeps` of a soft descent."""
    choice, prices = descent.choice, descent.prices
    before = np.empty(len(prices) + 1)
    for k in range(first, first + sweeps):
        add_up(prices, 1.0, before)
        sweep(graph, work, choice, before, descent.hot * descent.cooling**k, False, 0.0, state)
        usage = usage_of(graph, choice)
        keep(graph, choice, usage, best)
        for t in range(len(prices)):
            over = (usage[t] - graph.limit) / max(graph.limit, 1.0)
            if over > 0.0:
                prices[t] = (prices[t] + descent.floor) * (1.0 + RAISE * min(10.0 * over, 1.0))
            else:
                prices[t] *= 1.0 - DECAY * min(-10.0 * over, 1.0)


@compiled
def force(graph: Graph, work: Work, best: Best, descent: Descent, hard: bool, sweeps: int, state: State) -> int:
    """Raise prices until the choice fits and is allowed; how many sweeps that took, `sweeps` if that was not enough.

    Soft sweeps find what is cheap. Hard ones never make a time worse that is over the limit, nor any other go over it;
    every other one is warm instead and bound by the highest peak alone, to get past what blocks the way down.
    """
    choice, prices, hot = descent.choice, descent.prices, descent.hot
    most = 1e3 * graph.wall / max(graph.limit, 1.0)
    before = np.empty(len(prices) + 1)
    for k in range(sweeps):
        usage = usage_of(graph, choice)
        peak = keep(graph, choice, usage, best)
        if peak <= graph.limit and cost_of(graph, choice) < graph.wall:
            return k
        for t in range(len(prices)):
            if usage[t] > graph.limit:
                prices[t] = min((prices[t] + descent.floor) * (1.0 + FORCE), most)
            elif hard:
                prices[t] *= 1.0 - DECAY
        add_up(prices, 1.0, before)
        over, temperature = 0.0, hot * COOLED
        if hard and k % 2 == 1:
            over, temperature = max(peak - graph.limit, 0.0), hot * COOLED ** uniform(state)
        sweep(graph, work, choice, before, temperature, hard, over, state)
    return sweeps


@compiled
def harden(graph: Graph, work: Work, best: Best, descent: Descent, first: int, sweeps: int, state: State) -> None:
    """Sweeps `first` to `first + sweeps` of a descent among choices that fit."""
    choice, prices = descent.choice, descent.prices
    before = np.empty(len(prices) + 1)
    for k in range(first, first + sweeps):
        add_up(prices, SCALES[k % 3], before)
        sweep(graph, work, choice, before, descent.hot * descent.cooling**k, True, 0.0, state)
        keep(graph, choice, usage_of(graph, choice), best)
