"""Which plan is soon at hand, where few fit? One of as many micro-batches as can be, without stages.

Least is held at once then. It is roughly the best of its mesh, which takes a part of the time to prove.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.errors import BatchError, InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.ilp import CutoffError
from autopar.search.joint.candidates import Candidate
from autopar.search.planner import plan_program
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.values.stage_plan import StagePlan

GAP, BETTER = 0.3, 0.05
"""How far from the best of its mesh a plan may be, and how much, as a part, another has to be below the best so far."""
MOST_AXES = 2
MOST_SECONDS, PART = 30.0, 0.5
"""For all, and which part of the time that is left."""


def quick_plans(
    keys: Sequence[Candidate],
    program: Callable[[int], Program],
    pricer: Callable[[Candidate], Pricer],
    seconds: float | None,
    options: SearchOptions,
) -> Iterator[tuple[Candidate, StagePlan]]:
    """Such plans that fit, each faster than those before, as far as the time goes: it ends with a number of
    micro-batches of which none is."""
    until = time.monotonic() + min(MOST_SECONDS, math.inf if seconds is None else PART * seconds)
    flat = [key for key in keys if key.arrangement.pipeline == 1 and key.arrangement.mesh.num_axes <= MOST_AXES]
    best = math.inf
    for count in sorted({key.microbatches for key in flat}, reverse=True):
        alike = sorted((k for k in flat if k.microbatches == count), key=lambda key: key.arrangement.mesh.num_axes)
        before = best
        for key in alike:
            left = until - time.monotonic()
            if left <= 0:
                return
            try:
                own = replace(options, relative_gap=GAP, seconds=left, with_baselines=False)
                asked = SearchAim(cutoff=best * (1 - BETTER), says_least=False)
                plan = plan_program(program(count), pricer(key), own, asked)
            except (InfeasibleError, CutoffError, SearchTimeoutError, BatchError):
                continue
            estimate = plan.estimate
            best = estimate.in_turn_seconds
            yield key, plan.with_estimate(replace(estimate, search=replace(estimate.search, is_rough=True)))
        if best < math.inf and best == before:
            return
