"""Which mean delay of a rank explains what collectives after a computation take beyond the two alone? Least error.

    seconds = skew (H(n) - 1), and 0 where the measurements say less

for groups of n ranks, `cost_models.collectives.skew_seconds`. The sum of absolute errors is the least at a weighted
median of seconds / (H(n) - 1), which a few bad measurements do not move.
"""

import math
from collections.abc import Sequence

from autopar.calibration.samples import SkewSample


def fit_skew(samples: Sequence[SkewSample]) -> tuple[float, float]:
    """Seconds, and the standard error of that. Nothing was measured: (0, 0)."""
    if not samples:
        return 0.0, 0.0
    waits = [sum(1 / rank for rank in range(2, sample.group_size + 1)) for sample in samples]
    square = math.fsum(wait * wait for wait in waits)
    passed, skew = 0.0, 0.0
    for ratio, wait in sorted((sample.seconds / wait, wait) for wait, sample in zip(waits, samples, strict=True)):
        passed, skew = passed + wait, ratio
        if 2 * passed >= sum(waits):
            break
    rest = math.fsum((sample.seconds - skew * wait) ** 2 for wait, sample in zip(waits, samples, strict=True))
    return max(skew, 0.0), math.sqrt(rest / max(len(samples) - 1, 1) / square)
