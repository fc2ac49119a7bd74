"""Which plan is at hand without a search, where few fit? Recipes that need little memory: parameters split and gathered
for a use, every block run again."""

import itertools
import time
from collections.abc import Callable, Sequence

from autopar.errors import ArgumentError, BatchError, InfeasibleError
from autopar.plan import Plan
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program
from autopar.search.joint.candidates import Candidate
from autopar.search.known.baselines import baseline_plan

RECIPES = ("fsdp:recompute=full", "megatron:zero=3,recompute=full")
MOST_AXES = 2
MOST_SECONDS = 30.0


def at_hand(
    keys: Sequence[Candidate],
    program: Callable[[int], Program],
    pricer: Callable[[Candidate], Pricer],
    limit: float,
    seconds: float | None,
) -> tuple[Candidate, Plan] | None:
    """The fastest such plan that fits among problems without stages, None if none does or the time was over first.

    Most micro-batches come first: what a few samples are too large for, more are.
    """
    until = time.monotonic() + min(MOST_SECONDS, seconds if seconds is not None else MOST_SECONDS)
    flat = [key for key in keys if key.arrangement.pipeline == 1 and key.arrangement.mesh.num_axes <= MOST_AXES]
    best: tuple[Candidate, Plan] | None = None
    for count in sorted({key.microbatches for key in flat}, reverse=True):
        own = sorted((k for k in flat if k.microbatches == count), key=lambda key: key.arrangement.mesh.num_axes)
        fits = False
        for key, recipe in itertools.product(own, RECIPES):
            if time.monotonic() >= until:
                return best
            try:
                plan = baseline_plan(recipe, program(count), pricer(key), limit)
            except (InfeasibleError, BatchError, ArgumentError):  # it does not fit, or apply
                continue
            fits = True
            if best is None or plan.estimate.step_seconds < best[1].estimate.step_seconds:
                best = key, plan
        if best is not None and not fits:
            break
    return best
