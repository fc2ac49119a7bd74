"""Which plan is best on a mesh, and how good can any be? Build, solve, extract, price; then the named baselines.

The certificate: the solver's proved lower bound on the seconds of any plan in the space searched (`search.build` says
in one sentence what that is); the double recursion proves nothing and carries the bound of the work alone. Baselines
are solved in parts of the same space, so none is cheaper than a proved plan beyond the gap asked for; if one is
cheaper, it is taken.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.errors import ArgumentError, InfeasibleError, MeshError, SearchTimeoutError
from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.work_bound import work_bound
from autopar.search.exact.ilp import CutoffError
from autopar.search.find_exactly import LATER, Exact, find_exactly
from autopar.search.fitting import fitting
from autopar.search.graph.moments import Share
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.known.remembered import remembered
from autopar.search.mixing import mixed_within
from autopar.search.recursion.double_recursion import double_recursion
from autopar.search.recursion.to_plan import plan_of
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.timeline.buckets import bucketed
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel, called_name
from autopar.values.mesh import Mesh
from autopar.values.plan import Plan, TrainConfig

GB = 1e9
SOLVERS = ("auto", "ilp", "double-recursive")


def make_plan(
    captured: CapturedModel,
    cluster: Cluster,
    mesh: Mesh,
    config: TrainConfig,
    *,
    relative_gap: float = 5e-3,
    seconds: float | None = None,
    with_baselines: bool = True,
    fold: bool = True,
    solver: str = "auto",
    buckets: bool = False,
    flatten: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan of `captured` on `mesh`, with its estimate, bound and baselines.

    buckets: parameters share messages, in the search, its bound, the plan and the baselines; flatten: see
    `timeline.buckets.bucketed`.

    relative_gap: stop when the plan is proved to be within this of the best. seconds: stop solving then, with the best
    plan so far and its true gap. fold: equal blocks decide alike; without it the plan also says what folding costs, and
    is the folded one where the time ended before a better one was found. solver: one of `SOLVERS`; `auto` is ilp on up
    to three axes, double-recursive on more, where tables over all axes grow beyond use. progress: told what is done.

    Raises:
        ArgumentError: if the solver is unknown.
        MeshError: if the mesh and the cluster differ in size.
        InfeasibleError: if no plan meets the memory limit; says the least that would do.
    """
    if mesh.size != cluster.num_devices:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} ranks, cluster {cluster.name} has {cluster.num_devices} devices; "
            "choose a mesh whose sizes multiply to the number of devices"
        )
    if solver not in SOLVERS:
        raise ArgumentError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    return plan_program(
        make_program(captured),
        make_pricer(mesh=mesh, cluster=cluster, config=config, in_buckets=buckets),
        relative_gap=relative_gap,
        seconds=seconds,
        with_baselines=with_baselines,
        fold=fold,
        solver=solver,
        flatten=flatten,
        progress=progress,
    )


def plan_program(
    program: Program,
    pricer: Pricer,
    *,
    relative_gap: float,
    seconds: float | None,
    with_baselines: bool,
    fold: bool,
    solver: str = "auto",
    progress: Callable[[str], None] | None = None,
    cutoff: float = math.inf,
    say_least: bool = True,
    share: Share | None = None,
    prices: dict[int, float] | None = None,
    is_below: bool = False,
    mixes: Callable[[Plan, Plan], None] | None = None,
    flatten: bool = True,
) -> Plan:
    """`make_plan` for a program and prices at hand; in buckets if these are.

    cutoff: a plan of so many seconds or more is of no use. say_least: where nothing fits, find out what would.
    share: of a pipeline rank, whose memory is limited instead of the whole model's; its plan is not priced. prices: of
    memory, see `ilp.solve`.
    is_below: the relaxation within the limit is known to be below the cutoff. mixes: of a rank's plan, told a slow one
    that fits and a fast one that does not, if a mixture may be near the bound; then nothing better was looked for.

    Raises:
        InfeasibleError: if no plan meets the memory limit.
        CutoffError: if it is proved that no plan is below the cutoff.
    """
    tell = progress or (lambda _: None)
    limit = memory_limit(pricer.cluster, pricer.config)
    few_axes = pricer.mesh.num_axes <= SEARCHED_AXES
    bounds: list[float] = []
    began = time.monotonic()
    known: dict[int, float] = {} if prices is None else prices

    def search(aim: float, folded: bool = fold) -> Found:
        left = None if seconds is None else max(seconds - (time.monotonic() - began), seconds / LATER)
        if solver == "double-recursive" or (solver == "auto" and not few_axes):
            plan, bound, facts = _recursive(program, pricer, aim, folded, tell)
        else:
            below = is_below and aim == limit
            exactly = partial(
                find_exactly,
                *(program, pricer, aim, relative_gap, left, folded, tell, cutoff, say_least, share, known, below),
            )
            found = exactly(mixes=folded and (share is None or mixes is not None))
            plan, bound, facts = found.plan, found.bound, found.facts
            if found.mixture is not None and mixes is not None:
                mixes(*found.mixture)
            elif found.mixture is not None:
                plan, bound = _mixed(found, program, pricer, limit, near=bound / (1 - relative_gap), alone=exactly)
                if plan.estimate.step_seconds * (1 - relative_gap) <= bound:
                    facts["status"] = "optimal"
        bounds.append(bound)
        as_found = plan.estimate.seconds or is_rank
        return plan if as_found else _evaluated(plan, program, pricer), bound, facts

    is_rank = share is not None and fold  # then its stages are priced, by who asked
    if is_rank:
        plan, bound, facts = search(limit)
        return plan.with_estimate(replace(plan.estimate, bound=bound, solver=facts))
    try:
        plan, _, facts = search(limit) if share is not None else fitting(search, _peak_nbytes, limit)
    except (CutoffError, InfeasibleError, SearchTimeoutError) as error:
        if not bounds or (say_least and isinstance(error, InfeasibleError)):
            raise
        raise SearchTimeoutError(f"of plans found none fits, which proves nothing: {error}", bound=bounds[0]) from error
    bound = bounds[0]  # what was searched again has less memory: its bound is none of the limit's
    if not fold and "build_seconds" in facts:
        folded, _, _ = fitting(lambda aim: search(aim, True), _peak_nbytes, limit)
        facts["folded_seconds"] = folded.estimate.step_seconds
        if folded.estimate.step_seconds < plan.estimate.step_seconds:
            plan = folded
    facts["searched_seconds"] = plan.estimate.step_seconds

    def finish(other: Plan, peak: float | None = None) -> Plan:
        is_whole = share is None  # stages get theirs later
        if not (pricer.in_buckets and is_whole):
            return other
        prices = pricer.alone
        own = partial(bucketed, program=program, pricer=prices, flatten=flatten, peak=peak)
        return remembered(("in buckets", flatten), other, program, prices, own)

    plan = finish(plan, plan.estimate.peak_nbytes)
    others = facts.get("build_seconds", 0.0) + facts.get("solve_seconds", 0.0)
    facts["price_seconds"] = max(time.monotonic() - began - others, 0.0)
    if plan.recompute or plan.remade:
        facts["recompute"] = _traded(plan, program, pricer.alone)
    plan = plan.with_estimate(
        replace(
            plan.estimate,
            bound=min(bound, plan.estimate.in_turn_seconds),
            solver={**facts, "memory_limit": limit, "whole_seconds": _whole_seconds(program, pricer.alone)},
        )
    )
    if not with_baselines:
        return plan
    return compare(plan, program, pricer.alone, tell, buckets=pricer.in_buckets and share is None, flatten=flatten)


def _evaluated(plan: Plan, program: Program, pricer: Pricer) -> Plan:
    """Under prices that only guide a search it is none that a plan is told by."""
    pricer = pricer.alone if pricer.shown is not None else pricer

    def evaluated(bare: Plan) -> Plan:
        return bare.with_estimate(evaluate_program(bare, program, pricer))

    return remembered("evaluated", plan, program, pricer, evaluated)


def _mixed(
    found: Exact, program: Program, pricer: Pricer, limit: float, *, near: float, alone: Callable[[], Exact]
) -> tuple[Plan, float]:
    """The best of the plan found, of the mixtures and, if none of these takes `near` the bound, of equal blocks that do
    decide alike: of those that fit the fastest; and the better bound."""
    assert found.mixture is not None
    slow, fast = found.mixture
    slow = _evaluated(slow, program, pricer)
    made, bound = [slow, _evaluated(found.plan, program, pricer)], found.bound
    if (mixture := mixed_within(slow, fast, program, pricer, limit)) is not None:
        made.append(mixture)

    def rank(plan: Plan) -> tuple[bool, float]:
        return plan.estimate.peak_nbytes > limit, plan.estimate.step_seconds

    if rank(min(made, key=rank)) > (False, near):
        with suppress(CutoffError, InfeasibleError, SearchTimeoutError):
            other = alone()
            made.append(_evaluated(other.plan, program, pricer))
            bound = max(bound, other.bound)
    return min(made, key=rank), bound


def compare(
    plan: Plan,
    program: Program,
    pricer: Pricer,
    tell: Callable[[str], None],
    *,
    buckets: bool,
    flatten: bool = True,
    is_over: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan with the named baselines beside it, or the baseline that is cheaper.

    buckets: they are in buckets too; flatten: see `timeline.buckets.bucketed`. is_over: whether there is no time for
    another.
    """
    best, compared = plan, dict[str, float | str]()
    limit = memory_limit(pricer.cluster, pricer.config)
    for name in BASELINES if pricer.mesh.size > 1 else ():
        if pricer.mesh.num_axes > SEARCHED_AXES:
            compared[name] = f"not priced on more than {SEARCHED_AXES} axes"
            continue
        if is_over():
            break
        tell(f"pricing the baseline {name}")
        other = _baseline(name, program, pricer, limit, buckets, flatten)
        if isinstance(other, str):
            compared[name] = other
            continue
        compared[name] = other.estimate.step_seconds
        if other.estimate.step_seconds < best.estimate.step_seconds:
            best = other
    bound = min(plan.estimate.bound, best.estimate.in_turn_seconds)
    facts = dict(plan.estimate.solver)
    if best is not plan:
        facts.pop("recompute", None)
    return best.with_estimate(replace(best.estimate, bound=bound, baselines=compared, solver=facts))


Found = tuple[Plan, float, dict[str, Any]]
"""A plan, a lower bound in seconds, and what there is to say of the search."""


def _peak_nbytes(found: Found) -> float:
    return found[0].estimate.peak_nbytes


def _traded(plan: Plan, program: Program, pricer: Pricer) -> dict[str, float]:
    """Seconds that recompute takes, and bytes at the peak that it saves, beside the same plan that keeps everything."""
    kept = evaluate_program(replace(plan, recompute=frozenset(), remade={}), program, pricer)
    return {
        "seconds": plan.estimate.step_seconds - kept.step_seconds,
        "nbytes": kept.peak_nbytes - plan.estimate.peak_nbytes,
    }


def _recursive(program: Program, pricer: Pricer, limit: float, fold: bool, tell: Callable[[str], None]) -> Found:
    began = time.perf_counter()
    tell("splitting the mesh recursively")
    decider = double_recursion(program, pricer, limit=limit, fold=fold)
    facts = {
        "nodes": len(decider.neighbours.clusters),
        "status": "found without a search for the best; the bound is that of the work alone",
        "solve_seconds": time.perf_counter() - began,
    }
    return plan_of(decider, program), work_bound(program, pricer), facts


def _baseline(name: str, program: Program, pricer: Pricer, limit: float, buckets: bool, flatten: bool) -> Plan | str:
    """A baseline's plan, or why it is none."""
    try:
        if buckets:
            return named_in_buckets(name, program, pricer, limit, flatten=flatten)
        return baseline_plan(name, program, pricer, limit)
    except InfeasibleError as error:
        if error.least_nbytes is None:
            return str(error)
        return f"does not fit: needs {error.least_nbytes / GB:.1f} GB of {limit / GB:.1f} GB a device"


def _whole_seconds(program: Program, pricer: Pricer) -> dict[str, float]:
    """What ops that nothing splits take on every rank: target -> seconds of one micro-batch."""
    seconds: dict[str, float] = {}
    for op in program.ops:
        if not op.rule.known:
            price = pricer.op(op, ("invariant",) * pricer.mesh.num_axes)
            name = called_name(op.node)
            seconds[name] = seconds.get(name, 0.0) + price.forward + price.backward
    return seconds
