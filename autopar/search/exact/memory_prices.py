"""What is a byte worth at each moment? The prices under which the priced strategy graph bounds best.

The bound of `priced_memory` is concave in the prices and linear wherever one choice stays the best. Every choice found
is a plane above it, seconds + u (bytes - limit); the next prices are those at which the planes found so far promise
most (Kelley 1960; with one price that is a secant). It ends where promise and bound meet. Choices met on the way that
fit are solutions, and near the end good ones: one a little below the limit, one a little above.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from autopar.search.exact.priced_memory import priced
from autopar.search.graph.strategy_graph import Floats, Ints, StrategyGraph, evaluate, usage

EVALUATIONS = 24
"""Most prices tried."""
FIRST_PRICE = 0.1
"""Of the seconds without a limit: what as many bytes as the limit cost at first."""
STEEPER = 4.0
"""How much more all prices may sum to after no choice has fitted yet."""
TINY = 1e-9
SURE = 1e-6
"""Part of what the limit costs that is left to a program's tolerances."""
DOUBTFUL = 0.25
"""How far beyond the limit, as a part of it, a choice is far from fitting."""
CLOSE = 0.25
"""Of the gap asked for: how near bound and promise end the ascent."""

Plane = tuple[float, Floats]
"""Seconds of a choice, and at each moment its bytes above the limit, in limits."""
Solver = Callable[[StrategyGraph, Floats, float], tuple[Plane | None, float]]
"""Solves a graph without a limit, the one `priced` at these: what is cheapest (None where nothing was found in time),
and a bound on what it costs. Both of all choices, or both of their relaxation. It may end, with no choice, where that
bound, less what the limit costs, comes to the number given."""


@dataclass(slots=True, kw_only=True)
class Ascent:
    """`bound`: proved for every choice within the limit, by `prices`, in seconds a byte. Infinite where these prove
    that none fits.

    astray: prices rose and rose, and nothing that they led to fits: no place for another search to begin.
    """

    prices: Floats
    bound: float = -math.inf
    astray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When an ascent ends: where its bound reaches the seconds of the `best` known that fits (inf while none does), the
    `cutoff` or what is `enough`, less the gap, or time is `over`. only: also as soon as it is known not to reach the
    cutoff; and without one, what is far from fitting is first asked whether anything fits."""

    best: Callable[[], float]
    relative_gap: float
    over: Callable[[], bool]
    cutoff: float = math.inf
    enough: float = math.inf
    only: bool = False

    def is_reached(self, bound: float) -> bool:
        short = min(self.best(), self.cutoff, self.enough) - bound
        return short <= self.relative_gap * abs(bound) or self.over()


def ascend(
    graph: StrategyGraph, solve: Solver, goal: Goal, *, planes: list[Plane], start: Floats | None = None
) -> Ascent:
    """The best prices of a graph with a limit. planes: of choices known already. start: prices that are tried first."""
    memory = graph.memory
    assert memory is not None
    unit = abs(memory.limit) or 1.0
    beyond = (memory.base - memory.limit) / unit
    out = Ascent(prices=np.zeros(len(beyond)))
    most = 0.0
    prices = np.zeros(len(beyond))
    for number in range(EVALUATIONS):
        if start is not None and number == 0:
            prices = start * unit
        elif planes:
            if goal.only and number == 1 and math.isinf(goal.cutoff) and (excess := planes[-1][1]).max() > DOUBTFUL:
                alone = np.where(np.arange(len(excess)) == excess.argmax(), 1.0, 0.0)
                if never_fits(graph, solve, alone / unit):
                    return Ascent(prices=alone / unit, bound=math.inf)
            most = most or max(FIRST_PRICE * max(abs(planes[0][0]), TINY), STEEPER * float(prices.sum()))
            tried = float(prices.sum())
            promise, prices = _most_promising(planes, most)
            if min(tried, float(prices.sum())) >= most * (1 - TINY):
                out.astray = not math.isfinite(goal.best()) and all(excess.max() > TINY for _, excess in planes)
                if out.astray and never_fits(graph, solve, prices / unit):
                    return Ascent(prices=prices / unit, bound=math.inf)
                most *= STEEPER
                promise, prices = _most_promising(planes, most)
            is_highest = float(prices.sum()) < most * (1 - TINY)  # nothing higher promises more
            is_near = promise - out.bound <= CLOSE * goal.relative_gap * abs(promise)
            if is_highest and (is_near or (goal.only and promise < goal.cutoff < math.inf)):
                return out
        found, least = solve(priced(graph, prices / unit), prices / unit, math.inf)
        if (bound := least + float(prices @ beyond)) > out.bound:
            out.bound, out.prices = bound, prices / unit
        if found is None:
            return out
        planes.append(found)
        out.astray = out.astray and found[1].max() > TINY
        if goal.is_reached(out.bound):
            return out
    return out


def remember(known: dict[int, float], moments: Sequence[int], ascent: Ascent) -> None:
    """Put its prices in the place of those known, unless it went astray, all are 0 or moments have no names.

    Where nothing fits, the moment of the highest price is told as one at which a byte is worth infinitely much.
    """
    if not moments:
        return
    is_lost = ascent.bound == math.inf
    is_told = ascent.prices.any() and not ascent.astray and not is_lost
    for moment in [moment for moment, price in known.items() if is_told or math.isinf(price)]:
        del known[moment]
    if is_told:
        known.update(zip(moments, ascent.prices.tolist(), strict=True))
    if is_lost:
        known[moments[int(ascent.prices.argmax())]] = math.inf


def remembered(prices: Mapping[int, float], moments: Sequence[int]) -> Floats | None:
    """Prices of moments, each given to the nearest of these; None where there are none."""
    return _nearest({moment: price for moment, price in prices.items() if math.isfinite(price)}, moments)


def hopeless(prices: Mapping[int, float], moments: Sequence[int]) -> Floats | None:
    """1 at the moments at which nothing fitted the last time; None where it did."""
    return _nearest({moment: 1.0 for moment, price in prices.items() if math.isinf(price)}, moments)


def _nearest(prices: Mapping[int, float], moments: Sequence[int]) -> Floats | None:
    if not prices or not moments:
        return None
    rows = np.asarray(moments)
    out = np.zeros(len(rows))
    for moment, price in prices.items():
        out[np.abs(rows - moment).argmin()] += price
    return out


def plane(graph: StrategyGraph, choice: Ints, arcs: tuple[Ints, ...]) -> Plane:
    memory = graph.memory
    assert memory is not None
    return evaluate(graph, choice, arcs), (usage(graph, choice, arcs) - memory.limit) / (abs(memory.limit) or 1.0)


def _most_promising(planes: list[Plane], most: float) -> tuple[float, Floats]:
    """The prices, at most `most` in all, at which the lowest plane is highest, and how high."""
    moments = len(planes[0][1])
    rows = np.array([[1.0, *-excess] for _, excess in planes])
    answer = linprog(
        np.array([-1.0, *np.zeros(moments)]),
        A_ub=np.vstack([rows, [0.0, *np.ones(moments)]]),
        b_ub=np.array([*(seconds for seconds, _ in planes), most]),
        bounds=[(None, None), *[(0.0, None)] * moments],
        method="highs-ds",
    )
    return float(-answer.fun), np.maximum(answer.x[1:], 0.0)


def never_fits(graph: StrategyGraph, solve: Solver, prices: Floats) -> bool:
    """Whether these prices prove it: even the choice that pays least for bytes alone pays more than the limit costs."""
    memory = graph.memory
    assert memory is not None
    nodes = tuple(replace(node, seconds=_free(node.seconds)) for node in graph.nodes)
    groups = tuple(replace(group, arc_seconds=_free(group.arc_seconds)) for group in graph.groups)
    edges = tuple(replace(edge, seconds=_free(edge.seconds)) for edge in graph.edges)
    free = replace(graph, nodes=nodes, groups=groups, edges=edges)
    beyond = float(prices @ (memory.base - memory.limit))
    _, least = solve(priced(free, prices), prices, 2 * SURE * abs(beyond))
    return least + beyond > SURE * abs(beyond)


def _free(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), 0.0, np.inf)
