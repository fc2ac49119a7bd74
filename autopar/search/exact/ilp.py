"""Which solution of a strategy graph is cheapest, and how far can any other be below it? HiGHS on the mixed program.

1. Without the memory limit first: a smaller program, and where its optimum fits it is the optimum.
2. The relaxation (`relaxation`); it is nearly integral, so that rounding gives an incumbent of cost U and, with z its
   optimum, any solution that uses an option or arc of reduced cost d costs at least z + d. What cannot beat U by the
   gap goes.
3. The mixed program on the rest. Its solution is completed with exact arcs; where continuous arcs made it look cheaper
   than it is, the arcs of those groups become binary and it is solved again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.search.exact.completion import Completed, better, complete, lean, loose_groups, within
from autopar.search.exact.formulation import formulate
from autopar.search.exact.highs_log import Progress, progress_of
from autopar.search.exact.least_peak import least_peak
from autopar.search.exact.memory_prices import Goal, Plane, ascend, plane, remember, remembered
from autopar.search.exact.mixture import Mixture, Seen
from autopar.search.exact.priced_memory import original_arcs, priced
from autopar.search.exact.reduction import reduce
from autopar.search.exact.relaxation import floor, incompatible, relax
from autopar.search.exact.steiner import Metric, metric
from autopar.search.exact.under_limit import UnderLimit
from autopar.search.graph.strategy_graph import Floats, Ints, Solution, StrategyGraph, evaluate, usage
from autopar.values.gigabytes import gigabytes, least_gigabytes

GIGA = 1e9
TOLERANCE = 1e-7
"""The relative gap below which HiGHS's own tolerances forbid to look."""
FIRST_SLACK = 0.01
"""How much reduced cost, as a part of the relaxation's optimum, the first program admits."""
ROUNDS = 30
"""How often a program is solved again with binary arcs or a tighter limit before what was found is returned."""


def solve(
    graph: StrategyGraph,
    *,
    relative_gap: float = 1e-3,
    seconds: float | None = None,
    hint: ArrayLike | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cutoff: float = np.inf,
    under: UnderLimit | None = None,
) -> Solution:
    """The cheapest choice within the memory limit, proved to `relative_gap`, or the best found in `seconds`.

    `cutoff`: a solution of so many seconds or more is of no use; once it is proved that there is no other, stop.
    `hint`: a choice (one option a node) to start from. `on_progress` is told incumbent and bound as they improve.

    Raises InfeasibleError when no choice is compatible, or when none fits the limit (then with `least_nbytes`),
    SearchTimeoutError when `seconds` end before anything is found, and CutoffError where the cutoff is reached.
    """
    started = time.monotonic()
    deadline = None if seconds is None else started + seconds
    under = UnderLimit() if under is None else under
    run = _Run(
        relative_gap=relative_gap,
        started=started,
        deadline=deadline,
        report=on_progress,
        cutoff=cutoff,
        prices={} if under.prices is None else under.prices,
        mixes=under.mixes,
    )
    hints = [] if hint is None else [np.asarray(hint, np.int64)]
    lower = -np.inf
    if graph.memory is not None and not under.binds:
        free = run.optimise(replace(graph, memory=None), hints, phase="without limit")
        if free.infeasible:
            raise incompatible()
        lower = free.bound
        if free.best is not None:
            hints.append(free.best.choice)
            if within(graph, free.best.choice, free.best.arcs):
                return run.solution(graph, free)
    found = run.optimise(graph, hints, phase="within limit" if graph.memory is not None else "program")
    found = replace(found, bound=max(found.bound, lower))
    if found.best is not None:
        return run.solution(graph, found)
    if found.infeasible:
        raise incompatible() if graph.memory is None else _infeasible(graph, run, under.say_least)
    raise SearchTimeoutError(
        f"no solution was found in {seconds:g} s (lower bound {found.bound:.6g} s); give more time or a hint",
        bound=found.bound,
    )


class CutoffError(Exception):
    """No solution is below the cutoff; `bound` seconds are proved."""

    def __init__(self, bound: float) -> None:
        super().__init__(bound)
        self.bound = bound

    def __str__(self) -> str:
        return f"every solution takes {self.bound:.6g} s or more"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """`best` lives in the graph that was given to `optimise`; `infeasible` where it is proved that nothing fits."""

    best: Completed | None
    bound: float
    infeasible: bool = False
    mixture: Mixture | None = None


@dataclass(slots=True, kw_only=True)
class _Run:
    """What all programs of one call share: tolerances, the clock, and the seconds that each phase took."""

    relative_gap: float
    started: float
    deadline: float | None
    report: Callable[[Progress], None] | None
    cutoff: float = np.inf
    prices: dict[int, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    mixes: bool = False
    mixture: Mixture | None = None
    """Of the choices met by prices of memory, in the graph at hand."""

    def left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    def over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def proved(self, best: Completed | None, bound: float) -> bool:
        return best is not None and best.seconds - bound <= max(self.relative_gap, TOLERANCE) * abs(best.seconds)

    def solution(self, graph: StrategyGraph, outcome: _Outcome) -> Solution:
        best = outcome.best
        assert best is not None
        seconds = evaluate(graph, best.choice, best.arcs)
        pair = None
        if (both := outcome.mixture) is not None:
            pair = both.slow.solution(outcome.bound), both.fast.solution(outcome.bound), both.seconds
        return Solution(
            choice=best.choice,
            arcs=best.arcs,
            seconds=seconds,
            bound=min(outcome.bound, seconds),
            status="optimal" if self.proved(best, outcome.bound) else "time limit",
            phases=dict(self.phases),
            mixture=pair,
        )

    def optimise(self, graph: StrategyGraph, hints: Sequence[Ints], *, phase: str) -> _Outcome:
        """Relaxation, rounding, fixing, program; InfeasibleError when no choice is compatible."""
        started = time.monotonic()
        reduced = reduce(graph, replaces_arcs=graph.memory is not None)
        small = reduced.graph
        metrics = [metric(group) for group in small.groups]
        started = self._passed(phase, "reduction", started)
        starts = [lowered for hint in hints if (lowered := reduced.lower(hint)) is not None]
        search = self._free if small.memory is None else self._limited
        best, bound = search(small, metrics, starts, phase, started)
        if best is None and bound == np.inf:
            return _Outcome(best=None, bound=np.inf, infeasible=True)

        def lifted(found: Completed) -> Completed:
            choice, arcs = reduced.lift(found.choice, found.arcs)
            return replace(found, choice=choice, arcs=arcs)

        mixture = None if self.mixture is None else self.mixture.lifted(lifted)
        return _Outcome(best=None if best is None else lifted(best), bound=bound, mixture=mixture)

    def _free(
        self, graph: StrategyGraph, metrics: Sequence[Metric], starts: list[Ints], phase: str, started: float
    ) -> tuple[Completed | None, float]:
        """Without a limit: (best, bound), and bound inf where no choice is compatible."""
        try:
            relaxed = relax(graph, enough=self.cutoff, seconds=self.left())
        except InfeasibleError:
            return None, np.inf
        started = self._passed(phase, "relaxation", started)
        bound = relaxed.bound
        if bound >= self.cutoff:
            raise CutoffError(bound)
        best: Completed | None = None
        for start in [*starts, *relaxed.choices]:
            best = better(best, complete(graph, metrics, start))
        started = self._passed(phase, "rounding", started)
        self._stands(phase, best, bound)
        if not self.proved(best, bound) and not self.over():
            if relaxed.extra is None:
                found, proved = self._program(graph, metrics, phase=phase)
                best, bound = better(best, found), max(bound, proved)
            else:
                best, bound = self._widen(graph, bound, relaxed.extra, best, phase=phase)
            self._passed(phase, "program", started)
        return best, bound

    def _limited(
        self, graph: StrategyGraph, metrics: Sequence[Metric], starts: list[Ints], phase: str, started: float
    ) -> tuple[Completed | None, float]:
        """Within the limit: by prices of memory, then the mixed program of what these do not rule out."""
        assert graph.memory is not None
        best: Completed | None = None
        bound, seen = floor(graph), Seen(mixes=self.mixes)

        def met(choice: Ints) -> None:
            nonlocal best
            if (found := complete(graph, metrics, choice)) is not None:
                best = better(best, found)
                seen.add(found, plane(graph, found.choice, found.arcs)[1])
            self._stands(phase, best, bound)

        own = replace(self, relative_gap=self.relative_gap / 4, report=None, cutoff=np.inf, phases={}, mixes=False)

        def solved(cheap: StrategyGraph, _prices: Floats, _end: float) -> tuple[Plane | None, float]:
            found = own.optimise(cheap, [], phase="priced")
            if found.best is None:
                return None, found.bound
            met(found.best.choice)
            arcs = original_arcs(graph, found.best.arcs)
            made = plane(graph, found.best.choice, arcs)
            seen.add(
                Completed(choice=found.best.choice, arcs=arcs, seconds=made[0], fits=not (made[1] > 0).any()), made[1]
            )
            return made, found.bound

        planes = []
        for start in starts:
            met(start)
            if (whole := complete(replace(graph, memory=None), metrics, start)) is not None:
                planes.append(plane(graph, whole.choice, whole.arcs))
        goal = Goal(
            best=lambda: min(np.inf if best is None else best.seconds, seen.seconds(self.relative_gap)),
            relative_gap=self.relative_gap,
            over=self.over,
            cutoff=self.cutoff,
        )
        ascent = ascend(graph, solved, goal, planes=planes, start=remembered(self.prices, graph.memory.moments))
        remember(self.prices, graph.memory.moments, ascent)
        started = self._passed(phase, "prices", started)
        bound = max(bound, ascent.bound)
        if bound == np.inf:
            return None, np.inf
        if bound >= self.cutoff:
            raise CutoffError(bound)
        self._stands(phase, best, bound)
        mixture = None if self.proved(best, bound) else seen.best()
        if mixture is not None and mixture.seconds - bound <= self.relative_gap * abs(mixture.seconds):
            self.mixture = mixture
            return better(best, mixture.slow), bound
        if not self.proved(best, bound) and not self.over():
            relaxed = relax(priced(graph, ascent.prices), seconds=self.left())
            if relaxed.extra is None:
                found, proved = self._program(graph, metrics, phase=phase, prices=ascent.prices)
                best, bound = better(best, found), max(bound, proved)
            else:
                options, arcs = relaxed.extra
                arcs = [part[: len(group.arc_seconds)] for part, group in zip(arcs, graph.groups, strict=True)]
                least = relaxed.bound + float(ascent.prices @ (graph.memory.base - graph.memory.limit))
                best, proved = self._widen(graph, least, (options, arcs), best, phase=phase, prices=ascent.prices)
                bound = max(bound, proved)
            self._passed(phase, "program", started)
        return best, bound

    def _widen(
        self,
        graph: StrategyGraph,
        relaxed: float,
        extra: tuple[list[Floats], list[Floats]],
        best: Completed | None,
        *,
        phase: str,
        prices: Floats | None = None,
    ) -> tuple[Completed | None, float]:
        """Programs of options and arcs with at most `slack` of reduced cost; what they leave out costs more than
        relaxed + slack. Wider until that proves the best found; (best, bound), and bound inf where nothing fits."""
        bound = relaxed
        slack = FIRST_SLACK * max(abs(relaxed), 1e-12)
        while True:
            if best is not None:
                slack = min(slack, best.seconds - relaxed)
            masks = [[part <= slack for part in parts] for parts in extra]
            whole = all(mask.all() for parts in masks for mask in parts)
            try:
                rest = reduce(graph, options=masks[0], arcs=masks[1])
            except InfeasibleError:
                proved = np.inf
            else:
                metrics = [metric(group) for group in rest.graph.groups]
                found, proved = self._program(rest.graph, metrics, phase=phase, prices=prices)
                if found is not None:
                    choice, arcs = rest.lift(found.choice, found.arcs)
                    best = better(best, replace(found, choice=choice, arcs=arcs))
            bound = max(bound, proved if whole else min(proved, relaxed + slack))
            if best is not None and relaxed + slack >= best.seconds:
                bound = max(bound, min(proved, best.seconds))
            self._stands(phase, best, bound)
            if whole or self.proved(best, bound) or self.over():
                return best, bound
            if best is None:
                slack *= 4
            elif slack < best.seconds - relaxed:
                slack = best.seconds - relaxed
            else:
                return best, bound

    def _program(
        self, graph: StrategyGraph, metrics: Sequence[Metric], *, phase: str, prices: Floats | None = None
    ) -> tuple[Completed | None, float]:
        """The mixed program, until what it finds costs what it says; (best, bound), and bound inf if nothing fits.

        prices: of memory, by which arcs are chosen where those found do not fit."""
        best: Completed | None = None
        bound = floor(graph)
        integral: set[int] = set()
        limit_at_first = None if graph.memory is None else graph.memory.limit
        tried = graph
        for _ in range(ROUNDS):
            program = formulate(tried, integral_groups=integral)

            def on_message(
                lines: Sequence[str],
                scale: float = program.scale,
                before: float = time.monotonic() - self.started,
            ) -> None:
                if self.report is not None and (progress := progress_of(lines, phase, scale)) is not None:
                    self.report(replace(progress, elapsed=before + progress.elapsed))

            answer = program.model.solve(
                relative_gap=self.relative_gap / 2,
                seconds=self.left(),
                on_message=on_message if self.report is not None else None,
            )
            untouched = tried is graph
            if answer.infeasible:
                return best, (np.inf if untouched else bound)
            if untouched:
                bound = max(bound, answer.bound / program.scale)
            if answer.values is None:
                break
            choice = program.choice(answer.values)
            proposed = [np.flatnonzero(answer.values[columns] > 0.5) for columns in program.arcs]
            found = complete(graph, metrics, choice, proposed)
            best = better(best, found)
            if prices is not None and found is not None and not found.fits:
                best = better(best, lean(graph, metrics, choice, prices))
            if self.proved(best, bound) or self.over():
                break
            loose = loose_groups(graph, program, answer.values, found) - integral
            if loose:
                integral |= loose
            elif found is None or not found.fits:
                assert graph.memory is not None and tried.memory is not None and limit_at_first is not None
                excess = abs(limit_at_first) * 1e-9
                if found is not None:
                    excess = max(excess, float(usage(graph, found.choice, found.arcs).max() - limit_at_first))
                tried = replace(tried, memory=replace(tried.memory, limit=tried.memory.limit - excess))
            else:
                break
        return best, bound

    def _stands(self, phase: str, best: Completed | None, bound: float) -> None:
        if self.report is not None:
            incumbent = np.inf if best is None else best.seconds
            elapsed = time.monotonic() - self.started
            self.report(Progress(phase=phase, incumbent=incumbent, bound=min(bound, incumbent), elapsed=elapsed))

    def _passed(self, phase: str, step: str, since: float) -> float:
        now = time.monotonic()
        name = f"{phase}: {step}"
        self.phases[name] = self.phases.get(name, 0.0) + now - since
        return now


def _infeasible(graph: StrategyGraph, run: _Run, say_least: bool) -> InfeasibleError:
    memory = graph.memory
    assert memory is not None
    asked = f"no choice fits the memory limit of {gigabytes(memory.limit)} GB"
    if not say_least:
        return InfeasibleError(asked)
    least = least_peak(graph, seconds=run.left())
    if least is None:
        return InfeasibleError(f"{asked}; the time ended before the least that would do was found; allow more memory")
    return InfeasibleError(f"{asked}; the least that would do is {least_gigabytes(least)} GB", least_nbytes=least)
