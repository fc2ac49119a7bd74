"""Which plan is best on a mesh within so much memory? Strategy graphs, with recompute where the limit asks for it.

The fastest plan first, as if memory had no limit; if that does not fit the fastest that keeps everything; and if that
is not near, what may be run again joins. Of equal blocks some may then do as one choice says and some as another
(`exact.mixture`): both are handed over, to be mixed by who knows how many blocks there are.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.completion import within
from autopar.search.exact.highs_log import Progress
from autopar.search.exact.ilp import CutoffError, UnderLimit, solve
from autopar.search.exact.limited_bound import least_within
from autopar.search.exact.memory_prices import FIRST_PRICE
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.moments import Share
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.graph.strategy_graph import Ints, Solution, usage
from autopar.values.plan import Plan

GB = 1e9
TRIAL_GAP = 1e-2
"""How exactly the plan without a limit is found that tells whether memory binds."""
LATER = 4
"""Part of the time, one in so many, that is left at least for a search after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A plan, a lower bound in seconds, and what there is to say of the search.

    mixture: a slow plan that fits and a fast one that does not, of which a mixture promises to be near the bound.
    """

    plan: Plan
    bound: float
    facts: dict[str, Any]
    mixture: tuple[Plan, Plan] | None = None


def find_exactly(
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
    mixes: bool = False,
) -> Exact:
    """The best plan within `limit` bytes a device. Arguments and errors as of `planner.plan_program`.

    mixes: a mixture will do as well.
    """
    began = time.perf_counter()

    def show(state: Progress) -> None:
        tell(f"solving ({state.phase}): best {state.incumbent:.4g} s, bound {state.bound:.4g} s, {state.elapsed:.0f} s")

    def left() -> float | None:
        return None if seconds is None else max(seconds - (time.perf_counter() - began), seconds / LATER)

    def solved(
        problem: Problem, least: bool, binds: bool = True, hint: Ints | None = None, below: float = cutoff
    ) -> Solution:
        mixing = mixes and problem is not plain
        try:
            return _solve(problem, limit, relative_gap, left(), show, below, least, binds, hint, prices, mixing)
        except SearchTimeoutError as error:
            if problem is not plain:
                raise
            raise SearchTimeoutError(str(error)) from error  # of plans that run nothing again

    tell("building the strategy graph")
    if cutoff < math.inf:  # a plan is at hand, and most graphs have none better: that takes few relaxations to see
        again = build(program, pricer, limit=limit, fold=fold, builder=RecomputeBuilder, share=share)
        if not is_below:
            bound = least_within(again.graph, cutoff=cutoff, seconds=seconds, prices={} if prices is None else prices)
            if bound == math.inf:
                raise InfeasibleError(f"no plan on mesh {pricer.mesh} fits in {limit / GB:.3g} GB a device")
            if bound >= cutoff:
                raise CutoffError(bound)
    problem = plain = build(program, pricer, limit=limit, fold=fold, share=share)
    built = time.perf_counter()
    free = _unlimited(problem, relative_gap / 2, seconds, cutoff)
    if free is None:
        solution = solved(problem, say_least, binds=False)
    elif within(problem.graph, free.choice, free.arcs):
        solution = free
    elif cutoff < math.inf:
        if prices is not None and not prices:
            prices.update(_guessed_prices(problem, free))
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
                    if (found.seconds if found.mixture is None else found.mixture[2]) <= kept.seconds:
                        problem, kept = again, found
                except CutoffError as error:
                    proved = max(proved, error.bound)
                except (InfeasibleError, SearchTimeoutError):
                    pass
        solution = replace(kept, bound=min(proved, kept.seconds))
    mixture = None
    if solution.mixture is not None:
        slow, fast, _ = solution.mixture
        parts = [extract(problem, one, pricer.cluster, pricer.config, "ilp") for one in (slow, fast)]
        mixture = parts[0], parts[1]
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
    return Exact(plan=plan, bound=solution.bound, facts=facts, mixture=mixture)


def _unlimited(problem: Problem, relative_gap: float, seconds: float | None, cutoff: float) -> Solution | None:
    """The best choice if memory had no limit, None where time is up."""
    graph = replace(problem.graph, memory=None)
    try:
        return solve(graph, relative_gap=relative_gap, seconds=seconds, cutoff=cutoff)
    except SearchTimeoutError:
        return None


def _guessed_prices(problem: Problem, free: Solution) -> dict[int, float]:
    """Of memory, in seconds a byte, where the fastest choice holds most."""
    memory = problem.graph.memory
    assert memory is not None
    fullest = int(usage(problem.graph, free.choice, free.arcs).argmax())
    return {memory.moments[fullest]: FIRST_PRICE * free.seconds / memory.limit}


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
    mixes: bool,
) -> Solution:
    try:
        return solve(
            problem.graph,
            relative_gap=relative_gap,
            seconds=seconds,
            hint=hint,
            on_progress=show,
            cutoff=cutoff,
            under=UnderLimit(binds=binds, say_least=say_least, prices=prices, mixes=mixes),
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


def _sizes(problem: Problem) -> Mapping[str, Any]:
    graph = problem.graph
    return {
        "nodes": len(graph.nodes),
        "options": sum(len(node.seconds) for node in graph.nodes),
        "arcs": sum(len(group.arc_seconds) for group in graph.groups),
    }
