"""Which plan is best on a mesh, and how good can any be? Build, solve, extract, price; then the named baselines.

The certificate: the solver's proved lower bound on the seconds of any plan in the space searched (`search.build` says
in one sentence what that is); the double recursion proves nothing and carries the bound of the work alone. Baselines
are solved in parts of the same space, so none is cheaper than a proved plan beyond the gap asked for; if one is
cheaper, it is taken.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError, MeshError, SearchTimeoutError
from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.work_bound import work_bound
from autopar.search.exact.ilp import CutoffError
from autopar.search.exact.least_peak import PEAK_SECONDS
from autopar.search.find_exactly import EXACT, Exact, find_exactly
from autopar.search.fitting import fitting
from autopar.search.graph.moments import Share
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.known.remembered import remembered
from autopar.search.mixing import mixed_within
from autopar.search.recursion.double_recursion import double_recursion
from autopar.search.recursion.to_plan import plan_of
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.search_options import LATER, SOLVERS, SearchAim, SearchOptions
from autopar.search.timeline.buckets import bucketed
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.values.choices import check_choice
from autopar.values.cluster import Cluster
from autopar.values.gigabytes import gigabytes, least_gigabytes
from autopar.values.graph import CapturedModel, called_name
from autopar.values.mesh import Mesh
from autopar.values.search_report import Recomputed, SearchReport, SolvedGraph
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

Found = tuple[StagePlan, float, SolvedGraph]
"""A plan, a lower bound in seconds, and the strategy graph of which it is a choice."""


def make_plan(
    captured: CapturedModel,
    cluster: Cluster,
    mesh: Mesh,
    config: TrainConfig,
    options: SearchOptions,
) -> StagePlan:
    """The best plan of `captured` on `mesh`, with its estimate, bound and baselines.

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
    check_choice("solver", options.solver, SOLVERS)
    pricer = make_pricer(mesh=mesh, cluster=cluster, config=config, in_buckets=options.buckets)
    return plan_program(make_program(captured), pricer, options)


def plan_program(program: Program, pricer: Pricer, options: SearchOptions, asked: SearchAim | None = None) -> StagePlan:
    """`make_plan` for a program and its prices; in buckets if these are.

    Raises:
        InfeasibleError: if no plan meets the memory limit.
        CutoffError: if it is proved that no plan is below the cutoff.
    """
    search = _Search(program, pricer, options, asked or SearchAim())
    plan = search.run()
    if not options.with_baselines:
        return plan
    return compare(plan, program, pricer.alone, replace(options, buckets=pricer.in_buckets))


def plan_rank(
    program: Program, pricer: Pricer, share: Share, options: SearchOptions, asked: SearchAim, *, mixes: bool
) -> Exact:
    """The plan of the whole model that is best within the memory of a pipeline rank, not priced: its stages are.

    share: of the rank. mixes: two plans of which a mixture may be near the bound will do as well.

    Raises:
        InfeasibleError: if no plan meets the memory limit.
        CutoffError: if it is proved that no plan is below the cutoff.
    """
    limit = memory_limit(pricer.cluster, pricer.config)
    find = partial(find_exactly, program, pricer, limit, asked=asked, share=share)
    found = find(options=options, mixes=mixes and options.fold)
    if not options.fold:
        with suppress(CutoffError, InfeasibleError, SearchTimeoutError):
            folded = find(options=replace(options, fold=True))
            if folded.seconds < found.seconds:
                found = replace(folded, bound=found.bound)
    return found


@dataclass(slots=True)
class _Search:
    """A plan of the whole model on one mesh, found under a memory limit and less until it fits."""

    program: Program
    pricer: Pricer
    options: SearchOptions
    asked: SearchAim
    began: float = field(default_factory=time.monotonic)
    bounds: list[float] = field(default_factory=list)

    def run(self) -> StagePlan:
        """The plan, in buckets if prices are, with its bound and what there is to say of the search."""
        limit, where = memory_limit(self.pricer.cluster, self.pricer.config), f"on mesh {self.pricer.mesh}"
        try:
            plan, _, solved = fitting(partial(self._found, fold=self.options.fold), _peak_nbytes, limit, where)
        except (CutoffError, InfeasibleError, SearchTimeoutError) as error:
            if not self.bounds or (self.asked.says_least and isinstance(error, InfeasibleError)):
                raise
            message = f"of plans found none fits, which proves nothing: {error}"
            raise SearchTimeoutError(message, bound=self.bounds[0]) from error
        bound = self.bounds[0]  # what was searched again has less memory: its bound is none of the limit's
        folded_seconds = None
        if not self.options.fold and solved.method == EXACT:
            folded, _, _ = fitting(partial(self._found, fold=True), _peak_nbytes, limit, where)
            folded_seconds = folded.estimate.step_seconds
            if folded_seconds < plan.estimate.step_seconds:
                plan = folded
        searched_seconds = plan.estimate.step_seconds
        plan = self._in_buckets(plan)
        alone = self.pricer.alone
        report = SearchReport(
            solved=replace(solved, price_seconds=max(time.monotonic() - self.began - solved.seconds, 0.0)),
            memory_limit=limit,
            searched_seconds=searched_seconds,
            folded_seconds=folded_seconds,
            whole_seconds=_whole_seconds(self.program, alone),
            recompute=_traded(plan, self.program, alone) if plan.recompute or plan.remade else None,
        )
        bound = min(bound, plan.estimate.in_turn_seconds)
        return plan.with_estimate(replace(plan.estimate, bound=bound, search=report))

    def _found(self, aim: float, fold: bool) -> Found:
        """What is best within so many bytes a device."""
        few_axes = self.pricer.mesh.num_axes <= SEARCHED_AXES
        if self.options.solver == "double-recursive" or (self.options.solver == "auto" and not few_axes):
            plan, bound, solved = self._recursive(aim, fold)
        else:
            plan, bound, solved = self._exact(aim, fold)
        self.bounds.append(bound)
        return plan if plan.estimate.seconds else _evaluated(plan, self.program, self.pricer), bound, solved

    def _exact(self, aim: float, fold: bool) -> Found:
        seconds = self.options.seconds
        left = None if seconds is None else max(seconds - (time.monotonic() - self.began), seconds / LATER)
        limit = memory_limit(self.pricer.cluster, self.pricer.config)
        asked = self.asked
        if aim != limit:  # what is found of an aim is not to depend on what was asked before
            asked = replace(asked, is_below=False, prices=dict[int, float]())
        if aim > limit and left is None:  # to say how much would do
            left = PEAK_SECONDS
        options = replace(self.options, fold=fold, seconds=left)
        exactly = partial(find_exactly, self.program, self.pricer, aim, options, asked)
        found = exactly(mixes=fold)
        if found.mixture is None:
            return found.plan, found.bound, found.solved
        gap = self.options.relative_gap
        near = found.bound / (1 - gap)
        plan, bound = _mixed(found, self.program, self.pricer, limit, near=near, alone=exactly)
        is_proved = plan.estimate.step_seconds * (1 - gap) <= bound
        return plan, bound, replace(found.solved, status="optimal") if is_proved else found.solved

    def _recursive(self, aim: float, fold: bool) -> Found:
        began = time.perf_counter()
        self.options.tell("splitting the mesh recursively")
        decider = double_recursion(self.program, self.pricer, limit=aim, fold=fold)
        solved = SolvedGraph(
            method="double recursion",
            status="found without a search for the best; the bound is that of the work alone",
            nodes=len(decider.neighbours.clusters),
            solve_seconds=time.perf_counter() - began,
        )
        return plan_of(decider, self.program), work_bound(self.program, self.pricer), solved

    def _in_buckets(self, plan: StagePlan) -> StagePlan:
        if not self.pricer.in_buckets:
            return plan
        peak, prices, flatten = plan.estimate.peak_nbytes, self.pricer.alone, self.options.flatten
        own = partial(bucketed, program=self.program, pricer=prices, flatten=flatten, peak=peak)
        return remembered(("in buckets", flatten), plan, self.program, prices, own)


def _evaluated(plan: StagePlan, program: Program, pricer: Pricer) -> StagePlan:
    """Under prices that only guide a search it is none that a plan is told by."""
    pricer = pricer.alone if pricer.shown is not None else pricer

    def evaluated(bare: StagePlan) -> StagePlan:
        return bare.with_estimate(evaluate_program(bare, program, pricer))

    return remembered("evaluated", plan, program, pricer, evaluated)


def _mixed(
    found: Exact, program: Program, pricer: Pricer, limit: float, *, near: float, alone: Callable[[], Exact]
) -> tuple[StagePlan, float]:
    """The best of the plan found, of the mixtures and, if none of these takes `near` the bound, of equal blocks that do
    decide alike: of those that fit the fastest; and the better bound."""
    assert found.mixture is not None
    slow, fast = found.mixture
    slow = _evaluated(slow, program, pricer)
    made, bound = [slow, _evaluated(found.plan, program, pricer)], found.bound
    if (mixture := mixed_within(slow, fast, program, pricer, limit)) is not None:
        made.append(mixture)

    def rank(plan: StagePlan) -> tuple[bool, float]:
        return plan.estimate.peak_nbytes > limit, plan.estimate.step_seconds

    if rank(min(made, key=rank)) > (False, near):
        with suppress(CutoffError, InfeasibleError, SearchTimeoutError):
            other = alone()
            made.append(_evaluated(other.plan, program, pricer))
            bound = max(bound, other.bound)
    return min(made, key=rank), bound


def compare(
    plan: StagePlan,
    program: Program,
    pricer: Pricer,
    options: SearchOptions,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> StagePlan:
    """The plan with the named baselines beside it, or the baseline that is cheaper.

    is_over: whether there is no time for another.
    """
    best, compared = plan, dict[str, float | str]()
    for name in BASELINES if pricer.mesh.size > 1 else ():
        if pricer.mesh.num_axes > SEARCHED_AXES:
            compared[name] = f"not priced on more than {SEARCHED_AXES} axes"
            continue
        if is_over():
            break
        options.tell(f"pricing the baseline {name}")
        other = _baseline(name, program, pricer, options)
        if isinstance(other, str):
            compared[name] = other
            continue
        compared[name] = other.estimate.step_seconds
        if other.estimate.step_seconds < best.estimate.step_seconds:
            best = other
    bound = min(plan.estimate.bound, best.estimate.in_turn_seconds)
    report = plan.estimate.search if best is plan else replace(plan.estimate.search, recompute=None)
    return best.with_estimate(replace(best.estimate, bound=bound, baselines=compared, search=report))


def _peak_nbytes(found: Found) -> float:
    return found[0].estimate.peak_nbytes


def _traded(plan: StagePlan, program: Program, pricer: Pricer) -> Recomputed:
    """Seconds that recompute takes, and bytes at the peak that it saves, beside the same plan that keeps everything."""
    kept = evaluate_program(replace(plan, recompute=frozenset(), remade={}), program, pricer)
    return Recomputed(
        seconds=plan.estimate.step_seconds - kept.step_seconds, nbytes=kept.peak_nbytes - plan.estimate.peak_nbytes
    )


def _baseline(name: str, program: Program, pricer: Pricer, options: SearchOptions) -> StagePlan | str:
    """A baseline's plan, or why it is none."""
    limit = memory_limit(pricer.cluster, pricer.config)
    try:
        if options.buckets:
            return named_in_buckets(name, program, pricer, limit, flatten=options.flatten)
        return baseline_plan(name, program, pricer, limit)
    except InfeasibleError as error:
        if error.least_nbytes is None:
            return str(error)
        return f"does not fit: needs {least_gigabytes(error.least_nbytes)} GB of {gigabytes(limit)} GB a device"


def _whole_seconds(program: Program, pricer: Pricer) -> dict[str, float]:
    """What ops that nothing splits take on every rank: target -> seconds of one micro-batch."""
    seconds: dict[str, float] = {}
    for op in program.ops:
        if not op.rule.known:
            price = pricer.op(op, ("invariant",) * pricer.mesh.num_axes)
            name = called_name(op.node)
            seconds[name] = seconds.get(name, 0.0) + price.forward + price.backward
    return seconds
