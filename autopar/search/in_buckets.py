"""Which plan is best where parameters share messages? Searched with starts that many share, then priced in buckets.

The search counts every collective alone, so a plan of many small messages (data parallelism) may lose to one that sends
few, and win in buckets. So the plan's problem is solved again with a part of the start of parameters' collectives:

    none        a parameter costs what its bytes take. A bucket costs its parameters no less, whatever it merges and
                whichever way it goes, so the bound of this search is one for all plans in buckets; it is done first,
                below what the plan at hand takes, and often proves that there is nothing to find
    a tenth     nearer to what buckets of a block take
    on axes     none, with parameters whole and some of the mesh's axes idle: where one message costs more than it saves
                over a slow link, copies inside a host may still share a bucket, which neither search above sees, for
                without starts the slow link pays too

Bounds count everything in turn. Candidates are these, the plan at hand and the named baselines: each with its own
buckets, and with what of their reductions runs beside backward taken off, the cheapest is taken. No search is begun
that would take more than a part of what planning took before, nor where the plan at hand is a rough one, as no search
had found another in time (`joint.at_hand`): then nothing is proved in buckets.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.graph import CapturedModel
from autopar.placement import Shard
from autopar.plan import Estimate, Plan
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program, make_program
from autopar.search.costs.work_bound import work_seconds
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.graph.build import build
from autopar.search.graph.extract import extract
from autopar.search.graph.options import Restriction
from autopar.search.known.baselines import BASELINES, memory_limit
from autopar.search.planner import compare, plan_program
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.timeline.buckets import bucketed
from autopar.search.timeline.staged_buckets import MARK

SHARES = (0.0, 0.1)
"""Parts of a start that count; the first proves."""
COPIES_GAP = 1e-2
ROUGH = "rough"
"""What `estimate.solver` says of a plan that no search proved to be near the best (`joint.at_hand`)."""
PART, LEAST = 0.25, 5.0
"""What may be spent, in CPU seconds: so much of what was spent before, and so many in any case."""


def best_in_buckets(
    plan: Plan,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    flatten: bool = True,
    with_baselines: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    seconds: float | None = None,
    spent: float = 0.0,
    **search: Any,
) -> Plan:
    """The cheapest in buckets of `plan`, of plans searched for buckets and of named baselines, on its mesh and number
    of micro-batches; with `plan`'s bound of collectives alone. `estimate.solver["buckets"]` says what each takes.

    flatten: over several axes a bucket may take other ways. with_baselines: price them in any case; else only where
    there is time. seconds: of solving, for each search. spent: CPU seconds of planning so far.
    search: as `search.planner.plan_program` takes it.
    """
    program = make_program(captured)
    pricer = Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)

    def finish(other: Plan) -> Plan:
        return bucketed(other, program, pricer, flatten=flatten)

    tell("choosing buckets")
    first = finish(plan)
    found, bound = {"the search": first}, 0.0
    gap = float(search["relative_gap"])
    facts = plan.estimate.solver
    needed = math.inf if ROUGH in facts else float(facts.get("build_seconds", 0.0) + facts.get("solve_seconds", 0.0))
    end = time.process_time() + max(PART * spent, LEAST)

    def best() -> Plan:
        return min(found.values(), key=lambda one: one.estimate.step_seconds)

    def is_proved() -> bool:
        least = min(one.estimate.in_turn_seconds for one in found.values())
        return plan.mesh.size == 1 or bound >= least * (1 - gap)

    def is_over() -> bool:
        return time.process_time() + needed > end

    for share in SHARES:
        if is_proved() or is_over():
            break
        tell(f"planning for buckets, {share:.0%} of starts counted")
        other, proved = _searched(program, pricer, share, best().estimate.in_turn_seconds, seconds, tell, search)
        bound = bound if share else proved
        if other is not None:
            found[f"{share:.0%} of starts"] = finish(other)
    for axes in _parts(program, pricer):
        least = _least_work(program, pricer, axes)
        if is_proved() or is_over() or least >= best().estimate.in_turn_seconds:
            continue
        names = " and ".join(pricer.mesh.names[axis] for axis in axes)
        tell(f"planning for buckets on axis {names} alone")
        copies = _copies_on(program, pricer, axes, seconds, bool(search["fold"]))
        if copies is not None:
            found[f"on axis {names} alone"] = finish(copies)
    chosen = best()
    if with_baselines or (plan.mesh.size > 1 and not is_over()):
        chosen = compare(chosen, program, pricer, tell, finish)
        if chosen.origin in BASELINES:
            found[chosen.origin] = chosen
    compared = {"seconds": {name: one.estimate.step_seconds for name, one in found.items()}}
    own = replace(chosen.estimate, baselines=chosen.estimate.baselines if with_baselines else {})
    return chosen.with_estimate(_certified(own, first.estimate, bound, compared))


def _searched(
    program: Program,
    pricer: Pricer,
    share: float,
    cutoff: float,
    seconds: float | None,
    tell: Callable[[str], None],
    search: dict[str, Any],
) -> tuple[Plan | None, float]:
    """The best plan with so much of a start, if it is below the cutoff, and what is proved of all."""
    own = Pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=pricer.config, start_share=share)
    try:
        made = plan_program(
            program,
            own,
            seconds=seconds,
            with_baselines=False,
            say_least=False,
            cutoff=cutoff,
            progress=tell,
            **search,
        )
    except CutoffError as error:
        return None, min(error.bound, cutoff)
    except (InfeasibleError, SearchTimeoutError):
        return None, 0.0
    bound = made.estimate.bound
    made = made.with_estimate(replace(made.estimate, bound=0.0))
    return made.with_estimate(evaluate_program(made, program, pricer)), bound


def _parts(program: Program, pricer: Pricer) -> list[tuple[int, ...]]:
    """Some of the mesh's axes, but not all; more ranks first. None for meshes that are not searched whole."""
    shape = pricer.mesh.shape
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if len(axes) > SEARCHED_AXES:
        return []
    parts = [part for count in range(1, len(axes)) for part in itertools.combinations(axes, count)]
    return sorted(parts, key=lambda part: -math.prod(shape[axis] for axis in part))


def _least_work(program: Program, pricer: Pricer, axes: tuple[int, ...]) -> float:
    """Seconds that forward and backward take on the ranks of these axes, if they share them evenly."""
    ranks = math.prod(pricer.mesh.shape[axis] for axis in axes)
    return work_seconds(program, pricer)[0] * pricer.mesh.size / ranks


def _copies_on(
    program: Program, pricer: Pricer, axes: tuple[int, ...], seconds: float | None, fold: bool
) -> Plan | None:
    """The best plan without starts that splits nothing on other axes, and of parameters nothing; None if it does not
    fit."""
    free = Pricer(mesh=pricer.mesh, cluster=pricer.cluster, config=pricer.config, start_share=0.0)
    part = Restriction(
        choice=lambda op, axis, name: axis in axes or name == "invariant",
        storage=lambda tensor, storage: not any(isinstance(place, Shard) for place in storage.axes),
    )
    problem = build(program, free, limit=None, fold=fold, restriction=part)
    try:
        solution = solve(problem.graph, relative_gap=COPIES_GAP, seconds=seconds)
    except SearchTimeoutError:
        return None
    plan = extract(problem, solution, pricer.cluster, pricer.config, "search")
    plan = plan.with_estimate(evaluate_program(plan, program, pricer))
    return plan if plan.estimate.peak_nbytes <= memory_limit(pricer.cluster, pricer.config) else None


def _certified(chosen: Estimate, first: Estimate, bound: float, facts: dict[str, Any]) -> Estimate:
    """What the chosen plan costs, with what was searched and proved."""
    own = {key: value for key, value in chosen.solver.items() if key == "recompute"}
    others = {key: value for key, value in first.solver.items() if key != "recompute"}
    return replace(
        chosen,
        bound=min(first.bound, chosen.alone_seconds),
        bound_in_buckets=min(bound, chosen.in_turn_seconds),
        solver={**others, **own, MARK: facts},
    )
