"""How many blocks of each pipeline rank have to follow a slow plan that fits, where a fast one does not?

Ranks hold different numbers of micro-batches, so each has as many slow blocks as it needs (`search.mixing`): its first
ones, of whose stages most is in flight.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.lower.program import Program
from autopar.search.mixing import blocks_of, mixed
from autopar.values.stage_plan import StagePlan

TRIES = 4
"""How often ranks that hold too much are given more slow blocks."""

Held = Callable[[StagePlan], Sequence[float]]
"""Bytes of every rank's stages, made as this plan of the whole model says."""


def mix_stages(
    slow: StagePlan, fast: StagePlan, program: Program, begins: Sequence[int], num_ranks: int, held: Held, limit: float
) -> StagePlan | None:
    """A plan of the whole model whose stages hold no more than the limit; None where no mixture does.

    begins: positions of the ops with which stages after the first begin, dealt in turn to the ranks.
    """
    least = np.array(held(slow))
    if (least > limit).any():
        return None
    most = np.array(held(fast))
    of_rank: list[list[str]] = [[] for _ in range(num_ranks)]
    for block, position in blocks_of(program).items():
        of_rank[int(np.searchsorted(begins, position, side="right")) % num_ranks].append(block)
    counts = [0] * num_ranks
    now, rest = most, fast
    plan: StagePlan | None = fast
    for _ in range(TRIES):
        if (now <= limit).all():
            return plan
        for rank in np.flatnonzero(now > limit).tolist():
            total, saved = len(of_rank[rank]), float(most[rank] - least[rank])
            more = math.ceil((now[rank] - limit) / saved * total) if saved > 0 else total
            counts[rank] = min(counts[rank] + max(more, 1), total)
            if counts[rank] == total:
                rest = slow  # what is in no block may be what is too much
        slowly = [block for blocks, count in zip(of_rank, counts, strict=True) for block in blocks[:count]]
        if (plan := mixed(slow, fast, program, slowly, rest)) is None:
            return None
        now = np.array(held(plan))
    return plan if (now <= limit).all() else None
