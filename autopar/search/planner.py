"""Which plan is best on a mesh, and how good can any be? Build, solve, extract, price; then the named baselines.

The certificate: the solver's proved lower bound on the seconds of any plan in the space searched (`search.build` says
in one sentence what that is); the double recursion proves nothing and carries the bound of the work alone. Baselines
are solved in parts of the same space, so none is cheaper than a proved plan beyond the gap asked for; if one is
cheaper, it is taken.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, InfeasibleError, MeshError, SearchTimeoutError
from autopar.graph import CapturedModel, target_name
from autopar.mesh import Mesh
from autopar.plan import Plan, TrainConfig
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program, make_program
from autopar.search.costs.work_bound import work_bound
from autopar.search.exact.completion import within
from autopar.search.exact.highs_log import Progress
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.exact.limited_bound import least_within
from autopar.search.fitting import fitting
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.moments import Share
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.graph.strategy_graph import Ints, Solution, usage
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.recursion.double_recursion import double_recursion
from autopar.search.recursion.to_plan import plan_of
from autopar.search.recursion.ways import SEARCHED_AXES

GB = 1e9
TRIAL_GAP = 1e-2
"""How exactly the plan without a limit is found that tells whether memory binds."""
LATER = 4
"""Part of the time, one in so many, that is left at least for a search after the first."""
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
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan of `captured` on `mesh`, with its estimate, bound and baselines.

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
        Pricer(mesh=mesh, cluster=cluster, config=config),
        relative_gap=relative_gap,
        seconds=seconds,
        with_baselines=with_baselines,
        fold=fold,
        solver=solver,
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
) -> Plan:
    """`make_plan` for a program and prices at hand.

    cutoff: a plan of so many seconds or more is of no use. say_least: where nothing fits, find out what would.
    share: of a pipeline rank, whose memory is limited instead of the whole model's. prices: of memory, see `ilp.solve`.
    is_below: the relaxation within the limit is known to be below the cutoff.

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
            plan, bound, facts = _exact(
                program, pricer, aim, relative_gap, left, folded, tell, cutoff, say_least, share, known, below
            )
        bounds.append(bound)
        return plan.with_estimate(evaluate_program(plan, program, pricer)), bound, facts

    plan, _, facts = search(limit) if share is not None else fitting(search, _peak_nbytes, limit)
    bound = bounds[0]  # what was searched again has less memory: its bound is none of the limit's
    if not fold and "build_seconds" in facts:
        folded, _, _ = fitting(lambda aim: search(aim, True), _peak_nbytes, limit)
        facts["folded_seconds"] = folded.estimate.step_seconds
        if folded.estimate.step_seconds < plan.estimate.step_seconds:
            plan = folded
    if plan.recompute or plan.remade:
        facts["recompute"] = _traded(plan, program, pricer)
    plan = plan.with_estimate(
        replace(
            plan.estimate,
            bound=min(bound, plan.estimate.step_seconds),
            solver={**facts, "memory_limit": limit, "without_rule": _without_rule(program)},
        )
    )
    return compare(plan, program, pricer, tell) if with_baselines else plan


def compare(
    plan: Plan,
    program: Program,
    pricer: Pricer,
    tell: Callable[[str], None],
    finish: Callable[[Plan], Plan] = lambda plan: plan,
) -> Plan:
    """The plan with the named baselines, each as `finish` leaves it, beside it, or the baseline that is cheaper."""
    best, compared = plan, dict[str, float | str]()
    limit = memory_limit(pricer.cluster, pricer.config)
    for name in BASELINES if pricer.mesh.size > 1 else ():
        if pricer.mesh.num_axes > SEARCHED_AXES:
            compared[name] = f"not priced on more than {SEARCHED_AXES} axes"
            continue
        tell(f"pricing the baseline {name}")
        other = _baseline(name, program, pricer, limit)
        if isinstance(other, str):
            compared[name] = other
            continue
        other = finish(other)
        compared[name] = other.estimate.step_seconds
        if other.estimate.step_seconds < best.estimate.step_seconds:
            best = other
    bound = min(plan.estimate.bound, best.estimate.alone_seconds)
    facts = dict(plan.estimate.solver)
    if best is not plan:
        facts.pop("recompute", None)
    return best.with_estimate(replace(best.estimate, bound=bound, baselines=compared, solver=facts))


Found = tuple[Plan, float, dict[str, Any]]
"""A plan, a lower bound in seconds, and what there is to say of the search."""


def _peak_nbytes(found: Found) -> float:
    return found[0].estimate.peak_nbytes


def _exact(
    program: Program,
    pricer: Pricer,
    limit: float,
    relative_gap: float,
    seconds: float | None,
    fold: bool,
    tell: Callable[[str], None],
    cutoff: float = math.inf,
    say_least: bool = True,
    share: Share | None = None,
    prices: dict[int, float] | None = None,
    is_below: bool = False,
) -> Found:
    began = time.perf_counter()

    def show(state: Progress) -> None:
        tell(f"solving ({state.phase}): best {state.incumbent:.4g} s, bound {state.bound:.4g} s, {state.elapsed:.0f} s")

    def left() -> float | None:
        return None if seconds is None else max(seconds - (time.perf_counter() - began), seconds / LATER)

    def solved(
        problem: Problem, least: bool, binds: bool = True, hint: Ints | None = None, below: float = cutoff
    ) -> Solution:
        return _solve(problem, limit, relative_gap, left(), show, below, least, binds, hint, prices)

    tell("building the strategy graph")
    if cutoff < math.inf:  # a plan is at hand, and most graphs have none better: that takes few linear programs to see
        again = build(program, pricer, limit=limit, fold=fold, builder=RecomputeBuilder, share=share)
        if not is_below:
            bound = least_within(again.graph, cutoff=cutoff, seconds=seconds, prices={} if prices is None else prices)
            if bound == math.inf:
                raise InfeasibleError(f"no plan on mesh {pricer.mesh} fits in {limit / GB:.3g} GB a device")
            if bound >= cutoff:
                raise CutoffError(bound)
    problem = build(program, pricer, limit=limit, fold=fold, share=share)
    built = time.perf_counter()
    free = _unlimited(problem, relative_gap / 2, seconds, cutoff)
    if free is None:
        solution = solved(problem, say_least, binds=False)
    elif within(problem.graph, free.choice, free.arcs):
        solution = free
    elif cutoff < math.inf:
        problem, solution = again, solved(again, say_least)
    else:
        # To run something again only adds seconds: a plan that keeps everything near the bound without a limit will do.
        proved, kept, near = free.bound, None, free.bound / (1 - relative_gap)
        if least_within(problem.graph, cutoff=near, seconds=left(), prices={} if prices is None else prices) < near:
            kept = _attempt(lambda: solved(problem, False, hint=free.choice))
        if kept is None or kept.seconds > near:
            tell("the memory limit binds: adding recompute to the strategy graph")
            again = build(program, pricer, limit=limit, fold=fold, builder=RecomputeBuilder, share=share)
            if kept is None:
                problem, kept = again, solved(again, say_least)
                proved = max(proved, kept.bound)
            else:
                below = min(cutoff, kept.seconds * (1 - relative_gap))
                try:
                    found = solved(again, False, below=below)
                    proved = max(proved, found.bound)
                    if found.seconds <= kept.seconds:
                        problem, kept = again, found
                except CutoffError as error:
                    proved = max(proved, error.bound)
                except (InfeasibleError, SearchTimeoutError):
                    pass
        solution = replace(kept, bound=min(proved, kept.seconds))
    solved_at = time.perf_counter()
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    facts = {
        **_sizes(problem),
        "status": solution.status,
        "build_seconds": built - began,
        "solve_seconds": solved_at - built,
    }
    if share is not None:
        facts["counted_nbytes"] = float(usage(problem.graph, solution.choice, solution.arcs).max())
    return plan, solution.bound, facts


def _unlimited(problem: Problem, relative_gap: float, seconds: float | None, cutoff: float) -> Solution | None:
    """The best choice if memory had no limit, None where time is up."""
    graph = replace(problem.graph, memory=None)
    try:
        return solve(graph, relative_gap=relative_gap, seconds=seconds, cutoff=cutoff)
    except SearchTimeoutError:
        return None


def _attempt(search: Callable[[], Solution]) -> Solution | None:
    """What it finds, None where nothing fits, is found in time, or is below the cutoff."""
    try:
        return search()
    except (SearchTimeoutError, InfeasibleError, CutoffError):
        return None


def make_problem(
    program: Program,
    pricer: Pricer,
    limit: float,
    *,
    restriction: Restriction | None = None,
    fold: bool = True,
    seconds: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    cutoff: float = math.inf,
) -> Problem:
    """The strategy graph; with recomputed options where the fastest plan that keeps everything does not fit."""
    problem = build(program, pricer, limit=limit, fold=fold, restriction=restriction)
    graph = problem.graph
    try:
        fastest = solve(replace(graph, memory=None), relative_gap=TRIAL_GAP, seconds=seconds, cutoff=cutoff)
    except SearchTimeoutError:
        return problem
    if within(graph, fastest.choice, fastest.arcs):
        return problem
    tell("the memory limit binds: adding recompute to the strategy graph")
    return build(program, pricer, limit=limit, fold=fold, restriction=restriction, builder=RecomputeBuilder)


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


def _solve(
    problem: Problem,
    limit: float,
    relative_gap: float,
    seconds: float | None,
    show: Callable[[Progress], None],
    cutoff: float,
    say_least: bool,
    binds: bool,
    hint: Ints | None,
    prices: dict[int, float] | None,
) -> Solution:
    try:
        return solve(
            problem.graph,
            relative_gap=relative_gap,
            seconds=seconds,
            hint=hint,
            on_progress=show,
            cutoff=cutoff,
            binds=binds,
            say_least=say_least,
            prices=prices,
        )
    except InfeasibleError as error:
        if error.least_nbytes is None:
            raise
        raise InfeasibleError(
            f"no plan on mesh {problem.pricer.mesh} fits in {limit / GB:.3g} GB a device: the least that would do is "
            f"{error.least_nbytes / GB:.3g} GB; use more devices, a smaller global batch, lower precision or "
            "devices with more memory",
            least_nbytes=error.least_nbytes,
        ) from error


def _baseline(name: str, program: Program, pricer: Pricer, limit: float) -> Plan | str:
    """A baseline's plan, or why it is none."""
    try:
        return baseline_plan(name, program, pricer, limit)
    except InfeasibleError as error:
        if error.least_nbytes is None:
            return str(error)
        return f"does not fit: needs {error.least_nbytes / GB:.1f} GB of {limit / GB:.1f} GB a device"


def _sizes(problem: Problem) -> Mapping[str, Any]:
    graph = problem.graph
    return {
        "nodes": len(graph.nodes),
        "options": sum(len(node.seconds) for node in graph.nodes),
        "arcs": sum(len(group.arc_seconds) for group in graph.groups),
    }


def _without_rule(program: Program) -> dict[str, int]:
    """Ops that run whole on every rank because no rule knows them: target -> count."""
    return dict(Counter(target_name(op.node.target) for op in program.ops if not op.rule.known))
