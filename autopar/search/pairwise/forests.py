"""What is the best choice on a forest of the graph while the rest stays as it is?

A random set of nodes that induces a forest is drawn (a node joins when its neighbours that joined before stand in
different trees; union-find). On it the best choice is exact: costs flow from the leaves to the roots, options back,
    total[u, i] = own[u, i] + sum over children c of min over j (total[c, j] + pair[c, j; u, i])
    own[u, i]   = cost + prices * usage + pairs with what stays fixed - temperature * Gumbel noise.
In the *hard* form options flow back under the memory limit: each node takes the best one that fits where all undecided
nodes stand as before, and a tree that came out worse than it stood is put back.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.search.compiled import State, below, compiled, draw
from autopar.search.pairwise.graph import Graph, usage_of
from autopar.search.pairwise.levels import add, fill, highest, levels
from autopar.search.pairwise.problem import Floats, Ints

Flags = NDArray[np.bool_]

_BITS = 14


def gumbel_table() -> Floats:
    """Quantiles of the standard Gumbel distribution; drawing from them is quicker than two logarithms."""
    return np.asarray(-np.log(-np.log((np.arange(2**_BITS) + 0.5) / 2**_BITS)), np.float64)


class Work(NamedTuple):
    """Memory that sweeps use again and again.

    Of the forest, of size k: order[:k] are its nodes, `planted`, tree by tree, parents first; up[u] is the half-edge
    from u to its parent, -1 at a root. `own` and `total`: an option.
    """

    planted: Flags
    order: Ints
    up: Ints
    own: Floats
    total: Floats
    value: Floats
    gumbel: Floats
    peak: Floats
    added: Floats


@compiled
def _find(root: Ints, u: int) -> int:
    while root[u] != u:
        root[u] = root[root[u]]
        u = root[u]
    return u


@compiled
def plant(graph: Graph, work: Work, state: State) -> int:
    """Draw a spanning induced forest; returns its size."""
    planted, order, up = work.planted, work.order, work.up
    nodes = len(graph.first_option) - 1
    queue, root, seen = np.arange(nodes), np.arange(nodes), np.full(nodes, -1)
    for i in range(nodes - 1, 0, -1):
        j = below(state, i + 1)
        queue[i], queue[j] = queue[j], queue[i]
    planted[:] = False
    if len(graph.other) > 0 and draw(state) & np.uint64(1):
        # A hub comes after some of its many neighbours nearly always; half of the forests start at an end of an edge.
        hub = graph.other[below(state, len(graph.other))]
        planted[hub] = True
    for u in queue:
        if planted[u]:
            continue
        joins = True
        for h in range(graph.first_half[u], graph.first_half[u + 1]):
            if planted[graph.other[h]]:
                r = _find(root, graph.other[h])
                if seen[r] == u:
                    joins = False
                    break
                seen[r] = u
        if joins:
            planted[u] = True
            for h in range(graph.first_half[u], graph.first_half[u + 1]):
                if planted[graph.other[h]]:
                    root[_find(root, graph.other[h])] = u
    reached = np.zeros(nodes, np.bool_)
    size = done = 0
    for u in queue:
        if not planted[u] or reached[u]:
            continue
        reached[u] = True
        up[u] = -1
        order[size] = u
        size += 1
        while done < size:
            v = order[done]
            done += 1
            for h in range(graph.first_half[v], graph.first_half[v + 1]):
                w = graph.other[h]
                if planted[w] and not reached[w]:
                    reached[w] = True
                    up[w] = graph.twin[h]
                    order[size] = w
                    size += 1
    return size


@compiled
def own_costs(
    graph: Graph, work: Work, size: int, choice: Ints, prices: Floats, temperature: float, state: State
) -> None:
    """Fill `own` at the options of the forest; `prices[t]` is the sum of what a byte costs before time t."""
    own, planted = work.own, work.planted
    for k in range(size):
        u = work.order[k]
        first = graph.first_option[u]
        options = graph.first_option[u + 1] - first
        for i in range(options):
            own[first + i] = graph.cost[first + i]
        if temperature > 0.0:
            for i in range(options):
                own[first + i] -= temperature * work.gumbel[np.int64(draw(state) >> np.uint64(64 - _BITS))]
        for m in range(graph.first_member[u], graph.first_member[u + 1]):
            price = prices[graph.end[m]] - prices[graph.begin[m]]
            if price != 0.0:
                for i in range(options):
                    own[first + i] += price * graph.usage[graph.first_usage[m] + i]
        for h in range(graph.first_half[u], graph.first_half[u + 1]):
            v = graph.other[h]
            if not planted[v]:
                row = graph.first_block[h] + choice[v] * options
                for i in range(options):
                    own[first + i] += graph.block[row + i]


@compiled
def gather(graph: Graph, work: Work, size: int) -> None:
    """From the leaves to the roots: the least cost of each subtree, an option of its top."""
    order, up, own, total = work.order, work.up, work.own, work.total
    for k in range(size):
        u = order[k]
        for i in range(graph.first_option[u], graph.first_option[u + 1]):
            total[i] = own[i]
    for k in range(size - 1, -1, -1):
        u = order[k]
        if up[u] < 0:
            continue
        first = graph.first_option[u]
        options = graph.first_option[u + 1] - first
        parent = graph.other[up[u]]
        top = graph.first_option[parent]
        row = graph.first_block[up[u]]
        for j in range(graph.first_option[parent + 1] - top):
            least = np.inf
            for i in range(options):
                value = total[first + i] + graph.block[row + i]
                if value < least:
                    least = value
            total[top + j] += least
            row += options


@compiled
def _values(graph: Graph, work: Work, u: int, choice: Ints) -> int:
    """Cost of each option of u, given its parent's; returns the best option."""
    up, total, value = work.up, work.total, work.value
    first = graph.first_option[u]
    options = graph.first_option[u + 1] - first
    row = -1
    if up[u] >= 0:
        row = graph.first_block[up[u]] + choice[graph.other[up[u]]] * options
    best = 0
    for i in range(options):
        value[i] = total[first + i]
        if row >= 0:
            value[i] += graph.block[row + i]
        if value[i] < value[best]:
            best = i
    return best


@compiled
def settle(graph: Graph, work: Work, size: int, choice: Ints) -> None:
    """From the roots to the leaves: the best options, memory only through prices."""
    for k in range(size):
        u = work.order[k]
        choice[u] = _values(graph, work, u, choice)


@compiled
def place(graph: Graph, work: Work, u: int, option: int, sign: float) -> None:
    """Add sign * what an option of u takes to the levels."""
    for m in range(graph.first_member[u], graph.first_member[u + 1]):
        nbytes = graph.usage[graph.first_usage[m] + option]
        if nbytes != 0.0:
            add(work.peak, work.added, graph.begin[m], graph.end[m], sign * nbytes)


@compiled
def _takes_no_more(graph: Graph, u: int, option: int, than: int) -> bool:
    for m in range(graph.first_member[u], graph.first_member[u + 1]):
        if graph.usage[graph.first_usage[m] + option] > graph.usage[graph.first_usage[m] + than]:
            return False
    return True


@compiled
def best_fit(graph: Graph, work: Work, u: int, stood: int, best: int) -> int:
    """Move u from option `stood` to the least `value` that fits, `best` the least of all; `stood` always fits."""
    if best == stood:
        return stood
    if _takes_no_more(graph, u, best, stood):
        place(graph, work, u, stood, -1.0)
        place(graph, work, u, best, 1.0)
        return best
    options = graph.first_option[u + 1] - graph.first_option[u]
    place(graph, work, u, stood, -1.0)
    barred = np.zeros(options, np.bool_)
    for m in range(graph.first_member[u], graph.first_member[u + 1]):
        slack = graph.limit - highest(work.peak, work.added, graph.begin[m], graph.end[m])
        for i in range(options):
            if graph.usage[graph.first_usage[m] + i] > slack:
                barred[i] = True
    barred[stood] = False
    while True:
        chosen = stood
        for i in range(options):
            if not barred[i] and work.value[i] < work.value[chosen]:
                chosen = i
        place(graph, work, u, chosen, 1.0)
        if chosen == stood or not graph.overlapping[u]:
            return chosen
        fits = True
        for m in range(graph.first_member[u], graph.first_member[u + 1]):
            if highest(work.peak, work.added, graph.begin[m], graph.end[m]) > graph.limit:
                fits = False
        if fits:
            return chosen
        place(graph, work, u, chosen, -1.0)
        barred[chosen] = True


@compiled
def settle_hard(graph: Graph, work: Work, size: int, choice: Ints) -> None:
    """From the roots to the leaves, tree by tree, within the limit where the choice stood within it."""
    order, up, own = work.order, work.up, work.own
    stood = choice.copy()
    start = 0
    while start < size:
        stop = start
        before = after = 0.0
        while stop < size and (stop == start or up[order[stop]] >= 0):
            u = order[stop]
            first = graph.first_option[u]
            options = graph.first_option[u + 1] - first
            best = _values(graph, work, u, choice)
            choice[u] = best_fit(graph, work, u, stood[u], best)
            before += own[first + stood[u]]
            after += own[first + choice[u]]
            if up[u] >= 0:
                parent = graph.other[up[u]]
                before += graph.block[graph.first_block[up[u]] + stood[parent] * options + stood[u]]
                after += graph.block[graph.first_block[up[u]] + choice[parent] * options + choice[u]]
            stop += 1
        if after > before:
            for k in range(start, stop):
                u = order[k]
                if choice[u] != stood[u]:
                    place(graph, work, u, choice[u], -1.0)
                    place(graph, work, u, stood[u], 1.0)
                    choice[u] = stood[u]
        start = stop


def work_for(graph: Graph) -> Work:
    """Room for one search at a time."""
    nodes, options = len(graph.first_option) - 1, len(graph.cost)
    tree = levels(graph.base)
    return Work(
        planted=np.zeros(nodes, np.bool_),
        order=np.empty(nodes, np.int64),
        up=np.empty(nodes, np.int64),
        own=np.empty(options),
        total=np.empty(options),
        value=np.empty(int(np.diff(graph.first_option).max(initial=0))),
        gumbel=gumbel_table(),
        peak=tree.peak,
        added=tree.added,
    )


@compiled
def sweep(
    graph: Graph,
    work: Work,
    choice: Ints,
    prices: Floats,
    temperature: float,
    hard: bool,
    over: float,
    state: State,
) -> None:
    """Draw a forest and set `choice` to the best on it; `hard` ones may go `over` the limit by so many bytes.

    Where that is exceeded already, the level counts as full: what does not fit yet is never made worse.
    """
    size = plant(graph, work, state)
    own_costs(graph, work, size, choice, prices, temperature, state)
    gather(graph, work, size)
    if hard:
        fill(work.peak, work.added, np.minimum(usage_of(graph, choice) - over, graph.limit))
        settle_hard(graph, work, size, choice)
    else:
        settle(graph, work, size, choice)
