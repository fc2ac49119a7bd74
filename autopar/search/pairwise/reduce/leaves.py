"""Which options of a leaf can its one neighbour's option leave out? Pareto pruning.

Once the neighbour has chosen j, option k of a leaf is needless if some i costs no more with j and takes no more memory
at any time. The pair (k, j) is then not allowed; an option without pairs goes by arc consistency, and a neighbour left
with one partner an option takes the leaf in.
"""

import numpy as np

from autopar.search.pairwise.compiled import compiled
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    AT,
    CHANGED,
    COST_AT,
    DEGREE,
    DONE,
    FIRST_HALF,
    NODE,
    OPTIONS,
    STAMP,
    STRIDE,
    Graph,
    touch,
)
from autopar.search.pairwise.reduce.profile import no_more, profile


@compiled
def prune_leaves(graph: Graph, since: int) -> int:
    for n in range(len(graph.node)):
        if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since and graph.node[n, DEGREE] == 1:
            _prune(graph, n)
    return DONE


@compiled
def _prune(graph: Graph, n: int) -> None:
    h, at, size = graph.node[n, FIRST_HALF], graph.node[n, COST_AT], graph.node[n, OPTIONS]
    parent, own, other = graph.half[h ^ 1, NODE], graph.half[h, STRIDE], graph.half[h ^ 1, STRIDE]
    _, taken = profile(graph, n)
    pruned = False
    for k in range(size):
        for i in range(size):
            if i == k or not no_more(taken, i, k):
                continue
            row, base = graph.edge[h // 2, AT] + i * own, graph.edge[h // 2, AT] + k * own
            for j in range(graph.node[parent, OPTIONS]):
                mine = graph.cost[at + i] + graph.pair[row + j * other]
                theirs = graph.cost[at + k] + graph.pair[base + j * other]
                if mine <= theirs < np.inf:
                    graph.pair[base + j * other] = np.inf
                    pruned = True
    if pruned:
        graph.edge[h // 2, CHANGED] = 1
        touch(graph, n)
        touch(graph, parent)
