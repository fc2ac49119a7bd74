"""Which options can a neighbour's option leave out? Pareto pruning, edge by edge.

Once a neighbour has chosen j, option k is needless if some i takes no more memory at any time, and cost(i) - cost(k),
plus the difference of their pairs with j, plus the largest difference of their rows over every other edge, is at most
0. The pair (k, j) is then not allowed. An option without pairs goes by arc consistency (another i for every j may have
done it, where no single one dominates), and a neighbour left with one partner an option takes the node in. Leaves,
which have no other edge, lose most.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.graph import (
    AT,
    CHANGED,
    COST_AT,
    DEGREE,
    FIRST_HALF,
    NEXT,
    NODE,
    OPTIONS,
    STRIDE,
    Graph,
    touch,
)
from autopar.search.pairwise.reduce.profile import no_more, profile


@compiled
def prune_pairs(graph: Graph, nodes: Ints) -> None:
    for n in nodes:
        _prune(graph, n)


@compiled
def _prune(graph: Graph, n: int) -> None:
    at, size = graph.node[n, COST_AT], graph.node[n, OPTIONS]
    largest, least = np.empty(graph.node[n, DEGREE]), np.empty(graph.node[n, DEGREE])
    _, taken = profile(graph, n)
    for k in range(size):
        for i in range(size):
            if i == k or not max(graph.cost[at + i], graph.cost[at + k]) < np.inf or not no_more(taken, i, k):
                continue
            forbidding = _differences(graph, n, i, k, largest, least)
            if forbidding > 1:
                continue
            total = graph.cost[at + i] - graph.cost[at + k]
            for e in range(len(largest)):
                if largest[e] < np.inf:
                    total += largest[e]
            h = graph.node[n, FIRST_HALF]
            for e in range(len(largest)):
                if forbidding == 0 or largest[e] == np.inf:
                    elsewhere = total - largest[e] if forbidding == 0 else total
                    if elsewhere + least[e] <= 0:
                        _forbid(graph, h, i, k, elsewhere)
                h = graph.half[h, NEXT]


@compiled
def _differences(graph: Graph, n: int, i: int, k: int, largest: Floats, least: Floats) -> int:
    """Of row i over row k where k is allowed, edge by edge; how many edges forbid i where they allow k, up to two."""
    forbidding = 0
    h = graph.node[n, FIRST_HALF]
    for e in range(len(largest)):
        first, other = graph.edge[h // 2, AT], graph.half[h ^ 1, STRIDE]
        row, base = first + i * graph.half[h, STRIDE], first + k * graph.half[h, STRIDE]
        high, low = -np.inf, np.inf
        for j in range(graph.node[graph.half[h ^ 1, NODE], OPTIONS]):
            theirs = graph.pair[base + j * other]
            if theirs < np.inf:
                difference = graph.pair[row + j * other] - theirs
                high, low = max(high, difference), min(low, difference)
        largest[e], least[e] = high, low
        forbidding += high == np.inf
        if forbidding > 1:
            return forbidding
        h = graph.half[h, NEXT]
    return forbidding


@compiled
def _forbid(graph: Graph, h: int, i: int, k: int, elsewhere: float) -> None:
    first, other, c = graph.edge[h // 2, AT], graph.half[h ^ 1, STRIDE], graph.half[h ^ 1, NODE]
    row, base = first + i * graph.half[h, STRIDE], first + k * graph.half[h, STRIDE]
    pruned = False
    for j in range(graph.node[c, OPTIONS]):
        theirs = graph.pair[base + j * other]
        if theirs < np.inf and elsewhere + graph.pair[row + j * other] - theirs <= 0:
            graph.pair[base + j * other] = np.inf
            pruned = True
    if pruned:
        graph.edge[h // 2, CHANGED] = 1
        touch(graph, graph.half[h, NODE])
        touch(graph, c)
