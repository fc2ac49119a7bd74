"""Which plan is best where parameters share messages? What a search for buckets found, and what it does not see.

In that search a parameter counts its share of a start (`Pricer.share`), so that its bound is one for all plans in
buckets, and a plan whose parameters all go one way is priced as it will be. Where a plan sends them several ways, each
of its buckets pays a whole start, of which the search counted a part: few where starts are a small part of a step, and
then its plan is proved to be as near the best as was asked. Where it is not, others are priced in buckets too:

    on axes     with parameters whole and some of the mesh's axes idle: where one message costs more than it saves over
                a slow link, copies inside a host may still share a bucket; on all axes where the last plan splits some
                for which a host's optimizer pays with all (`lower.redistributions.splits_parameters`)
    beside      searched again where what runs beside compute counts less, which a plain sum does not see: sums of the
                loss and of the count of labels no start, gradients' reductions a part of what backward may hide
    baselines   the named ones

and the cheapest, with what of its reductions runs beside backward taken off, is taken. Nothing is begun that would take
more than a part of what planning took before, nor where the plan at hand is a rough one, as no search had found another
in time (`joint.quick_plans`).
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.lower.redistributions import redistribute_parameters, splits_parameters
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.work_bound import work_seconds
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.graph.build import build
from autopar.search.graph.extract import extract
from autopar.search.graph.first_builder import first_builder
from autopar.search.graph.options import Restriction
from autopar.search.known.baselines import BASELINES, memory_limit
from autopar.search.planner import compare, plan_program
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.search.timeline.buckets import bucketed
from autopar.values.placement import Shard
from autopar.values.stage_plan import StagePlan

COPIES_GAP = 1e-2
SHOWN = 1.0, 0.5, 0.2
"""Parts of gradients' reductions that are counted, as if backward hid the rest."""
PART, LEAST = 0.25, 5.0
"""What may be spent, in CPU seconds: so much of what was spent before, and so many in any case."""


def best_in_buckets(
    plan: StagePlan,
    program: Program,
    pricer: Pricer,
    options: SearchOptions,
    *,
    beside: bool = True,
    spent: float = 0.0,
    most: float | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> StagePlan:
    """The cheapest in buckets of `plan`, which was searched for buckets and has some, and of others on its mesh with
    as many micro-batches; with `plan`'s bound. The search report says what each takes.

    pricer: of the mesh, of the program.
    options: `seconds` of each search; `with_baselines`: price them in any case; else only where there is time.
    beside: search for what runs beside compute, which may add up to more.
    spent: CPU seconds of planning so far, of which a part may be spent here; or `most`, if it is said.
    is_late: whether the time of the whole search is over.
    Of a plan that came from here baselines are asked, and what runs beside compute.
    """
    pricer, found, gap = pricer.alone, {"the search": plan}, options.relative_gap
    report = plan.estimate.search
    before = report.in_buckets
    needed = math.inf if report.is_rough or report.solved is None else report.solved.seconds
    end = time.process_time() + (max(PART * spent, LEAST) if most is None else most)

    def best() -> StagePlan:
        return min(found.values(), key=lambda one: one.estimate.step_seconds)

    def finish(other: StagePlan) -> StagePlan:
        return bucketed(other, program, pricer, flatten=options.flatten)

    def is_new(other: StagePlan) -> bool:
        return all(other.choices != one.choices or other.layouts != one.layouts for one in found.values())

    def is_proved() -> bool:
        if before:
            return True
        least = min(one.estimate.in_turn_seconds for one in found.values())
        return plan.mesh.size == 1 or plan.estimate.bound >= least * (1 - gap)

    def is_over() -> bool:
        return is_late() or time.process_time() + needed > end

    for axes in _parts(program, pricer, best()):
        least = _least_work(program, pricer, axes)
        if is_proved() or is_over() or least >= best().estimate.in_turn_seconds:
            continue
        names = " and ".join(pricer.mesh.names[axis] for axis in axes)
        where = f"on axis {names} alone" if len(axes) < pricer.mesh.num_axes else "with parameters whole"
        options.tell(f"planning for buckets {where}")
        copies = _copies_on(program, pricer, axes, options)
        if copies is not None:
            found[where] = finish(copies)
    parts = SHOWN if beside and plan.microbatches == 1 and plan.mesh.size > 1 else ()
    least = _least_work(program, pricer, tuple(range(plan.mesh.num_axes))) if parts else 0.0
    for part in parts:
        if is_over() or least >= best().estimate.step_seconds * (1 - gap):
            break
        words = "the loss beside compute" + (f" and {1 - part:.0%} of reductions" if part < 1 else "")
        options.tell(f"planning for buckets with {words}")
        other = _beside(program, pricer.sharing(part), options)
        if other is not None and (is_new(other) or other.estimate.step_seconds < best().estimate.step_seconds):
            found[words] = other
    chosen = best()
    if options.with_baselines or (plan.mesh.size > 1 and not is_over()):
        no_time = (lambda: False) if options.with_baselines else is_over
        chosen = compare(chosen, program, pricer, replace(options, buckets=True), is_over=no_time)
        if chosen.origin in BASELINES:
            found[chosen.origin] = chosen
    is_first = (chosen.choices, chosen.layouts) == (plan.choices, plan.layouts)
    priced = {name: one.estimate.step_seconds for name, one in found.items()}
    report = replace(
        report,
        recompute=chosen.estimate.search.recompute,
        folded_seconds=report.folded_seconds if is_first else None,
        is_in_buckets=True,
        in_buckets={**priced, **before},
    )
    return chosen.with_estimate(
        replace(
            chosen.estimate,
            bound=min(plan.estimate.bound, chosen.estimate.in_turn_seconds),
            baselines=chosen.estimate.baselines if options.with_baselines else {},
            search=report,
        )
    )


def _beside(program: Program, pricer: Pricer, options: SearchOptions) -> StagePlan | None:
    """The best plan where what runs beside compute counts less."""
    try:
        return plan_program(program, pricer, replace(options, with_baselines=False), SearchAim(says_least=False))
    except (CutoffError, InfeasibleError, SearchTimeoutError):
        return None


def _parts(program: Program, pricer: Pricer, plan: StagePlan) -> list[tuple[int, ...]]:
    """Some of the mesh's axes, more ranks first; all of them where the plan's parameters in parts cost a host more than
    a search sees. None for meshes that are not searched whole."""
    shape = pricer.mesh.shape
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if len(axes) > SEARCHED_AXES:
        return []
    parts = [part for count in range(1, len(axes)) for part in itertools.combinations(axes, count)]
    redistributed = redistribute_parameters(program, plan, pricer.target) if pricer.rates.split_seconds else {}
    every = [tuple(range(pricer.mesh.num_axes))] if splits_parameters(plan, redistributed, pricer.target) else []
    return [*every, *sorted(parts, key=lambda part: -math.prod(shape[axis] for axis in part))]


def _least_work(program: Program, pricer: Pricer, axes: tuple[int, ...]) -> float:
    """Seconds that forward and backward take on the ranks of these axes, if they share them evenly."""
    ranks = math.prod(pricer.mesh.shape[axis] for axis in axes)
    return work_seconds(program, pricer)[0] * pricer.mesh.size / ranks


def _copies_on(program: Program, pricer: Pricer, axes: tuple[int, ...], options: SearchOptions) -> StagePlan | None:
    """The best plan in buckets that splits nothing on other axes, and of parameters nothing; None if it does not
    fit."""
    together = make_pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=pricer.config, in_buckets=True)
    part = Restriction(
        choice=lambda op, axis, name: axis in axes or name == "invariant",
        storage=lambda tensor, storage: not any(isinstance(place, Shard) for place in storage.axes),
    )
    try:
        first = first_builder(program, together)
        problem = build(program, together, limit=None, fold=options.fold, restriction=part, builder=first)
        solution = solve(problem.graph, relative_gap=COPIES_GAP, seconds=options.seconds)
    except (InfeasibleError, SearchTimeoutError):
        return None
    plan = extract(problem, solution, pricer.cluster, pricer.config, "search")
    plan = plan.with_estimate(evaluate_program(plan, program, pricer))
    return plan if plan.estimate.peak_nbytes <= memory_limit(pricer.cluster, pricer.config) else None
