"""Which nodes and options of a graph can go at no loss, whatever the limit? A rule a function, with its proof.

Each looks at one node and its edges.
"""

from collections.abc import Sequence

import numpy as np

from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.tables import Member, Tables

MOST_GROWTH = 1_000_000
"""Entries that edges may gain by one contraction: a hub read through a node of many options would fill the memory."""
SMALL_TABLE = 256
"""Entries of a new edge that are welcome even where they are more than those of the two edges that go."""
MOST_TRIED = 4_000_000
"""Triples of options in one elimination, or entries of rows compared at a time: 30 MB."""


def tighten(tables: Tables, node: int) -> None:
    """An option that an edge allows with no option of the other end, and has an infinite cost by that, can be in no
    allowed choice: it goes."""
    allowed = tables.cost[node] < np.inf
    if not allowed.all():
        tables.keep(node, np.flatnonzero(allowed))


def settle(tables: Tables, node: int) -> None:
    """The least usage of a member's options is taken whatever is chosen: it is certain, and so is all of a member whose
    options take as much. Two members of a node over one interval are one."""
    if not tables.members[node]:
        return
    found: dict[tuple[int, int], Floats] = {}
    for begin, end, taken in tables.members[node]:
        if begin < end:
            found[begin, end] = found[begin, end] + taken if (begin, end) in found else taken
    kept: list[Member] = []
    for (begin, end), taken in found.items():
        if least := float(taken.min()):
            tables.take(begin, end, least)
            tables.touch(node)
        if taken.max() > least:
            kept.append((begin, end, taken - least if least else taken))
    if len(kept) != len(tables.members[node]):
        tables.touch(node)
    tables.members[node] = kept


def fold(tables: Tables, node: int) -> None:
    """A node of one option adds its row of every edge to the neighbours, whatever these choose."""
    if len(tables.cost[node]) != 1 or tables.members[node] or tables.cost[node][0] == np.inf:
        return
    tables.offset += float(tables.cost[node][0])
    for other, pairs in tables.near[node].items():
        tables.raise_cost(other, pairs[0])
    tables.remove(node, (), np.zeros((), np.int64))


def eliminate(tables: Tables, node: int) -> None:
    """A node without members and with edges to p and q alone decides itself once these have: it adds the least of its
    cost and its pairs with j and k, a function of (j, k), to their edge. With one neighbour that is a cost of that
    one's options, with none a number. It stays where an edge that is new would be larger than both that go."""
    ends = tuple(tables.near[node])
    if tables.members[node] or len(ends) > 2:
        return
    sizes = [len(tables.cost[end]) for end in ends]
    size, entries = len(tables.cost[node]), int(np.prod(sizes))
    if len(ends) == 2 and ends[1] not in tables.near[ends[0]] and entries > max(SMALL_TABLE, size * sum(sizes)):
        return
    if size * entries > MOST_TRIED:
        return
    total = tables.cost[node].reshape(-1, *(1 for _ in ends))
    for place, end in enumerate(ends):
        shape = [size, *(1 for _ in ends)]
        shape[1 + place] = sizes[place]
        total = total + tables.near[node][end].reshape(shape)
    best, least = total.argmin(axis=0), total.min(axis=0)
    if not ends:
        if least == np.inf:
            raise tables.infeasible()
        tables.offset += float(least)
    tables.remove(node, ends, best)
    if len(ends) == 1:
        tables.raise_cost(ends[0], least)
    elif ends:
        tables.add_pairs(ends[0], ends[1], least)


def contract(tables: Tables, node: int, heaviest: float = np.inf) -> None:
    """If every option i of a allows at most one option f(i) of b, then a choice of a is one of both: b's cost, edges
    and members, read through f, become a's. The lighter joins the heavier where either could, if it is at most so
    heavy in edges and members: raised step by step, hubs move last and least often."""
    for other in list(tables.near[node]):
        if other not in tables.near[node]:
            continue
        ways = [(a, b) for a, b in ((node, other), (other, node)) if (a, b) in tables.decides]
        ways = [(a, b) for a, b in ways if _weight(tables, b) <= heaviest and _growth(tables, a, b) <= MOST_GROWTH]
        if not ways:
            continue
        keeper, joins = min(ways, key=lambda way: _weight(tables, way[1]))
        _absorb(tables, keeper, joins)
        if joins == node:
            return


def _weight(tables: Tables, node: int) -> int:
    return len(tables.near[node]) + len(tables.members[node])


def _growth(tables: Tables, keeper: int, joins: int) -> int:
    """By how many entries edges of the one that joins become larger."""
    more = len(tables.cost[keeper]) - len(tables.cost[joins])
    return more * sum(len(tables.cost[other]) for other in tables.near[joins])


def _absorb(tables: Tables, a: int, b: int) -> None:
    pairs, edges, members = tables.near[a][b], dict(tables.near[b]), tables.members[b]
    function: Ints = (pairs < np.inf).argmax(axis=1)
    own = tables.cost[b][function] + pairs[np.arange(len(function)), function]
    tables.remove(b, (a,), function)
    tables.raise_cost(a, own)
    tables.members[a] = [*tables.members[a], *((begin, end, taken[function]) for begin, end, taken in members)]
    for other, table in edges.items():
        if other != a:
            tables.add_pairs(a, other, table[function])


def drop_dominated(tables: Tables, node: int) -> None:
    """Option i makes k needless if it takes no more memory at any time, costs no more, and cost(i) - cost(k) plus, over
    the edges, the largest difference of their rows is at most 0: whatever the neighbours choose, i in place of k costs
    and takes no more. Of equals the first is left; differences between edges in their normal form are never negative,
    so that options cannot replace each other in a circle."""
    cost = tables.cost[node]
    if len(cost) < 2 or not (cost < np.inf).all():
        return
    replaces = cost[:, None] <= cost[None, :]
    np.fill_diagonal(replaces, False)
    i, k = np.nonzero(replaces)
    total = cost[i] - cost[k]
    for pairs in tables.near[node].values():
        if not len(i):
            return
        total = total + _largest_differences(pairs, i, k)
        still = total <= 0.0
        i, k, total = i[still], k[still], total[still]
    if not len(i):
        return
    _, taken = profile(tables.members[node], len(cost))
    no_more = (taken[i] <= taken[k]).all(axis=1)
    i, k = i[no_more], k[no_more]
    replaces[:] = False
    replaces[i, k] = True
    later = np.arange(len(cost))[:, None] > np.arange(len(cost))
    needless = (replaces & ~(replaces.T & later)).any(axis=0)
    if needless.any():
        tables.keep(node, np.flatnonzero(~needless))


def _largest_differences(pairs: Floats, i: Ints, k: Ints) -> Floats:
    """Of rows i over rows k, where k is allowed; inf where i is not allowed there."""
    out, step = np.empty(len(i)), max(MOST_TRIED // pairs.shape[1], 1)
    for begin in range(0, len(i), step):
        theirs = pairs[k[begin : begin + step]]
        with np.errstate(invalid="ignore"):
            differences = np.where(theirs < np.inf, pairs[i[begin : begin + step]] - theirs, -np.inf)
        out[begin : begin + step] = differences.max(axis=1)
    return out


def profile(members: Sequence[Member], size: int) -> tuple[Ints, Floats]:
    """Times at which some of a node's members begin or end, and bytes of every option (row) from each to the next."""
    begins, ends = (np.array([member[side] for member in members], np.int64) for side in (0, 1))
    times = np.unique(np.concatenate([begins, ends]))
    change = np.zeros((len(times), size))
    if members:
        taken = np.array([own for _, _, own in members])
        np.add.at(change, np.searchsorted(times, begins), taken)
        np.subtract.at(change, np.searchsorted(times, ends), taken)
    return times, np.cumsum(change, axis=0)[:-1].T
