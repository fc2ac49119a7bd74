"""How many micro-batches' time does a pipeline's step take at least? And how are blocks dealt to interleaved stages?

With t the seconds of one micro-batch in the whole model and o those once a step, on the mesh of one of p stages, a step
of m micro-batches takes at least (r t + o) / p, with r the rounds:

    1f1b, m > p     m + p - 1. Stage k's first backward waits for the whole forward and the backward behind it, its last
                    forward is followed by the same, and between lie (m - p + k - 1) of its micro-batches; so a step
                    takes T + S_k + (m - p + k - 1) t_k, S_k = t_k + ... + t_(p-1). Weights w_k >= 0 with
                    w_0 + ... + w_s + w_s (m - p + s - 1) the same for all s average these to T (1 + (m - 1) / p).
    gpipe           m + p - 1: forward and backward are two flow shops, T + (m - 1) (max f + max b).
    1f1b, m <= p    p / (1 - (1 - 1 / m)^p): stage k works m t_k after and before the stages in front of it.
    others          m: no rank works less than its share.

These hold however uneven the stages are. But stages are cut between blocks: where those do not divide, or the ends
weigh, some stage has more than its share, so that the sums above are more than their average. The least over cuts of
the greatest stage's bounds them all, by dynamic programming (`least_uneven`).

Interleaved stages are searched with blocks dealt evenly (`dealt`), and then more is known (`interleaved_rounds`): rank
s works m times on each of its stages, and neither begins before a forward nor ends after a backward through the first s
stages. So with weights w >= 0 that sum to 1 a step takes at least

    sum over stages j of c_j t_j,    c_j = m w[j mod p] + sum over s > j of w_s where j < p

and blocks that decide alike take alike, so that r is p times the least mean of c_j over the instances of one decision,
and what is paid once counts g times, p times the least mean of w[j mod p]. The best weights are a small linear program.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from autopar.lower.program import Program
from autopar.search.costs.folding import Folding
from autopar.search.costs.paid import reading_stages, stages_of, whole_readers

Floats = NDArray[np.float64]
ONCE = 0.98
"""Least g: what is sent once a step counts with what is worked once, and is far more."""
SAFE = 1e-9
"""Part of a bound that is left to the linear program's tolerance."""


class PipelineRounds(NamedTuple):
    """(r, g) such that no step of p stages is below (r t + g o) / p."""

    passing: float
    once: float = 1.0


def rounds(schedule: str, p: int, m: int) -> PipelineRounds:
    """Of stages however uneven."""
    if schedule == "gpipe" or (schedule == "1f1b" and m > p):
        return PipelineRounds(m + p - 1)
    return PipelineRounds(p / (1 - (1 - 1 / m) ** p) if schedule == "1f1b" else m)


def least_uneven(blocks: Floats, schedule: str, p: int, m: int) -> float:
    """The least seconds of m micro-batches in p stages of whole blocks, of one stage a rank, however they are cut.

    blocks: seconds of each block for one micro-batch, forward and backward. Infinite with fewer blocks than stages.
    """
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    whole, width = float(sums[-1]), len(blocks) - p + 1  # a stage leaves a block to each of the others
    if width < 1:
        return math.inf
    first = np.arange(width)  # block of a stage, from the k'th block on for stage k
    behind = np.append(np.full(width - 1, np.inf), 0.0)  # the least of all stages from each block on: of none
    for k in reversed(range(p)):
        begin, ends = sums[k : k + width], sums[k + 1 : k + 1 + width]
        behind = _least_of_greater(first, partial(_step, schedule, p, m, k, whole, begin, ends), behind)
    return float(behind[0])


def _step(
    schedule: str, p: int, m: int, k: int, whole: float, begin: Floats, ends: Floats, last: NDArray[np.int64]
) -> Floats:
    """What a step takes by stage k alone, of the blocks that begin there up to the last, each."""
    stage = ends[last] - begin
    if schedule == "gpipe":
        return whole + (m - 1) * stage
    if m > p:
        return whole + (whole - begin) + (m - p + k - 1) * stage
    return begin + m * stage


def _least_of_greater(
    first: NDArray[np.int64], rising: Callable[[NDArray[np.int64]], Floats], falling: Floats
) -> Floats:
    """For each first number the least, over the numbers from there on, of the greater of what rises with the number and
    what falls with it: where they cross, or just before. (With fewer blocks no stages take longer.)"""
    low, high = first, np.full_like(first, len(first) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        is_above = rising(middle) >= falling[middle]
        low, high = np.where(is_above, low, np.minimum(middle + 1, high)), np.where(is_above, middle, high)
    before = np.maximum(low - 1, first)
    return np.minimum(*(np.maximum(rising(last), falling[last]) for last in (low, before)))


def dealt(num_blocks: int, p: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each of p chunks stages along the model: as even as can be on every rank, and the ends last."""
    few, extra = divmod(num_blocks, p * chunks)
    sizes = np.full((chunks, p), few)
    inner_first = sorted(range(p), key=lambda rank: (rank in (0, p - 1), rank == p - 1, rank))
    for k in range(extra):
        turn, place = divmod(k, p)
        rank = inner_first[place]
        sizes[(turn + chunks // 2) % chunks, rank] += 1
    return tuple(int(n) for n in sizes.ravel())


def _classes_in_stages(program: Program, folding: Folding, begins: Sequence[int]) -> tuple[Floats, Floats]:
    """How often, in the mean of a class of ops or tensors, each stage has one: [class, stage]; and of parameters alone.

    Of tensors that some stages read in one way, others in another, a row for each and for each stage.
    """
    stage_of, num_stages = stages_of(begins, len(program.ops)), len(begins) + 1

    def mean(stages: Sequence[Iterable[int]]) -> Floats:
        every = np.array([stage for some in stages for stage in some], dtype=np.int64)
        return np.bincount(every, minlength=num_stages) / len(stages)

    rows = [mean([[stage_of[position]] for position in positions]) for positions in folding.instances]
    once: list[Floats] = []
    for names in folding.travellers:
        found = [whole_readers(program, folding, stage_of, name) for name in names]
        reading = [reading_stages(program, stage_of, name) for name in names]
        if any(stages is None for stages in found):
            rows += [np.eye(num_stages)[j] for stages in reading for j in stages]
        else:
            rows.append(mean([stages or () for stages in found]))
        if program.tensors[names[0]].kind == "parameter":
            once.append(mean(reading))
    return np.array(rows).reshape(-1, num_stages), np.array(once).reshape(-1, num_stages)


def interleaved_rounds(
    program: Program, folding: Folding, begins: Sequence[int], p: int, m: int, shares: tuple[float, float]
) -> PipelineRounds:
    """Of interleaved stages that begin at these positions of ops, where ops of one class decide alike.

    shares: what a micro-batch's passing and what is paid once are worth beside each other, in any unit.
    """
    num_stages = len(begins) + 1
    own: Floats = np.zeros((num_stages, p))
    own[np.arange(num_stages), np.arange(num_stages) % p] = 1.0
    before = np.arange(num_stages)[:, None] < np.arange(p)[None, :]
    passing = m * own + np.where(before, 1.0, 0.0)
    key = ("classes in stages", tuple(begins))
    if key not in program.form:
        program.form[key] = _classes_in_stages(program, folding, begins)
    every, parameters = program.form[key]
    rows, once = every @ passing, parameters @ own
    passed = np.unique(np.array([row for row in rows if row.any()]), axis=0)
    paid = np.unique(np.array([row for row in once if row.any()]).reshape(-1, p), axis=0)
    # variables: the weights of ranks, then r / p and g / p
    answer = linprog(
        np.array([*np.zeros(p), *(-share for share in shares)]),
        A_ub=np.vstack([np.pad(-passed, ((0, 0), (0, 2))), np.pad(-paid, ((0, 0), (0, 2)))])
        + np.repeat(np.eye(p + 2)[[p, p + 1]], [len(passed), len(paid)], axis=0),
        b_ub=np.zeros(len(passed) + len(paid)),
        A_eq=np.array([[*np.ones(p), 0.0, 0.0]]),
        b_eq=np.ones(1),
        bounds=[*[(0.0, 1.0)] * p, (0.0, None), (ONCE / p, 1.0 / p)],
        method="highs-ds",
    )
    r, g = (float(value) * p * (1 - SAFE) for value in answer.x[p:])
    return PipelineRounds(r, g)
