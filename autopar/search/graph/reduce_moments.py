"""Which moments can be the peak? Memory at the others is never more, whatever is chosen.

`table[term, moment]` holds how often each term counts at each moment. A moment is left out if some other counts every
term at least as often, or if it lies between two instances of a repeated op (the first or second, and the last or last
but one) and is no more than the straight line between them: then one of the two ends is at least as large.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.moments import Moments
from autopar.search.graph.strategy_graph import Floats


def few_moments(table: Floats, moments: Moments, instances: Sequence[tuple[tuple[int, ...], ...]]) -> NDArray[np.int64]:
    """The moments that matter; `instances[cluster][k]` are positions of the ops of instance k."""
    alive = np.ones(table.shape[1], dtype=bool)
    for rows in instances:
        if len(rows) < 5:
            continue
        for member in range(len(rows[0])):
            for place in (moments.forward, moments.backward):
                series = np.array([place(row[member]) for row in rows])
                for low, high in ((0, 0), (1, 0), (0, 1), (1, 1)):
                    between = series[low : len(series) - high]
                    alive[between[1:-1]] &= ~_below_line(table[:, between])
    candidates = np.flatnonzero(alive)
    _, first_of_equal = np.unique(table[:, candidates], axis=1, return_index=True)
    candidates = candidates[np.sort(first_of_equal)]
    return np.sort(candidates[_undominated(table[:, candidates])])


def _undominated(table: Floats) -> NDArray[np.int64]:
    """Columns that no other one is at least as large as in every row.

    A column is compared with those alone that are as large in the row in which fewest are.
    """
    rank = np.stack([np.searchsorted(ascending, row) for row, ascending in zip(table, np.sort(table), strict=True)])
    telling, columns = rank.argmax(axis=0), np.ascontiguousarray(table.T)
    kept = np.empty(table.shape[1], dtype=np.int64)
    count = 0
    for column in np.argsort(-table.sum(axis=0), kind="stable"):
        row = telling[column]
        above = kept[:count][table[row, kept[:count]] >= table[row, column] - 1e-12]
        if not (columns[above] >= columns[column] - 1e-12).all(axis=1).any():
            kept[count] = column
            count += 1
    return kept[:count]


def _below_line(series: Floats) -> NDArray[np.bool_]:
    """Which moments, ends aside, are nowhere above the straight line between the ends."""
    part = np.linspace(0.0, 1.0, series.shape[1])[1:-1]
    line = series[:, [0]] * (1 - part) + series[:, [-1]] * part
    return np.asarray((series[:, 1:-1] <= line + 1e-9).all(axis=0))
