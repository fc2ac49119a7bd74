"""Which plan is at hand without a search, where few fit? Recipes that need little memory: parameters split and gathered
for a use, every block run again."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.errors import ArgumentError, BatchError, InfeasibleError, SearchTimeoutError
from autopar.plan import Plan
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program
from autopar.search.joint.candidates import Candidate
from autopar.search.known.baselines import baseline_plan

RECIPES = ("fsdp:recompute=full", "megatron:zero=3,recompute=full")
MOST_AXES = 2
MOST_SECONDS, PART = 30.0, 0.5
"""For all, and which part of the time that is left."""


def at_hand(
    keys: Sequence[Candidate],
    program: Callable[[int], Program],
    pricer: Callable[[Candidate], Pricer],
    limit: float,
    seconds: float | None,
) -> Iterator[tuple[Candidate, Plan]]:
    """Such plans that fit, each faster than those before, of problems without stages; as far as the time goes.

    Most micro-batches come first: what a few samples are too large for, more are. It ends with a number of them of
    which none is faster. `estimate.solver["recipe"]` names the recipe.
    """
    until = time.monotonic() + min(MOST_SECONDS, math.inf if seconds is None else PART * seconds)
    flat = [key for key in keys if key.arrangement.pipeline == 1 and key.arrangement.mesh.num_axes <= MOST_AXES]
    best = math.inf
    for count in sorted({key.microbatches for key in flat}, reverse=True):
        own = sorted((k for k in flat if k.microbatches == count), key=lambda key: key.arrangement.mesh.num_axes)
        before = best
        for key, recipe in itertools.product(own, RECIPES):
            if time.monotonic() >= until:
                return
            try:
                plan = baseline_plan(recipe, program(count), pricer(key), limit, until=until)
            except (InfeasibleError, SearchTimeoutError, BatchError, ArgumentError):  # it does not fit, or apply
                continue
            estimate = plan.estimate
            if estimate.step_seconds < best:
                best = estimate.step_seconds
                yield key, plan.with_estimate(replace(estimate, solver={**estimate.solver, "recipe": recipe}))
        if best < math.inf and best == before:
            return
