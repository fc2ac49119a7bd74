"""What do stages of whole blocks take at least, however they are cut and whatever each block takes?

Stages 0 to p - 1 are runs of blocks. Blocks e_0 = 0 <= e_1 <= ... <= e_p be given: for some k stage k begins at e_k or
before and has all of the blocks e_k to e_(k+1), both included. (Else stage 0 ends before e_1, so that stage 1 begins at
e_1 or before and ends before e_2, and so on: the last stage would end before e_p.) What a schedule takes grows with the
length of each stage and, at its end, with how early it begins (`search.rounds`); so a step takes at least as long as
the least of p sums, in which each block counts so many times:

    1f1b, m > p     everything once, the blocks from e_k on once more, e_k to e_(k+1) another m - p + k - 1 times
    gpipe           everything once, e_k to e_(k+1) another m - 1 times
    1f1b, m <= p    the blocks before e_k once, e_k to e_(k+1) m times

These are linear in what the blocks take, so that each can be minimised over all choices of a strategy graph. The ends
are chosen for blocks that take what their work takes: then the least of the sums is that of the best cuts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EXACT = 1e-6
"""How near, relatively, the ends come to the best."""


class BlockRun(NamedTuple):
    """Blocks `first` to `last`, which one stage has; how often those before, in and after it count, and what that
    stage pays once a step."""

    first: int
    last: int
    before: float
    inside: float
    after: float

    def weights(self, num_blocks: int) -> Floats:
        """How often each block counts."""
        number = np.arange(num_blocks)
        return np.where(number < self.first, self.before, np.where(number > self.last, self.after, self.inside))


def _run(first: int, last: int, stage: int, schedule: str, p: int, m: int) -> BlockRun:
    if schedule == "gpipe":
        return BlockRun(first, last, 1.0, m, 1.0)
    if m > p:
        return BlockRun(first, last, 1.0, m - p + stage + 1, 2.0)
    return BlockRun(first, last, 1.0, m, 0.0)


def runs_of_stages(blocks: Floats, schedule: str, p: int, m: int) -> tuple[BlockRun, ...]:
    """p runs of which, for all cuts of 1f1b or gpipe into p stages, a step takes as long as one's sum at least.

    blocks: seconds of each block for one micro-batch, more than none, for which the least sum is as great as can be;
    the runs hold for others as well. Fewer than p: none, with fewer blocks than stages.
    """
    if len(blocks) < p:
        return ()
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    low, high = 0.0, float(2 * m * sums[-1] * p)
    found = _reaching(low, sums, schedule, p, m)
    while high - low > EXACT * high:
        middle = (low + high) / 2
        runs = _reaching(middle, sums, schedule, p, m)
        if runs is None:
            high = middle
        else:
            low, found = middle, runs
    return tuple(found or ())


def _reaching(least: float, sums: Floats, schedule: str, p: int, m: int) -> Sequence[BlockRun] | None:
    """The shortest runs whose sums are no less; None where they need more blocks than there are."""
    first, runs = 0, []
    num_blocks = len(sums) - 1
    for stage in range(p):
        before, inside, after = _run(first, first, stage, schedule, p, m)[2:]
        # with the run to last: before * sums[first] + inside * (s - sums[first]) + after * (whole - s)
        need = least - (before - inside) * sums[first] - after * sums[-1]
        if inside > after:
            last = max(int(np.searchsorted(sums[1:], need / (inside - after))), first)
        else:  # where the run ends makes no difference
            last = first if need <= 0.0 else num_blocks
        if last >= num_blocks:
            return None
        runs.append(_run(first, last, stage, schedule, p, m))
        first = last
    return runs
