"""Which options does another replace at no loss? Dominance.

Option i makes k needless if it takes no more memory at any time, and cost(i) - cost(k) plus, over the edges, the
largest difference of their rows is at most 0: whatever the neighbours choose, i in place of k costs and takes no more.
Options go one by one, each because of one that stays, so that of equals one is left.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Ints
from autopar.search.pairwise.reduce.graph import (
    AT,
    COST_AT,
    FIRST_HALF,
    NEXT,
    NODE,
    NONE,
    OPTIONS,
    STRIDE,
    Graph,
    touch,
)
from autopar.search.pairwise.reduce.profile import no_more, profile


@compiled
def drop_dominated(graph: Graph, nodes: Ints) -> None:
    for n in nodes:
        at = graph.node[n, COST_AT]
        _, taken = profile(graph, n)
        for k in range(graph.node[n, OPTIONS]):
            for i in range(graph.node[n, OPTIONS]):
                if (
                    i != k
                    and graph.cost[at + i] <= graph.cost[at + k] < np.inf
                    and no_more(taken, i, k)
                    and _replaces(graph, n, i, k)
                ):
                    graph.cost[at + k] = np.inf
                    touch(graph, n)
                    break


@compiled
def _replaces(graph: Graph, n: int, i: int, k: int) -> bool:
    """Costs alone. Between tightened edges no difference is negative, so a sum that is too high stays so."""
    at = graph.node[n, COST_AT]
    total = graph.cost[at + i] - graph.cost[at + k]
    h = graph.node[n, FIRST_HALF]
    while h != NONE:
        total += largest_difference(graph, h, i, k)
        if total > 0:
            return False
        h = graph.half[h, NEXT]
    return True


@compiled
def largest_difference(graph: Graph, h: int, i: int, k: int) -> float:
    """Of row i over row k, where k is allowed; inf where i is not allowed there."""
    first, other = graph.edge[h // 2, AT], graph.half[h ^ 1, STRIDE]
    row, base = first + i * graph.half[h, STRIDE], first + k * graph.half[h, STRIDE]
    largest = -np.inf
    for j in range(graph.node[graph.half[h ^ 1, NODE], OPTIONS]):
        theirs = graph.pair[base + j * other]
        if theirs < np.inf:
            largest = max(largest, graph.pair[row + j * other] - theirs)
            if largest == np.inf:
                break
    return largest
