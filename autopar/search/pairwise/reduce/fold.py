"""What of a node that has one option? Its costs are its neighbours', its memory is certain, and it goes.

Whatever the others choose, it adds its row of every edge to them, its own cost to all choices, its usage to the base.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    AT,
    BEGIN,
    COST_AT,
    DONE,
    END,
    FIRST_HALF,
    FIRST_MEMBER,
    MEMBER_NEXT,
    NEXT,
    NO_OPTION,
    NODE,
    NONE,
    OPTIONS,
    SHORT,
    STAMP,
    STRIDE,
    USAGE_AT,
    Graph,
    has_room,
    remove_node,
    touch,
)
from autopar.search.pairwise.reduce.lift import HEAD, record


@compiled
def fold(graph: Graph, since: int) -> int:
    for n in range(len(graph.node)):
        if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since and graph.node[n, OPTIONS] == 1:
            if not has_room(graph, 0, 0, HEAD + 3):
                return SHORT
            if graph.cost[graph.node[n, COST_AT]] == np.inf:
                return NO_OPTION
            _fold(graph, n)
    return DONE


@compiled
def _fold(graph: Graph, n: int) -> None:
    record(graph, n, NONE, NONE, np.zeros(1, np.int64))
    graph.offset[0] += graph.cost[graph.node[n, COST_AT]]
    h = graph.node[n, FIRST_HALF]
    while h != NONE:
        c, first, other = graph.half[h ^ 1, NODE], graph.edge[h // 2, AT], graph.half[h ^ 1, STRIDE]
        for j in range(graph.node[c, OPTIONS]):
            graph.cost[graph.node[c, COST_AT] + j] += graph.pair[first + j * other]
        h = graph.half[h, NEXT]
    m = graph.node[n, FIRST_MEMBER]
    while m != NONE:
        taken = graph.usage[graph.member[m, USAGE_AT]]
        graph.base[graph.member[m, BEGIN]] += taken
        graph.base[graph.member[m, END]] -= taken
        m = graph.member[m, MEMBER_NEXT]
    touch(graph, n)
    remove_node(graph, n)
