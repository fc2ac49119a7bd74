"""Which plans come next? The best ones beside a plan, different enough to be worth a race, each ready to run.

Candidates, for the plan's memory limit and one number of micro-batches, its own or another, the last ones while there
is time:

    its mesh              the best plan on it, of another number than the plan's own
    named baselines       ddp, fsdp, megatron, ulysses on the plan's mesh
    other meshes          the best plan on each that follows the cluster's levels, if the plan was searched over them
    without one thing     the best plan without a technique, or without one decision, of the plan (`alternatives`)
    pipelines             for a plan with stages: other schedules, meshes of a stage, numbers of pipeline ranks, one
                          among them; those of as many ranks and of the same mesh first

Each is the best of its part of the space, so that no two differ in trifles alone; plans that decide alike count once.
Where the plan was chosen in buckets they have theirs, and are compared so.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.errors import ArgumentError, InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.explanation.alternatives import Space
from autopar.search.find_exactly import Exact
from autopar.search.graph.moments import Share
from autopar.search.joint.best_staged import best_staged
from autopar.search.joint.candidates import Candidate
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.meshes import arrangements, meshes, parts
from autopar.search.planner import plan_program, plan_rank
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.search.staged.stages import starts_of
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.search.timeline.staged_buckets import finisher, in_buckets
from autopar.values.cluster import Cluster
from autopar.values.plan import Plan, one_stage
from autopar.values.schedules import check_microbatches
from autopar.values.search_report import SearchReport
from autopar.values.stage_plan import StagePlan

DECISIONS = 6
"""How many of the dearest decisions are forbidden, one at a time."""
GAP = 5e-3
SECONDS = 60.0
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2))
"""And stages a pipeline rank."""
SHARE, LEAST = 0.25, 0.05
"""What one question may take of the time given; the share of that below which none is asked."""


def next_best(
    plan: Plan,
    program: Program,
    cluster: Cluster,
    count: int,
    *,
    seconds: float = SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, ...]:
    """The `count` cheapest plans found beside `plan` in so many seconds, cheapest first; fewer where there are no more.

    program: of the plan's graph, or of that with another number of micro-batches.

    Each fits the memory limit; its search report says what it is.
    """
    deadline, share = time.monotonic() + seconds, seconds * SHARE

    def left() -> float:
        """Seconds for the next question, 0 where none is asked any more."""
        rest = min(deadline - time.monotonic(), share)
        return rest if rest > LEAST * share else 0.0

    found: list[Plan] = []
    without = frozenset(op.name for op in program.ops if not op.has_backward)
    seen = {_decisions(plan, without)}
    candidates: Iterator[tuple[Plan, str]]
    if plan.num_stages > 1:
        candidates = _pipelines(plan, program, cluster, left, tell)
    else:
        found_on_mesh = _candidates(plan.single, program, cluster, left, tell)
        candidates = ((one_stage(other), what) for other, what in found_on_mesh)
    number = f"{program.microbatches} micro-batches, " if program.microbatches != plan.microbatches else ""
    for other, what in candidates:
        is_marked = other.estimate.search.is_in_buckets or (other.num_stages == 1 and other.single.buckets)
        if plan.estimate.search.is_in_buckets and not is_marked:
            other = in_buckets(other, program.captured, cluster)
        key = _decisions(other, without)
        if key not in seen and other.estimate.peak_nbytes <= memory_limit(cluster, plan.config):
            seen.add(key)
            told = other.estimate.search
            report = SearchReport(
                stages=told.stages,
                recompute=told.recompute,
                is_in_buckets=told.is_in_buckets,
                in_buckets=told.in_buckets,
                instead=number + what,
            )
            estimate = replace(other.estimate, bound=0.0, baselines={}, search=report)
            found.append(other.with_estimate(estimate))
    return tuple(sorted(found, key=lambda p: p.estimate.step_seconds)[:count])


def _decisions(plan: Plan, without: frozenset[str]) -> tuple[object, ...]:
    """What makes two plans one: `origin` and the rest say where they come from.

    without: ops that have no backward pass, for which invariant and replicated are one.
    """
    return plan.pipeline, plan.schedule, plan.cuts, *(_decided(stage, without) for stage in plan.stages)


def _decided(plan: StagePlan, without: frozenset[str]) -> tuple[object, ...]:
    """The same of a stage."""
    choices = {
        op: tuple("replicate" if word == "invariant" else word for word in choice) if op in without else choice
        for op, choice in plan.choices.items()
    }
    return (
        plan.microbatches,
        plan.mesh,
        tuple(sorted(choices.items())),
        tuple(sorted((name, str(layout)) for name, layout in plan.layouts.items())),
        tuple(sorted(plan.lifetimes.items())),
        tuple(sorted((name, str(paths)) for name, paths in plan.routes.items())),
        plan.recompute,
        tuple(sorted((name, str(layouts)) for name, layouts in plan.remade.items())),
    )


def _candidates(
    plan: StagePlan, program: Program, cluster: Cluster, left: Callable[[], float], tell: Callable[[str], None]
) -> Iterator[tuple[StagePlan, str]]:
    """Plans of one stage as they are found, with words for each."""
    buckets = plan.estimate.search.is_in_buckets
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config, in_buckets=buckets)
    limit = memory_limit(cluster, plan.config)
    if plan.mesh.size == 1:
        return
    best: StagePlan | None = plan
    if program.microbatches != plan.microbatches:
        tell(f"planning {program.microbatches} micro-batches")
        try:
            best = _planned(program, pricer, left())
            yield best, f"mesh {plan.mesh}"
        except (InfeasibleError, SearchTimeoutError):
            best = None
    for name in BASELINES if plan.mesh.num_axes <= SEARCHED_AXES else ():
        if left():
            tell(f"planning {name}")
            try:
                yield (named_in_buckets if buckets else baseline_plan)(name, program, pricer.alone, limit), name
            except InfeasibleError:
                continue
    for mesh in meshes(cluster) if plan.estimate.search.space is not None else ():
        if mesh.shape != plan.mesh.shape and left():
            tell(f"planning mesh {mesh}")
            own = make_pricer(mesh=mesh, cluster=cluster, config=plan.config, in_buckets=buckets)
            try:
                yield _planned(program, own, left()), f"mesh {mesh}"
            except (InfeasibleError, SearchTimeoutError):
                continue
    if best is None or plan.mesh.num_axes > SEARCHED_AXES:
        return
    space = Space(plan=best, program=program, pricer=pricer, limit=limit, relative_gap=GAP)
    for questions, words in ((space.techniques(), ""), (space.decisions(DECISIONS), "without ")):
        for asked, answer in questions:
            if not left():
                return
            tell(f"planning {words}{asked}")
            if (answered := answer(left()).plan) is not None:
                yield answered, f"{words}{asked}"


def _pipelines(
    plan: Plan, program: Program, cluster: Cluster, left: Callable[[], float], tell: Callable[[str], None]
) -> Iterator[tuple[Plan, str]]:
    """The best plans of other arrangements, and without stages."""
    num_blocks = len(starts_of(program)) + 1
    near = sorted(
        arrangements(cluster, tuple(parts(cluster))),
        key=lambda a: (a.pipeline != plan.pipeline, a.mesh.shape != plan.mesh.shape),
    )
    for arrangement in near:
        p = arrangement.pipeline

        def whole(pricer: Pricer, share: Share, mixes: bool) -> Exact:
            return plan_rank(program, pricer, share, _options(left()), SearchAim(says_least=False), mixes=mixes)

        for schedule, chunks in SCHEDULES if p > 1 else (("", 1),):
            if p * chunks > num_blocks or not _runs(schedule, p, program.microbatches) or not left():
                continue
            words = f"{arrangement}, {schedule}" if p > 1 else f"no stages, mesh {arrangement}"
            tell(f"planning {words}")
            pricer = make_pricer(
                mesh=arrangement.mesh,
                cluster=arrangement.cluster,
                config=plan.config,
                in_buckets=p == 1 and plan.estimate.search.is_in_buckets,
            )
            try:
                if p == 1:
                    yield one_stage(_planned(program, pricer, left())), words
                    continue
                finish = finisher(cluster) if plan.estimate.search.is_in_buckets else None
                key = Candidate(
                    arrangement=arrangement, microbatches=program.microbatches, schedule=schedule, chunks=chunks
                )
                made = best_staged(program, pricer, cluster, key, whole, finish=finish).plan
                if made is not None:
                    yield made, words
            except (InfeasibleError, SearchTimeoutError):
                continue


def _planned(program: Program, pricer: Pricer, seconds: float) -> StagePlan:
    return plan_program(program, pricer, _options(seconds), SearchAim(says_least=False))


def _options(seconds: float) -> SearchOptions:
    return SearchOptions(relative_gap=GAP, seconds=max(seconds, LEAST), with_baselines=False)


def _runs(schedule: str, pipeline: int, microbatches: int) -> bool:
    try:
        check_microbatches(schedule, pipeline, microbatches)
    except ArgumentError:
        return False
    return True
