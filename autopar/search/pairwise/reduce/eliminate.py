"""Which nodes decide themselves once their neighbours have? Those that take no memory: min-sum elimination.

A node without members and with edges to p and q alone adds min over i of cost(i) + to_p(i, j) + to_q(i, k), a function
of (j, k): an edge between p and q takes its place, and i is read off when j and k are known. With one neighbour it is
a cost of that one's options, with none a number.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    AT,
    CHANGED,
    CHANGES,
    COST_AT,
    DEGREE,
    DONE,
    FIRST_HALF,
    MEMBERS,
    NEXT,
    NO_OPTION,
    NODE,
    NONE,
    OPTIONS,
    PAIR_TOP,
    SHORT,
    STAMP,
    STRIDE,
    Graph,
    edge_between,
    has_room,
    insert_half,
    remove_half,
    remove_node,
    touch,
)
from autopar.search.pairwise.reduce.lift import HEAD, record

SMALL_TABLE = 256
"""Entries of a new edge that are welcome even where they are more than those of the two edges that go."""


@compiled
def eliminate(graph: Graph, since: int) -> int:
    while True:
        before = graph.counts[CHANGES]
        for n in range(len(graph.node)):
            if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since and graph.node[n, MEMBERS] == 0:
                degree = graph.node[n, DEGREE]
                if degree <= 1:
                    status = _leaf(graph, n)
                elif degree == 2:
                    status = _link(graph, n)
                else:
                    status = DONE
                if status != DONE:
                    return status
        if graph.counts[CHANGES] == before:
            return DONE


@compiled
def _leaf(graph: Graph, n: int) -> int:
    size, at, h = graph.node[n, OPTIONS], graph.node[n, COST_AT], graph.node[n, FIRST_HALF]
    own = graph.cost[at : at + size]
    if h == NONE:
        if not has_room(graph, 0, 0, HEAD + 3):
            return SHORT
        if own.min() == np.inf:
            return NO_OPTION
        graph.offset[0] += own.min()
        record(graph, n, NONE, NONE, np.full(1, np.argmin(own)))
        graph.counts[CHANGES] += 1
        remove_node(graph, n)
        return DONE
    p = graph.half[h ^ 1, NODE]
    columns = graph.node[p, OPTIONS]
    if not has_room(graph, 0, 0, HEAD + 2 * columns + 1):
        return SHORT
    table = np.empty(columns, np.int64)
    for j in range(columns):
        best = own + _column(graph, h, j)
        table[j] = np.argmin(best)
        graph.cost[graph.node[p, COST_AT] + j] += best[table[j]]
    record(graph, n, p, NONE, table)
    remove_node(graph, n)
    return DONE


@compiled
def _link(graph: Graph, n: int) -> int:
    """Of degree two; stays where the edge in its place would be larger than both of its own."""
    g = graph.node[n, FIRST_HALF]
    h = graph.half[g, NEXT]
    p, q = graph.half[g ^ 1, NODE], graph.half[h ^ 1, NODE]
    rows, columns, size = graph.node[p, OPTIONS], graph.node[q, OPTIONS], graph.node[n, OPTIONS]
    between = edge_between(graph, p, q)
    if between == NONE and rows * columns > max(SMALL_TABLE, size * (rows + columns)):
        return DONE
    if not has_room(graph, rows * columns, 0, HEAD + rows + columns + rows * columns):
        return SHORT
    costs, table = _best(graph, n, g, h)
    record(graph, n, p, q, table)
    if between == NONE:
        # The edge to p turns into the edge from p to q: its half at n goes over to q.
        between = g ^ 1
        remove_half(graph, g)
        insert_half(graph, g, q)
        graph.half[between, STRIDE], graph.half[g, STRIDE] = columns, 1
        graph.edge[g // 2, AT] = graph.counts[PAIR_TOP]
        graph.pair[graph.counts[PAIR_TOP] : graph.counts[PAIR_TOP] + rows * columns] = costs
        graph.counts[PAIR_TOP] += rows * columns
    else:
        first, own, other = graph.edge[between // 2, AT], graph.half[between, STRIDE], graph.half[between ^ 1, STRIDE]
        for j in range(rows):
            for k in range(columns):
                graph.pair[first + j * own + k * other] += costs[j * columns + k]
    graph.edge[between // 2, CHANGED] = 1
    touch(graph, p)
    touch(graph, q)
    remove_node(graph, n)
    return DONE


@compiled
def _best(graph: Graph, n: int, g: int, h: int) -> tuple[Floats, Ints]:
    """Least cost with n's edges of halves g and h, and the option that has it, for every pair of the other ends'."""
    rows, columns = graph.node[graph.half[g ^ 1, NODE], OPTIONS], graph.node[graph.half[h ^ 1, NODE], OPTIONS]
    costs, table = np.full(rows * columns, np.inf), np.zeros(rows * columns, np.int64)
    at = graph.node[n, COST_AT]
    for i in range(graph.node[n, OPTIONS]):
        to_p = graph.edge[g // 2, AT] + i * graph.half[g, STRIDE]
        to_q = graph.edge[h // 2, AT] + i * graph.half[h, STRIDE]
        for j in range(rows):
            so_far = graph.cost[at + i] + graph.pair[to_p + j * graph.half[g ^ 1, STRIDE]]
            if so_far < np.inf:
                for k in range(columns):
                    total = so_far + graph.pair[to_q + k * graph.half[h ^ 1, STRIDE]]
                    if total < costs[j * columns + k]:
                        costs[j * columns + k] = total
                        table[j * columns + k] = i
    return costs, table


@compiled
def _column(graph: Graph, h: int, j: int) -> Floats:
    """Costs of h's node's options with option j of the other end."""
    size = graph.node[graph.half[h, NODE], OPTIONS]
    values = np.empty(size)
    for i in range(size):
        values[i] = graph.pair[graph.edge[h // 2, AT] + i * graph.half[h, STRIDE] + j * graph.half[h ^ 1, STRIDE]]
    return values
