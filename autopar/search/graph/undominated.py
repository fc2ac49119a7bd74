"""Which rows of a table does no other beat in every column? Compiled."""

import numpy as np
from numpy.typing import NDArray

from autopar.search.compiled import compiled
from autopar.search.graph.strategy_graph import Floats

SLACK = 1e-15
"""By how much a row may be larger and still beat another: rounding."""


@compiled
def beaten(rows: Floats) -> NDArray[np.bool_]:
    """Rows, in lexicographic order, that some row before them beats or equals in every column."""
    count, width = rows.shape
    found = np.zeros(count, np.bool_)
    for row in range(count):
        for other in range(row):
            column = 0
            while column < width and rows[other, column] <= rows[row, column] + SLACK:
                column += 1
            if column == width:
                found[row] = True
                break
    return found


def undominated(table: Floats) -> list[int]:
    """Rows that no other row beats or equals in every column, the first of equal ones."""
    order = np.lexsort(table.T[::-1])
    return sorted(order[~beaten(table[order])].tolist())
