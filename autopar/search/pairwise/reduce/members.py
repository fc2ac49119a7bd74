"""Which memory does not depend on the choice? What a member takes at least goes to the base; constant members go.

The least usage of a member's options is taken whatever is chosen. Two members of a node over one interval are one.
"""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    BEGIN,
    DONE,
    END,
    FIRST_MEMBER,
    MEMBER_NEXT,
    MEMBERS,
    NONE,
    OPTIONS,
    STAMP,
    USAGE_AT,
    Graph,
    insert_member,
    touch,
)


@compiled
def settle_members(graph: Graph, since: int) -> int:
    for n in range(len(graph.node)):
        if graph.node[n, ALIVE] and graph.node[n, STAMP] >= since and graph.node[n, MEMBERS] > 0:
            _settle(graph, n)
            if graph.node[n, MEMBERS] > 1:
                _merge(graph, n)
    return DONE


@compiled
def _settle(graph: Graph, n: int) -> None:
    size, before, m = graph.node[n, OPTIONS], graph.node[n, MEMBERS], graph.node[n, FIRST_MEMBER]
    graph.node[n, FIRST_MEMBER], graph.node[n, MEMBERS] = NONE, 0
    while m != NONE:
        following, first = graph.member[m, MEMBER_NEXT], graph.member[m, USAGE_AT]
        if graph.member[m, BEGIN] < graph.member[m, END]:
            least, most = np.inf, -np.inf
            for i in range(size):
                least, most = min(least, graph.usage[first + i]), max(most, graph.usage[first + i])
            if least > 0:
                graph.base[graph.member[m, BEGIN]] += least
                graph.base[graph.member[m, END]] -= least
                for i in range(size):
                    graph.usage[first + i] -= least
                touch(graph, n)
            if most > least:
                insert_member(graph, m, n)
        m = following
    if graph.node[n, MEMBERS] != before:
        touch(graph, n)


@compiled
def _merge(graph: Graph, n: int) -> None:
    count = graph.node[n, MEMBERS]
    members, keys = np.empty(count, np.int64), np.empty(count, np.int64)
    m = graph.node[n, FIRST_MEMBER]
    for k in range(count):
        members[k] = m
        # Sorted by interval, and the position rides along.
        keys[k] = (graph.member[m, BEGIN] * len(graph.base) + graph.member[m, END]) * count + k
        m = graph.member[m, MEMBER_NEXT]
    keys = np.sort(keys)
    if not np.any(keys[1:] // count == keys[:-1] // count):
        return
    graph.node[n, FIRST_MEMBER], graph.node[n, MEMBERS] = NONE, 0
    for k in range(count):
        m = members[keys[k] % count]
        if k > 0 and keys[k] // count == keys[k - 1] // count:
            into = graph.member[graph.node[n, FIRST_MEMBER], USAGE_AT]
            for i in range(graph.node[n, OPTIONS]):
                graph.usage[into + i] += graph.usage[graph.member[m, USAGE_AT] + i]
        else:
            insert_member(graph, m, n)
    touch(graph, n)
