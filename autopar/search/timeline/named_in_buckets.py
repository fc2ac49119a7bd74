"""What is the best plan of a named kind where parameters share messages?

Of two that are made, the cheaper once in buckets: the best with every collective alone, whose parameters may go several
ways, a bucket each, and the best where each counts its share of a start, whose ways cost more for each alone. Neither
knows which buckets there will be. On two hosts of two and of four ranks, the first took 0.65 to 2.4 times the step of
the second (fsdp, megatron and ulysses of four models; a link of 5 Gbit/s, 1 and 0.1; 2026-11-28).
"""

from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import baseline_plan, memory_limit
from autopar.search.timeline.buckets import bucketed
from autopar.search.timeline.staged_buckets import marked
from autopar.values.cluster import Cluster
from autopar.values.stage_plan import StagePlan


def named_in_buckets(
    text: str, program: Program, pricer: Pricer, limit: float, *, flatten: bool = True, alone: StagePlan | None = None
) -> StagePlan:
    """`known.baselines.baseline_plan` in buckets (`timeline.buckets.bucketed`).

    alone: the first of the two, if it is at hand.

    Raises:
        ArgumentError: for an unknown name, key or value.
        InfeasibleError: if it does not apply, or does not fit `limit` bytes a device.
    """
    plain = pricer.alone
    made = [alone or baseline_plan(text, program, plain, limit)]
    try:
        shared = baseline_plan(text, program, plain.shared, limit)
    except InfeasibleError:
        shared = made[0]  # its memory was counted from above, and what is nearest to it in seconds holds more
    if replace(shared, estimate=made[0].estimate) != made[0]:
        made.append(shared)
    found = (bucketed(one, program, plain, flatten=flatten, peak=one.estimate.peak_nbytes) for one in made)
    return min(found, key=lambda p: p.estimate.step_seconds)


def configuration_in_buckets(
    plan: StagePlan, text: str, program: Program, cluster: Cluster, *, flatten: bool = True
) -> StagePlan:
    """A named configuration's `plan` in buckets, or its other one, marked so; nothing is proved of it."""
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    limit = memory_limit(cluster, plan.config)
    found = named_in_buckets(text, program, pricer, limit, flatten=flatten, alone=plan)
    return found.with_estimate(marked(replace(found.estimate, bounded_alone=True)))
