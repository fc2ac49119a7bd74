"""Which options and edges mean nothing? Arc consistency, room of gone options, edges that separate additively.

- An option that an edge allows with no option of the other end can be in no allowed choice: it goes.
- The least cost of a row holds whatever the other end chooses, so it may move to the row's option; likewise columns.
- An edge of zeros then says nothing: it goes. Every edge u(i) + v(j) becomes one, for its rows differ by u alone.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    AT,
    CHANGED,
    CHANGES,
    COST_AT,
    DONE,
    FIRST_HALF,
    FIRST_MEMBER,
    FUNCTION,
    MEMBER_NEXT,
    NEXT,
    NO_OPTION,
    NODE,
    NONE,
    OPTIONS,
    STAMP,
    STRIDE,
    USAGE_AT,
    Graph,
    remove_edge,
    touch,
)


@compiled
def tighten(graph: Graph, since: int) -> int:
    while True:
        before = graph.counts[CHANGES]
        for n in range(len(graph.node)):
            if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since:
                _close_ranks(graph, n)
                if graph.node[n, OPTIONS] == 0:
                    return NO_OPTION
                h = graph.node[n, FIRST_HALF]
                while h != NONE:
                    following = graph.half[h, NEXT]
                    if graph.edge[h // 2, CHANGED]:
                        _settle(graph, h)
                    h = following
        if graph.counts[CHANGES] == before:
            return DONE


@compiled
def _close_ranks(graph: Graph, n: int) -> None:
    """Take options of infinite cost out of a node, its edges and its members."""
    at, size = graph.node[n, COST_AT], graph.node[n, OPTIONS]
    kept = np.flatnonzero(graph.cost[at : at + size] < np.inf)
    if len(kept) == size:
        return
    graph.node[n, OPTIONS] = len(kept)
    touch(graph, n)
    for k in range(len(kept)):
        graph.cost[at + k] = graph.cost[at + kept[k]]
        graph.option[at + k] = graph.option[at + kept[k]]
    h = graph.node[n, FIRST_HALF]
    while h != NONE:
        c = graph.half[h ^ 1, NODE]
        own, other, first = graph.half[h, STRIDE], graph.half[h ^ 1, STRIDE], graph.edge[h // 2, AT]
        for k in range(len(kept)):
            if kept[k] != k:
                for j in range(graph.node[c, OPTIONS]):
                    graph.pair[first + k * own + j * other] = graph.pair[first + kept[k] * own + j * other]
        graph.edge[h // 2, CHANGED] = 1
        touch(graph, c)
        h = graph.half[h, NEXT]
    m = graph.node[n, FIRST_MEMBER]
    while m != NONE:
        first = graph.member[m, USAGE_AT]
        for k in range(len(kept)):
            graph.usage[first + k] = graph.usage[first + kept[k]]
        m = graph.member[m, MEMBER_NEXT]


@compiled
def _settle(graph: Graph, h: int) -> None:
    """Bring an edge to the form of this file, and note which end's options have one partner at most."""
    first = graph.edge[h // 2, AT]
    graph.edge[h // 2, CHANGED] = 0
    zero = True
    for g in (h, h ^ 1):
        n = graph.half[g, NODE]
        rows, columns = graph.node[n, OPTIONS], graph.node[graph.half[g ^ 1, NODE], OPTIONS]
        own, other, at = graph.half[g, STRIDE], graph.half[g ^ 1, STRIDE], graph.node[n, COST_AT]
        graph.half[g, FUNCTION] = 1
        moved = False
        for i in range(rows):
            row = first + i * own
            least, partners = np.inf, 0
            for j in range(columns):
                value = graph.pair[row + j * other]
                least = min(least, value)
                partners += value < np.inf
            if partners > 1:
                graph.half[g, FUNCTION] = 0
            if least != 0 and graph.cost[at + i] < np.inf:
                moved = True
                graph.cost[at + i] += least
                if least < np.inf:
                    for j in range(columns):
                        graph.pair[row + j * other] -= least
        if moved:
            touch(graph, n)
            touch(graph, graph.half[g ^ 1, NODE])
    rows, columns = graph.node[graph.half[h, NODE], OPTIONS], graph.node[graph.half[h ^ 1, NODE], OPTIONS]
    own, other = graph.half[h, STRIDE], graph.half[h ^ 1, STRIDE]
    for i in range(rows):
        for j in range(columns):
            if graph.pair[first + i * own + j * other] != 0:
                zero = False
                break
        if not zero:
            break
    if zero:
        touch(graph, graph.half[h, NODE])
        touch(graph, graph.half[h ^ 1, NODE])
        remove_edge(graph, h // 2)
