"""How much memory does an option take, and when? Its members' usages added up between their beginnings and ends."""

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.graph import (
    BEGIN,
    END,
    FIRST_MEMBER,
    MEMBER_NEXT,
    MEMBERS,
    NONE,
    OPTIONS,
    USAGE_AT,
    Graph,
)


@compiled
def profile(graph: Graph, n: int) -> tuple[Ints, Floats]:
    """Times at which something begins or ends, and bytes of every option (row) from each of them to the next."""
    count, size = graph.node[n, MEMBERS], graph.node[n, OPTIONS]
    ends = np.empty(2 * count, np.int64)
    m = graph.node[n, FIRST_MEMBER]
    for k in range(count):
        ends[2 * k], ends[2 * k + 1] = graph.member[m, BEGIN], graph.member[m, END]
        m = graph.member[m, MEMBER_NEXT]
    times = _distinct(np.sort(ends))
    taken = np.zeros((size, max(1, len(times))))
    m = graph.node[n, FIRST_MEMBER]
    while m != NONE:
        first, begin, end = graph.member[m, USAGE_AT], graph.member[m, BEGIN], graph.member[m, END]
        if begin < end:
            begin, end = np.searchsorted(times, begin), np.searchsorted(times, end)
            for i in range(size):
                taken[i, begin] += graph.usage[first + i]
                taken[i, end] -= graph.usage[first + i]
        m = graph.member[m, MEMBER_NEXT]
    for i in range(size):
        for s in range(1, taken.shape[1]):
            taken[i, s] += taken[i, s - 1]
    return times, taken


@compiled
def _distinct(times: Ints) -> Ints:
    kept = 0
    for t in times:
        if kept == 0 or t != times[kept - 1]:
            times[kept] = t
            kept += 1
    return times[:kept]


@compiled
def no_more(taken: Floats, i: int, k: int) -> bool:
    """Whether option i takes no more than k at any time."""
    s = 0
    while s < taken.shape[1] and taken[i, s] <= taken[k, s]:
        s += 1
    return bool(s == taken.shape[1])
