"""What does every solution of a strategy graph take at least, memory aside, for no more than one linear program?"""

import math

from autopar.errors import InfeasibleError
from autopar.search.exact.formulation import formulate
from autopar.search.exact.reduction import reduce
from autopar.search.graph.strategy_graph import StrategyGraph


def least_seconds(graph: StrategyGraph, cutoff: float = math.inf) -> float:
    """What every solution of a graph without a memory limit takes at least: its linear relaxation, and no more.

    cutoff: from which on it does not matter how much more that is; the dual simplex method, whose objective only grows,
    ends there.

    Raises InfeasibleError when no choice is compatible.
    """
    small = reduce(graph).graph
    linear = formulate(small)
    limit = None if math.isinf(cutoff) else cutoff * linear.scale
    answer = linear.model.solve(relaxed=True, perturbs=False, cutoff=limit)  # of uneven stages up to five times as fast
    if answer.infeasible:
        raise incompatible()
    is_bound = answer.optimal or (limit is not None and answer.bound >= limit)
    return max(answer.bound / linear.scale, floor(small)) if is_bound else floor(small)


def floor(graph: StrategyGraph) -> float:
    """What every solution costs at least: the cheapest option of every node and the cheapest pair of every edge."""
    parts = [*(node.seconds for node in graph.nodes), *(edge.seconds for edge in graph.edges)]
    return sum(float(seconds.min()) for seconds in parts)


def incompatible() -> InfeasibleError:
    return InfeasibleError(
        "no choice of options is compatible over all edges and redistributions (memory aside); allow more of them"
    )
