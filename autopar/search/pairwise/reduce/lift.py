"""How does a choice of the reduced graph become one of the original? By a log of tables, read backwards.

An entry says: the option of node n follows from those of p and q (NONE where fewer decide). Options stand under their
original numbers, so later removals of options change nothing:
`n, p, q, |p|, |q|, options of p, options of q, table of |p| x |q| options of n, where the entry begins`.
"""

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Ints
from autopar.search.pairwise.reduce.graph import COST_AT, LOG_TOP, NONE, OPTIONS, Graph

HEAD = 6
"""Numbers of an entry beside its options and its table."""


@compiled
def record(graph: Graph, n: int, p: int, q: int, table: Ints) -> None:
    """`table` holds positions among n's options, as they are now, a row an option of p; room must be there."""
    log, start = graph.log, graph.counts[LOG_TOP]
    log[start], log[start + 1], log[start + 2] = n, p, q
    top = start + 5
    for k in range(2):
        parent = p if k == 0 else q
        size = 1 if parent == NONE else graph.node[parent, OPTIONS]
        log[start + 3 + k] = size
        for i in range(size):
            log[top] = 0 if parent == NONE else graph.option[graph.node[parent, COST_AT] + i]
            top += 1
    for position in table:
        log[top] = graph.option[graph.node[n, COST_AT] + position]
        top += 1
    log[top] = start
    graph.counts[LOG_TOP] = top + 1


@compiled
def replay(log: Ints, choice: Ints) -> None:
    """Fill in the options of nodes that are gone, last gone first."""
    top = len(log)
    while top > 0:
        start = log[top - 1]
        n, p, q, rows, columns = log[start], log[start + 1], log[start + 2], log[start + 3], log[start + 4]
        row = column = 0
        if p != NONE:
            while log[start + 5 + row] != choice[p]:
                row += 1
        if q != NONE:
            while log[start + 5 + rows + column] != choice[q]:
                column += 1
        choice[n] = log[start + 5 + rows + columns + row * columns + column]
        top = start
