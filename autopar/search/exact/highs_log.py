"""What do the lines that HiGHS prints say about incumbent and bound?

A line of its branch and bound, as of HiGHS 1.8 to 1.12 (blanks shortened; the first column may be empty):

    Src  Proc. InQueue |  Leaves   Expl. | BestBound  BestSol   Gap |  Cuts  InLp Confl. | LpIters  Time
     T       0       0         0   0.00%   0.4784     0.4801  0.04%       0     0      0      1723  0.3s
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(
    r"^\s*[A-Za-z]?\s*\d+\s+\d+\s+\d+\s+[\d.]+%\s+(?P<bound>-?[\d.e+-]+|-?inf)\s+(?P<best>-?[\d.e+-]+|inf)\s+"
    r"(?:[\d.]+%|inf|Large)\s.*?(?P<time>[\d.]+)s\s*$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a program stands: `incumbent` (inf while there is none) and `bound` in seconds of the graph."""

    phase: str
    incumbent: float
    bound: float
    elapsed: float


def progress_of(lines: Sequence[str], phase: str, scale: float) -> Progress | None:
    """The last state that the lines tell, with the objective divided by `scale`; None when they tell none."""
    for line in reversed(lines):
        if (match := _LINE.match(line)) is not None:
            best, bound = float(match["best"]), float(match["bound"])
            if math.isfinite(bound):
                return Progress(phase=phase, incumbent=best / scale, bound=bound / scale, elapsed=float(match["time"]))
    return None
