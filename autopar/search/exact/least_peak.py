"""What is the least memory limit that some choice of a strategy graph meets?"""

from dataclasses import replace

import numpy as np
from ortools.math_opt.python import mathopt

from autopar.search.exact.completion import complete
from autopar.search.exact.formulation import formulate
from autopar.search.exact.reduction import reduce
from autopar.search.exact.steiner import metric
from autopar.search.graph.strategy_graph import StrategyGraph, usage

PEAK_SECONDS = 60.0
"""Bound on the time spent to say how much memory would do, once it is proved that the limit does not."""


def least_peak(graph: StrategyGraph, *, seconds: float | None = None) -> float | None:
    """The least memory limit, in bytes, that some choice meets; None when none was found in `seconds`.

    Raises InfeasibleError when no choice is compatible at all.
    """
    assert graph.memory is not None
    reduced = reduce(graph, by_seconds=False)
    small = reduced.graph
    program = formulate(small, minimise_peak=True, integral_groups={term.group for term in graph.memory.arcs})
    # SCIP, not HiGHS: on BERT's graph for 2x2x2 it took 5 s to prove what HiGHS took 233 s for, past its time limit.
    answer = program.model.solve(
        relative_gap=1e-6,
        seconds=PEAK_SECONDS if seconds is None else min(seconds, PEAK_SECONDS),
        solver=mathopt.SolverType.GSCIP,
    )
    if answer.values is None:
        return None
    metrics = [metric(group) for group in small.groups]
    proposed = [np.flatnonzero(answer.values[columns] > 0.5) for columns in program.arcs]
    choice = program.choice(answer.values)
    peaks = []
    tight = replace(small, memory=replace(graph.memory if small.memory is None else small.memory, limit=-np.inf))
    for arcs in (None, proposed):
        if (found := complete(tight, metrics, choice, arcs)) is not None:
            peaks.append(float(usage(small, found.choice, found.arcs).max()))
    return min(peaks) if peaks else None
