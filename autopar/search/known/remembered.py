"""Was this plan priced before? Searches whose prices differ a little often find the same one again."""

from collections.abc import Callable

from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.values.estimate import Estimate
from autopar.values.stage_plan import StagePlan

LAST = 8
"""How many are remembered of a program, each with what was made of it."""


def remembered(
    kind: object, plan: StagePlan, program: Program, pricer: Pricer, make: Callable[[StagePlan], StagePlan]
) -> StagePlan:
    """What `make` makes of a plan with no estimate, under these prices; `kind` says what that is."""
    bare = plan.with_estimate(Estimate())
    prices = (kind, pricer.in_buckets, pricer.shown, pricer.cluster)
    known: list[tuple[object, StagePlan, StagePlan]] = program.made.setdefault("plans", [])
    for asked, other, made in known:
        if asked == prices and other == bare:
            return made
    known.append((prices, bare, make(bare)))
    del known[:-LAST]
    return known[-1][-1]
