"""Which node is a function of its neighbour? Functional contraction, memory included.

If every option i of a allows at most one option f(i) of b, then a choice of a is one of both: b's cost, edges and
members, read through f, become a's. Options of a without a partner can be in no allowed choice.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Ints
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    AT,
    CHANGED,
    COST_AT,
    DEGREE,
    DONE,
    FIRST_HALF,
    FIRST_MEMBER,
    FUNCTION,
    MEMBER_NEXT,
    MEMBERS,
    NEXT,
    NODE,
    NONE,
    OPTIONS,
    PAIR_TOP,
    SHORT,
    STAMP,
    STRIDE,
    USAGE_AT,
    USAGE_TOP,
    Graph,
    edge_between,
    has_room,
    insert_half,
    insert_member,
    remove_edge,
    remove_half,
    remove_node,
    touch,
)
from autopar.search.pairwise.reduce.lift import HEAD, record

MOST_GROWTH = 1_000_000
"""Entries that edges may gain by one contraction: a hub read through a node of many options would fill the memory."""


@compiled
def contract(graph: Graph, since: int, heaviest: int) -> int:
    """Only nodes of at most `heaviest` edges and members move: raised step by step, hubs move last and least often."""
    for n in range(len(graph.node)):
        h = graph.node[n, FIRST_HALF] if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since else NONE
        while h != NONE:
            following = graph.half[h, NEXT]
            if not graph.edge[h // 2, CHANGED]:
                keeper = _keeper(graph, h, heaviest)
                if keeper != NONE:
                    if not _absorb(graph, keeper):
                        return SHORT
                    # The list of n has changed, or n is gone.
                    following = graph.node[n, FIRST_HALF] if graph.node[n, ALIVE] else NONE
            h = following
    return DONE


@compiled
def _keeper(graph: Graph, h: int, heaviest: int) -> int:
    """The half whose node takes in the other: the heavier where either could; NONE where none can."""
    best, least = NONE, heaviest + 1
    for g in (h, h ^ 1):
        other = graph.half[g ^ 1, NODE]
        weight = graph.node[other, DEGREE] + graph.node[other, MEMBERS]
        if graph.half[g, FUNCTION] == 1 and weight < least and _growth(graph, g) <= MOST_GROWTH:
            best, least = g, weight
    return best


@compiled
def _growth(graph: Graph, h: int) -> int:
    """By how many entries edges of the other end become larger, read through the options of h's node."""
    b = graph.half[h ^ 1, NODE]
    entries = 0
    g = graph.node[b, FIRST_HALF]
    while g != NONE:
        entries += graph.node[graph.half[g ^ 1, NODE], OPTIONS]
        g = graph.half[g, NEXT]
    return int(entries * (graph.node[graph.half[h, NODE], OPTIONS] - graph.node[b, OPTIONS]))


@compiled
def _absorb(graph: Graph, h: int) -> bool:
    """Whether there was room."""
    a, b = graph.half[h, NODE], graph.half[h ^ 1, NODE]
    size, old_size = graph.node[a, OPTIONS], graph.node[b, OPTIONS]
    pairs, usages = 0, 0
    function = _function(graph, h)
    same = size == old_size and bool(np.all(function == np.arange(size)))
    onto = same or (size == old_size and _reaches_all(function))
    if not same:
        g = graph.node[b, FIRST_HALF]
        while g != NONE:
            pairs += size * graph.node[graph.half[g ^ 1, NODE], OPTIONS]
            g = graph.half[g, NEXT]
        if size > old_size:
            usages = size * graph.node[b, MEMBERS]
    if not has_room(graph, pairs, usages, HEAD + 2 * size + 1):
        return False
    record(graph, b, a, NONE, function)
    first, own, other = graph.edge[h // 2, AT], graph.half[h, STRIDE], graph.half[h ^ 1, STRIDE]
    for i in range(size):
        pair = graph.pair[first + i * own + function[i] * other]
        graph.cost[graph.node[a, COST_AT] + i] += graph.cost[graph.node[b, COST_AT] + function[i]] + pair
    remove_edge(graph, h // 2)
    while graph.node[b, FIRST_HALF] != NONE:
        _take_edge(graph, graph.node[b, FIRST_HALF], a, function, same, onto)
    m = graph.node[b, FIRST_MEMBER]
    while m != NONE:
        following = graph.member[m, MEMBER_NEXT]
        if not same:
            first = graph.member[m, USAGE_AT]
            values = graph.usage[first : first + old_size][function]
            if size > old_size:
                first = graph.counts[USAGE_TOP]
                graph.counts[USAGE_TOP] += size
                graph.member[m, USAGE_AT] = first
            graph.usage[first : first + size] = values
        insert_member(graph, m, a)
        m = following
    touch(graph, a)
    remove_node(graph, b)
    return True


@compiled
def _function(graph: Graph, h: int) -> Ints:
    """The partner of every option of h's node; the first where there is none."""
    n, columns = graph.half[h, NODE], graph.node[graph.half[h ^ 1, NODE], OPTIONS]
    function = np.zeros(graph.node[n, OPTIONS], np.int64)
    for i in range(len(function)):
        row = graph.edge[h // 2, AT] + i * graph.half[h, STRIDE]
        for j in range(columns):
            if graph.pair[row + j * graph.half[h ^ 1, STRIDE]] < np.inf:
                function[i] = j
    return function


@compiled
def _reaches_all(function: Ints) -> bool:
    reached = np.zeros(len(function), np.bool_)
    for j in function:
        reached[j] = True
    return bool(reached.all())


@compiled
def _take_edge(graph: Graph, g: int, a: int, function: Ints, same: bool, onto: bool) -> None:
    """The edge of half g at b becomes one of a, or joins the one that a has to the same node."""
    c, first, own, other = (
        graph.half[g ^ 1, NODE],
        graph.edge[g // 2, AT],
        graph.half[g, STRIDE],
        graph.half[g ^ 1, STRIDE],
    )
    size, columns = len(function), graph.node[c, OPTIONS]
    between = edge_between(graph, a, c)
    touch(graph, c)
    if between != NONE:
        into, by_row, by_column = (
            graph.edge[between // 2, AT],
            graph.half[between, STRIDE],
            graph.half[between ^ 1, STRIDE],
        )
        for i in range(size):
            for j in range(columns):
                graph.pair[into + i * by_row + j * by_column] += graph.pair[first + function[i] * own + j * other]
        graph.edge[between // 2, CHANGED] = 1
        remove_edge(graph, g // 2)
        return
    remove_half(graph, g)
    insert_half(graph, g, a)
    if same:
        return
    into = graph.counts[PAIR_TOP]
    graph.counts[PAIR_TOP] += size * columns
    for i in range(size):
        for j in range(columns):
            graph.pair[into + i * columns + j] = graph.pair[first + function[i] * own + j * other]
    graph.edge[g // 2, AT] = into
    graph.half[g, STRIDE], graph.half[g ^ 1, STRIDE] = columns, 1
    if not onto:
        graph.edge[g // 2, CHANGED] = 1
