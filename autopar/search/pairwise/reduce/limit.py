"""Which times and options does the limit decide?"""

import numpy as np

from autopar.search.pairwise.problem import Floats, Ints
from autopar.search.pairwise.reduce.rules import profile
from autopar.search.pairwise.reduce.tables import Tables


def drop_times(tables: Tables) -> None:
    """A time at which what is certain and the most of every member stay within the limit can be left out. Neither can
    a time bind if what is live then is also live at a time nearby at which no less is certain."""
    base = tables.certain()
    change = np.zeros(len(tables.base))
    for node in tables.alive:
        for begin, end, taken in tables.members[node]:
            most = taken.max()
            change[begin] += most
            change[end] -= most
    base = _keep(tables, base, np.flatnonzero(base + np.cumsum(change)[:-1] > tables.limit))
    while True:
        begins, ends = np.zeros((2, len(base) + 1), np.bool_)
        for node in tables.alive:
            for begin, end, _ in tables.members[node]:
                begins[begin] = ends[end] = True
        by_next = ~ends[1:-1] & (base[:-1] <= base[1:])
        by_last = ~begins[1:-1] & (base[1:] <= base[:-1]) & ~by_next
        covered = np.zeros(len(base), np.bool_)
        covered[:-1] |= by_next
        covered[1:] |= by_last
        if not covered.any():
            return
        base = _keep(tables, base, np.flatnonzero(~covered))


def _keep(tables: Tables, base: Floats, kept: Ints) -> Floats:
    """Only these times."""
    if len(kept) == len(base):
        return base
    place = np.searchsorted(kept, np.arange(len(base) + 1)).tolist()
    for node in tables.alive:
        if members := tables.members[node]:
            moved = [(place[begin], place[end], taken) for begin, end, taken in members]
            tables.members[node] = [member for member in moved if member[0] < member[1]]
            tables.touch(node)
    tables.base = np.diff(base[kept], prepend=0.0, append=0.0)
    return np.asarray(base[kept])


def drop_oversized(tables: Tables) -> None:
    """With least usages certain, an option that takes more than what is left of the limit at some time breaks it in
    every choice. What it would have needed is noted: with a limit below that all would have been concluded too."""
    room = tables.limit - tables.certain()
    for node in tables.alive:
        if not tables.members[node]:
            continue
        times, taken = profile(tables.members[node], len(tables.cost[node]))
        least = np.minimum.reduceat(room[times[0] : times[-1]], times[:-1] - times[0])
        over = taken > least
        if over.any():
            tables.spared = min(tables.spared, float((tables.limit - least + taken)[over].min()))
            tables.raise_cost(node, np.where(over.any(axis=1), np.inf, 0.0))
