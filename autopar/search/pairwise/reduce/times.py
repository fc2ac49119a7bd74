"""Which times can exceed the limit? Only these stay, and of neighbouring ones only the worse.

- A time at which the base and the most of every member stay within the limit can be left out.
- Neither can a time bind if what is live then is also live at a time nearby whose base is no smaller.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    BEGIN,
    CHANGES,
    CLOCK,
    END,
    MEMBERS,
    OPTIONS,
    STAMP,
    USAGE_AT,
    Graph,
    members_of,
    ranges,
    starts,
)


def drop_times(graph: Graph, limit: float) -> Graph:
    base = np.cumsum(graph.base)[:-1]
    kept = np.flatnonzero(base + _most(graph) > limit)
    graph = _keep(graph, base, kept)
    members, _ = members_of(graph, np.flatnonzero(graph.node[:, ALIVE]))
    begin, end = graph.member[members, BEGIN], graph.member[members, END]
    begins, ends = np.zeros(len(kept) + 1, np.bool_), np.zeros(len(kept) + 1, np.bool_)
    begins[begin[begin < end]] = True
    ends[end[begin < end]] = True
    return _keep(graph, base[kept], _maximal(base[kept], begins, ends))


def _keep(graph: Graph, base: Floats, kept: Ints) -> Graph:
    if len(kept) == len(base):
        return graph
    graph.member[:, BEGIN] = np.searchsorted(kept, graph.member[:, BEGIN])
    graph.member[:, END] = np.searchsorted(kept, graph.member[:, END])
    graph.node[graph.node[:, MEMBERS] > 0, STAMP] = graph.counts[CLOCK]
    graph.counts[CHANGES] += 1
    return graph._replace(base=np.diff(base[kept], prepend=0.0, append=0.0))


def _most(graph: Graph) -> Floats:
    """Of all members together, at every time."""
    change = np.zeros(len(graph.base))
    nodes = np.flatnonzero(graph.node[:, ALIVE])
    members, owner = members_of(graph, nodes)
    if len(members):
        sizes = graph.node[nodes[owner], OPTIONS]
        usage = graph.usage[ranges(graph.member[members, USAGE_AT], sizes)]
        most = np.maximum.reduceat(usage, starts(sizes)[:-1])
        np.add.at(change, graph.member[members, BEGIN], most)
        np.subtract.at(change, graph.member[members, END], most)
    return np.cumsum(change)[:-1]


@compiled
def _maximal(base: Floats, begins: NDArray[np.bool_], ends: NDArray[np.bool_]) -> Ints:
    """Times that no neighbour among those kept covers; `grew`, `shrank`: since the time kept before."""
    stack, grew, shrank = np.empty(len(base), np.int64), np.empty(len(base), np.bool_), np.empty(len(base), np.bool_)
    top = 0
    more, less = False, False
    for t in range(len(base)):
        more, less = more or begins[t], less or ends[t]
        while top > 0 and not less and base[stack[top - 1]] <= base[t]:
            top -= 1
            more, less = more or grew[top], less or shrank[top]
        if top > 0 and not more and base[t] <= base[stack[top - 1]]:
            continue
        stack[top], grew[top], shrank[top] = t, more, less
        top += 1
        more, less = False, False
    return stack[:top]
