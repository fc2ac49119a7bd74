"""What does a step of 1f1b or gpipe take at least, however its stages of whole blocks are cut?

Some stage has more than its share, and of p runs of blocks it has at least one whole (`staged.whole_blocks`). What a
step takes with each of the runs is a sum over ops and tensors, minimised over all choices by a relaxation. Runs with
about the same numbers of each kind of block, which decide alike, share one that counts as often as any of them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program
from autopar.search.costs.folding import fold_program
from autopar.search.costs.paid import Around, Fewest, stages_of
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.work_bound import ops_work
from autopar.search.exact.relaxation import least_seconds
from autopar.search.graph.build import build
from autopar.search.graph.moments import Counting
from autopar.search.staged.stages import start_positions
from autopar.search.staged.whole_blocks import runs_of_stages

Floats = NDArray[np.float64]
SHARED = 0.003
"""Part of the bound that may be lost for fewer relaxations."""


def uneven_seconds(program: Program, pricer: Pricer, schedule: str, p: int, m: int, cutoff: float) -> float:
    """The least that a step of m micro-batches in p stages takes, memory aside, of blocks that decide alike; 0 where
    that is below the cutoff. Runs are chosen by the work of ops."""
    work = ops_work(program, pricer).sum(axis=1)
    begins = [0, *start_positions(program), len(program.ops)]
    runs = runs_of_stages(np.add.reduceat(work, begins[:-1]), schedule, p, m)
    around = [
        Around(
            part_of=stages_of((begins[run.first], begins[run.last + 1]), len(program.ops)),
            passing=np.array([run.before, run.inside, run.after]),
        )
        for run in runs
    ]
    least = np.inf
    for among in grouped(around, work, np.array(fold_program(program, pins=pricer.config.pins).class_of)):
        paid = Fewest(tuple(among))
        least = min(least, least_seconds(build(program, pricer, limit=None, counted=Counting(paid=paid)).graph, cutoff))
        if least < cutoff:
            return 0.0
    return least if least < np.inf else 0.0


def grouped(around: Sequence[Around], work: Floats, class_of: NDArray[np.int64]) -> list[list[Around]]:
    """Runs of following stages together, as long as the ops of each class, counted as often as in any of them, are
    worth nearly the least sum of all; the group of the least sum first."""
    each = np.bincount(class_of, weights=work) / np.bincount(class_of)
    counts = [np.bincount(class_of, weights=one.passing[one.part_of]).astype(np.float64) for one in around]
    enough = (1 - SHARED) * min((float(count @ each) for count in counts), default=0.0)
    groups: list[tuple[Floats, list[Around]]] = []
    for one, count in zip(around, counts, strict=True):
        if groups and float((together := np.minimum(groups[-1][0], count)) @ each) >= enough:
            groups[-1] = together, [*groups[-1][1], one]
        else:
            groups.append((count, [one]))
    return [among for _, among in sorted(groups, key=lambda group: float(group[0] @ each))]
