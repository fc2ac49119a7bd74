"""Which plan is best on a mesh within so much memory? Strategy graphs, with recompute where the limit asks for it.

The fastest plan first, as if memory had no limit; if that does not fit the fastest that keeps everything; and if that
is not near, what may be run again joins. Of equal blocks some may then do as one choice says and some as another
(`exact.mixture`): both are handed over, to be mixed by who knows how many blocks there are.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.completion import within
from autopar.search.exact.highs_log import Progress
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.exact.limited_bound import least_within
from autopar.search.exact.memory_prices import FIRST_PRICE
from autopar.search.exact.under_limit import UnderLimit
from autopar.search.fitting import does_not_fit
from autopar.search.graph.build import Builder, build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.first_builder import first_builder
from autopar.search.graph.moments import Counting, Share
from autopar.search.graph.options import Restriction
from autopar.search.graph.problem import Problem
from autopar.search.graph.strategy_graph import Ints, Solution, usage
from autopar.search.search_options import LATER, SearchAim, SearchOptions
from autopar.values.gigabytes import gigabytes
from autopar.values.search_report import SolvedGraph
from autopar.values.stage_plan import StagePlan

TRIAL_GAP = 1e-2
"""How exactly the plan without a limit is found that tells whether memory binds."""
EXACT = "ilp"
"""The method, and where its plans come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A plan, the seconds that the strategy graph counts of it, a lower bound on those of any, and that graph.

    counted_nbytes: what the strategy graph counts at the plan's peak.
    mixture: a slow plan that fits and a fast one that does not, of which a mixture promises to be near the bound.
    """

    plan: StagePlan
    seconds: float
    bound: float
    solved: SolvedGraph
    counted_nbytes: float
    mixture: tuple[StagePlan, StagePlan] | None = None


def find_exactly(
    program: Program,
    pricer: Pricer,
    limit: float,
    options: SearchOptions,
    asked: SearchAim,
    *,
    share: Share | None = None,
    mixes: bool = False,
) -> Exact:
    """The best plan within `limit` bytes a device.

    share: of a pipeline rank, whose memory is limited instead of the whole model's.
    mixes: a mixture of two plans that promises to be near enough will do as well.

    Raises:
        InfeasibleError: if no plan meets the memory limit.
        CutoffError: if it is proved that no plan is below the cutoff.
    """
    search = _Search(program, pricer, limit, options, asked, share, mixes)
    began = time.perf_counter()
    options.tell("building the strategy graph")
    if asked.cutoff < math.inf:  # a plan is known, and most graphs have none better: that takes few relaxations to see
        search.check_cutoff()
    plain = search.problem(search.first)
    built = time.perf_counter()
    problem, solution = search.solved(plain)
    mixture = None
    if solution.mixture is not None:
        slow, fast, _ = solution.mixture
        parts = [extract(problem, one, pricer.cluster, pricer.config, EXACT) for one in (slow, fast)]
        mixture = parts[0], parts[1]
    solved_at = time.perf_counter()
    graph = problem.graph
    solved = SolvedGraph(
        method=EXACT,
        status=solution.status,
        nodes=len(graph.nodes),
        options=sum(len(node.seconds) for node in graph.nodes),
        arcs=sum(len(group.arc_seconds) for group in graph.groups),
        build_seconds=built - began,
        solve_seconds=solved_at - built,
    )
    return Exact(
        plan=extract(problem, solution, pricer.cluster, pricer.config, EXACT),
        seconds=solution.seconds,
        bound=solution.bound,
        solved=solved,
        counted_nbytes=float(usage(graph, solution.choice, solution.arcs).max()),
        mixture=mixture,
    )


@dataclass(slots=True)
class _Search:
    """The solves of one call of `find_exactly`, in the time that is given to all of them."""

    program: Program
    pricer: Pricer
    limit: float
    options: SearchOptions
    asked: SearchAim
    share: Share | None
    mixes: bool
    began: float = field(default_factory=time.perf_counter)
    _problems: dict[type[Builder], Problem] = field(default_factory=dict)

    def problem(self, builder: type[Builder]) -> Problem:
        """The strategy graph, with recompute or without."""
        if builder not in self._problems:
            self._problems[builder] = build(
                self.program,
                self.pricer,
                limit=self.limit,
                fold=self.options.fold,
                builder=builder,
                counted=Counting(share=self.share),
            )
        return self._problems[builder]

    @property
    def first(self) -> type[Builder]:
        return first_builder(self.program, self.pricer)

    def check_cutoff(self) -> None:
        """Raises InfeasibleError or CutoffError where relaxations show that no plan fits, or is below the cutoff."""
        graph = self.problem(RecomputeBuilder).graph
        if self.asked.is_below:
            return
        cutoff, prices = self.asked.cutoff, self.asked.prices
        bound = least_within(graph, cutoff=cutoff, seconds=self.options.seconds, prices=prices)
        if bound == math.inf:
            raise InfeasibleError(f"no plan on mesh {self.pricer.mesh} fits in {gigabytes(self.limit)} GB a device")
        if bound >= cutoff:
            raise CutoffError(bound)

    def solved(self, plain: Problem) -> tuple[Problem, Solution]:
        """The best choice, and the strategy graph that it is one of."""
        asked, gap = self.asked, self.options.relative_gap
        free = _unlimited(plain, gap / 2, self.options.seconds, asked.cutoff)
        if free is None:
            return plain, self._solve(plain, asked, binds=False)
        if within(plain.graph, free.choice, free.arcs):
            return plain, free
        if self.first is RecomputeBuilder:
            return plain, self._solve(plain, asked)
        if asked.cutoff < math.inf:
            if not asked.prices:
                asked.prices.update(_guessed_prices(plain, free))
            again = self.problem(RecomputeBuilder)
            return again, self._solve(again, asked)
        # To run something again only adds seconds: a plan that keeps everything near the bound without a limit will do.
        near, kept = free.bound / (1 - gap), None
        if least_within(plain.graph, cutoff=near, seconds=self._left(), prices=asked.prices) < near:
            kept = _attempt(lambda: self._solve(plain, replace(asked, says_least=False), hint=free.choice))
        if kept is not None and kept.seconds <= near:
            return plain, replace(kept, bound=min(free.bound, kept.seconds))
        self.options.tell("the memory limit binds: adding recompute to the strategy graph")
        return self._recomputing(plain, kept, free.bound)

    def _recomputing(self, plain: Problem, kept: Solution | None, proved: float) -> tuple[Problem, Solution]:
        """The best choice where ops may run again, or `kept`, of the graph without; proved: a bound known before."""
        again = self.problem(RecomputeBuilder)
        if kept is None:
            found = self._solve(again, self.asked)
            return again, replace(found, bound=min(max(proved, found.bound), found.seconds))
        problem, best = plain, kept
        below = min(self.asked.cutoff, kept.seconds * (1 - self.options.relative_gap))
        try:
            found = self._solve(again, replace(self.asked, cutoff=below, says_least=False))
            proved = max(proved, found.bound)
            if (found.seconds if found.mixture is None else found.mixture[2]) <= kept.seconds:
                problem, best = again, found
        except CutoffError as error:
            proved = max(proved, error.bound)
        except (InfeasibleError, SearchTimeoutError):
            pass
        return problem, replace(best, bound=min(proved, best.seconds))

    def _solve(self, problem: Problem, asked: SearchAim, *, binds: bool = True, hint: Ints | None = None) -> Solution:
        """binds: what is cheapest without the limit is known not to fit. hint: a choice to start from."""
        is_plain = problem is self._problems.get(Builder)
        try:
            return solve(
                problem.graph,
                relative_gap=self.options.relative_gap,
                seconds=self._left(),
                hint=hint,
                on_progress=self._show,
                cutoff=asked.cutoff,
                under=UnderLimit(
                    binds=binds, say_least=asked.says_least, prices=asked.prices, mixes=self.mixes and not is_plain
                ),
            )
        except InfeasibleError as error:
            if error.least_nbytes is None:
                raise
            said = does_not_fit(f"on mesh {self.pricer.mesh}", self.limit, error.least_nbytes)
            raise InfeasibleError(said, least_nbytes=error.least_nbytes) from error
        except SearchTimeoutError as error:
            if not is_plain:
                raise
            raise SearchTimeoutError(str(error)) from error  # its bound is one of plans that run nothing again

    def _left(self) -> float | None:
        seconds = self.options.seconds
        return None if seconds is None else max(seconds - (time.perf_counter() - self.began), seconds / LATER)

    def _show(self, state: Progress) -> None:
        best, bound = f"best {state.incumbent:.4g} s", f"bound {state.bound:.4g} s"
        self.options.tell(f"solving ({state.phase}): {best}, {bound}, {state.elapsed:.0f} s")


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
    seconds: float | None = None,
) -> Problem:
    """The strategy graph; with recomputed options where the fastest plan that keeps everything does not fit."""
    first = first_builder(program, pricer)
    problem = build(program, pricer, limit=limit, restriction=restriction, builder=first)
    graph = problem.graph
    try:
        fastest = solve(replace(graph, memory=None), relative_gap=TRIAL_GAP, seconds=seconds)
    except SearchTimeoutError:
        return problem
    if within(graph, fastest.choice, fastest.arcs):
        return problem
    return build(program, pricer, limit=limit, restriction=restriction, builder=RecomputeBuilder)
