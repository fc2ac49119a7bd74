"""Which times can exceed the limit? Only these stay, and of neighbouring ones only the worse.

- A time at which the base and the most of every member stay within the limit can be left out.
- Neither can a time bind if what is live then is also live at a time nearby whose base is no smaller.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.search.pairwise.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.graph import (
    ALIVE,
    BEGIN,
    END,
    FIRST_MEMBER,
    MEMBER_NEXT,
    MEMBERS,
    NONE,
    OPTIONS,
    USAGE_AT,
    Graph,
    touch,
)


def drop_times(graph: Graph, limit: float) -> Graph:
    base = np.cumsum(graph.base)[:-1]
    kept = np.flatnonzero(base + _most(graph) > limit)
    graph = _keep(graph, base, kept)
    live_at, gone_at = _changes(graph, len(kept))
    return _keep(graph, base[kept], _maximal(base[kept], live_at, gone_at))


def _keep(graph: Graph, base: Floats, kept: Ints) -> Graph:
    if len(kept) == len(base):
        return graph
    graph.member[:, BEGIN] = np.searchsorted(kept, graph.member[:, BEGIN])
    graph.member[:, END] = np.searchsorted(kept, graph.member[:, END])
    _touch_members(graph)
    return graph._replace(base=np.diff(base[kept], prepend=0.0, append=0.0))


@compiled
def _most(graph: Graph) -> Floats:
    """Of all members together, at every time."""
    change = np.zeros(len(graph.base))
    for n in range(len(graph.node)):
        m = graph.node[n, FIRST_MEMBER] if graph.node[n, ALIVE] else NONE
        while m != NONE:
            first = graph.member[m, USAGE_AT]
            most = graph.usage[first : first + graph.node[n, OPTIONS]].max()
            change[graph.member[m, BEGIN]] += most
            change[graph.member[m, END]] -= most
            m = graph.member[m, MEMBER_NEXT]
    return np.cumsum(change)[:-1]


@compiled
def _changes(graph: Graph, num_times: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether some member begins, and whether some ends, at a time."""
    begins, ends = np.zeros(num_times + 1, np.bool_), np.zeros(num_times + 1, np.bool_)
    for n in range(len(graph.node)):
        m = graph.node[n, FIRST_MEMBER] if graph.node[n, ALIVE] else NONE
        while m != NONE:
            if graph.member[m, BEGIN] < graph.member[m, END]:
                begins[graph.member[m, BEGIN]] = True
                ends[graph.member[m, END]] = True
            m = graph.member[m, MEMBER_NEXT]
    return begins, ends


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


@compiled
def _touch_members(graph: Graph) -> None:
    for n in range(len(graph.node)):
        if graph.node[n, ALIVE] and graph.node[n, MEMBERS] > 0:
            touch(graph, n)
