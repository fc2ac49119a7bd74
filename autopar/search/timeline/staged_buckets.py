"""Which parameters of each stage of a pipeline share a message? Borders as of a plan without stages, stage by stage.

Gathered for each micro-batch, a bucket is held by as many micro-batches as are in flight, which the memory of the
fullest rank counts; a pipeline that would not fit with buckets goes with fewer, or without. Where backward has two
parts, a bucket of what is gathered in each micro-batch would tie these together: only what lives for the step is in
one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autopar.lower.program import Program
from autopar.passes.split_stages import split_stages
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import memory_limit
from autopar.search.pipeline_parts import part_of
from autopar.search.staged.stages import PricedStages, priced
from autopar.search.timeline.buckets import choose_buckets, used_last, with_buckets
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.plan import Plan, one_stage
from autopar.values.schedules import SPLITTING
from autopar.values.stage_plan import StagePlan

SMALLER, FILLED = 2, 0.9
"""How often buckets are made smaller that hold more than there is room for, and what part of it they then aim at."""


def in_buckets(plan: Plan, captured: CapturedModel, cluster: Cluster, *, flatten: bool = True) -> Plan:
    """A plan of `captured`, that of one micro-batch, with buckets; marked so. What was proved of it is said of every
    collective alone."""
    if plan.num_stages == 1:
        found = one_stage(with_buckets(plan.single, captured, cluster, flatten=flatten))
    else:
        found = stages_in_buckets(plan, split_stages(captured, plan.cuts), cluster, flatten=flatten)
    return found.with_estimate(marked(replace(found.estimate, bounded_alone=True)))


Finish = Callable[[Plan, Sequence[CapturedModel], PricedStages], Plan]
"""Of a plan, its stages and what is priced of them already, the plan in buckets, marked so."""


def finisher(cluster: Cluster, *, flatten: bool = True) -> Finish:
    """What puts plans of a cluster in buckets."""

    def finish(plan: Plan, stages: Sequence[CapturedModel], prices: PricedStages) -> Plan:
        found = stages_in_buckets(plan, stages, cluster, flatten=flatten, known=prices)
        return found.with_estimate(marked(found.estimate))

    return finish


def marked(estimate: Estimate) -> Estimate:
    """As that of a plan that was priced in buckets."""
    return replace(estimate, search=replace(estimate.search, is_in_buckets=True))


def stages_in_buckets(
    plan: Plan,
    stages: Sequence[CapturedModel],
    cluster: Cluster,
    *,
    flatten: bool = True,
    known: PricedStages | None = None,
) -> Plan:
    """The plan with buckets in its stages, priced again; itself if with any of them it fits the limit no more, or holds
    more than it does where it is beyond that.

    stages: their captured models. flatten: a bucket may take other ways than the plan's.
    """
    part = part_of(cluster, plan.pipeline)
    known = PricedStages() if known is None else known
    programs = [known.program(stage) for stage in stages]
    limit = max(memory_limit(part, plan.config), plan.estimate.peak_nbytes)
    splits = plan.schedule in SPLITTING

    def made(kept: bool, free: bool, most: float = math.inf) -> Plan:
        pairs = zip(plan.stages, programs, strict=True)
        own = tuple(_bucketed(stage, program, part, kept, free, splits, most) for stage, program in pairs)
        return priced(replace(plan, stages=own), stages, cluster, part, known)

    tried: list[tuple[StagePlan, ...]] = []
    for free, kept in itertools.product((True, False) if flatten and plan.mesh.size > 1 else (False,), (True, False)):
        found = made(kept, free)
        if found.stages in tried:
            continue
        tried.append(found.stages)
        most = _largest(found, programs)
        for _ in range(SMALLER):
            more, room = found.estimate.peak_nbytes - plan.estimate.peak_nbytes, limit - plan.estimate.peak_nbytes
            if more <= room or room <= 0:
                break
            most *= FILLED * room / more
            found = made(kept, free, most)
        if found.estimate.peak_nbytes <= limit:
            return _saving(found, plan, stages, cluster, part, known)
    return plan


def _largest(plan: Plan, programs: Sequence[Program]) -> float:
    """Bytes of the largest bucket, of whole tensors."""
    pairs = zip(plan.stages, programs, strict=True)
    return max(
        (
            sum(t.element_size * math.prod(t.shape) for t in map(program.tensors.__getitem__, names))
            for stage, program in pairs
            for names in stage.buckets
        ),
        default=0.0,
    )


def _bucketed(
    plan: StagePlan, program: Program, part: Cluster, kept: bool, free: bool, splits: bool, most: float
) -> StagePlan:
    """A stage's plan with buckets. kept: what is gathered for use after the last block is kept until backward. most:
    see `choose_buckets`."""
    if kept and not splits:
        plan = replace(plan, lifetimes={**plan.lifetimes, **dict.fromkeys(used_last(plan, program), "microbatch")})
    pricer = make_pricer(mesh=plan.mesh, cluster=part, config=plan.config)
    found = choose_buckets(plan, program, pricer, flatten=free, most=most)
    if splits:
        buckets = tuple(names for names in found.buckets if found.lifetimes.get(names[0]) in ONCE_A_STEP)
        ways = {name: way for name, way in found.ways.items() if found.lifetimes.get(name) in ONCE_A_STEP}
        return replace(found, buckets=buckets, ways=ways)
    return found


def _saving(
    plan: Plan,
    given: Plan,
    stages: Sequence[CapturedModel],
    cluster: Cluster,
    part: Cluster,
    known: PricedStages,
) -> Plan:
    """The plan, made of the one given, with what its buckets, and the ways that they take, save of a step."""

    def seconds(own: Iterable[StagePlan]) -> float:
        return priced(replace(plan, stages=tuple(own)), stages, cluster, part, known).estimate.step_seconds

    estimate, total = plan.estimate, plan.estimate.step_seconds
    has_ways = any(stage.ways for stage in plan.stages)
    unmerged = seconds(replace(stage, ways={}) for stage in plan.stages) if has_ways else total
    alone = given.estimate.step_seconds
    if any(own.lifetimes != before.lifetimes for own, before in zip(plan.stages, given.stages, strict=True)):
        alone = seconds(replace(stage, ways={}, buckets=()) for stage in plan.stages)
    return plan.with_estimate(replace(estimate, saved=alone - total, saved_by_ways=unmerged - total))
