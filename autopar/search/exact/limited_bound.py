"""What does every solution within the memory limit take at least, for a few relaxations and no more?

The linear relaxation with a row for every moment takes minutes where the one of a graph at prices of memory takes
hundredths of a second; with the best prices both have one optimum (duality). So the prices are climbed as in
`memory_prices`, and each solution of a relaxation, fractional as it may be, is a plane above the bound: what it takes,
and its bytes.
"""

import math
import time
from dataclasses import replace

import numpy as np

from autopar.search.exact.memory_prices import Goal, Plane, ascend, hopeless, never_fits, remember, remembered
from autopar.search.exact.reduction import Reduction, reduce
from autopar.search.exact.relaxation import Mixed, least_seconds, relax
from autopar.search.graph.strategy_graph import Floats, Ints, StrategyGraph

GAP = 1e-3
"""How near the best prices' bound the climb ends, as a part."""
DOUBT = 0.25
"""Part of the time in which is looked whether nothing fits where nothing fitted the last time."""


def least_within(
    graph: StrategyGraph,
    *,
    cutoff: float = math.inf,
    enough: float = math.inf,
    seconds: float | None = None,
    prices: dict[int, float],
) -> float:
    """A bound on the seconds of every solution within the limit, no better than it takes to reach the cutoff; infinite
    where it is seen that nothing fits.

    enough: a bound that needs no better one; the cutoff is one, and what does not reach it is known no better than
    that. prices: of memory, see `ilp.solve`; seconds: of climbing.

    Raises InfeasibleError when no choice is compatible.
    """
    memory = graph.memory
    assert memory is not None
    if math.isinf(memory.limit):
        return least_seconds(replace(graph, memory=None), cutoff)
    whole = math.inf if seconds is None else seconds
    began = time.monotonic()
    deadline = began + DOUBT * whole
    reached = cutoff * (1 + GAP)

    def solved(cheap: StrategyGraph, at: Floats, end: float) -> tuple[Plane | None, float]:
        small = reduce(cheap, replaces_arcs=False)
        end = min(end, reached) - float(at @ (memory.base - memory.limit))
        left = max(deadline - time.monotonic(), 0.0) if math.isfinite(deadline) else None
        found = relax(small.graph, enough=end, seconds=left)
        if found.mixed is None:
            return None, found.bound  # how much more does not matter, or time ended
        beyond = _beyond(graph, small, found.mixed)
        paid = float(at @ (beyond - (memory.base - memory.limit)))
        return (found.mixed.seconds - paid, beyond / (abs(memory.limit) or 1.0)), found.bound

    moments = hopeless(prices, memory.moments)
    if moments is not None and never_fits(graph, solved, moments / (abs(memory.limit) or 1.0)):
        return math.inf
    deadline = began + whole
    goal = Goal(
        best=lambda: math.inf,
        relative_gap=GAP,
        over=lambda: time.monotonic() >= deadline,
        cutoff=reached,
        enough=enough,
        only=True,
    )
    ascent = ascend(graph, solved, goal, planes=[], start=remembered(prices, memory.moments))
    remember(prices, memory.moments, ascent)
    return ascent.bound


def _beyond(graph: StrategyGraph, small: Reduction, mixed: Mixed) -> Floats:
    """Bytes beyond the limit at each moment, in a solution of the relaxation of what is left of the graph at prices."""
    memory = graph.memory
    assert memory is not None
    nbytes = memory.base - memory.limit
    for term in memory.nodes:
        own = term.nbytes[small.options[term.node]] @ mixed.options[term.node]
        nbytes = nbytes + float(own) * term.coefficient
    used = [_spread(values, arcs) for values, arcs in zip(mixed.arcs, small.arcs, strict=True)]
    for arc in memory.arcs:
        nbytes = nbytes + _sum(arc.nbytes, used[arc.group]) * arc.coefficient
    ends = [len(group.arc_seconds) for group in graph.groups]
    for kept in memory.kept:  # `priced` puts an arc for each vertex behind those of the group, tensor after tensor
        begin = ends[kept.group]
        ends[kept.group] = begin + len(kept.nbytes)
        nbytes = nbytes + _sum(kept.nbytes, used[kept.group][begin:]) * kept.coefficient
    return nbytes


def _spread(values: Floats, arcs: Ints) -> Floats:
    """What each arc carries, up to the last that is left, of what those that are left carry."""
    if not values.size:
        return values
    spread = np.zeros(arcs[-1] + 1)
    spread[arcs] = values
    return spread


def _sum(nbytes: Floats, used: Floats) -> float:
    num = min(len(nbytes), len(used))
    return float(nbytes[:num] @ used[:num])
