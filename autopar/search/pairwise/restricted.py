"""Which choice is provably the best? A mixed program over the options and pairs that matter, more until all do.

Options and pairs that cost at most (1 + delta) * bound are open as far as what is left over of them tells, delta =
0.1%, 0.3%, 1%, 3%, ...: every other choice costs more than that threshold. If the best of the open ones costs no more
either, it is optimal; if none costs as little, the threshold is a bound, and the next one is tried. Memory rows join as
relaxations, then choices, are seen to violate them. Proofs are HiGHS's, good to 1e-6 of what lies between bound and
threshold.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.bound import DualBound, Remainder
from autopar.search.pairwise.problem import Ints, evaluate, fits, usage
from autopar.search.pairwise.transport import Transport

_LADDER = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, np.inf)
_UNITS = 1e3  # of cost between bound and threshold: HiGHS works to 1e-6 of one
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """`choice`: the cheapest found that beats `upper`, None if none. `bound`: no choice that fits costs less, or less
    than `upper`; where it meets `cost`, the optimum is proved, and inf says that nothing fits."""

    choice: Ints | None
    cost: float
    bound: float

    @property
    def optimal(self) -> bool:
        return self.bound >= self.cost


def first_rung(dual: DualBound) -> int:
    """Open pairs of the smallest of the ladder's programs: how large is it?"""
    left = dual.remainder()
    return 0 if dual.closed else int((left.pair <= _threshold(dual, _LADDER[0]) - left.proved).sum())


def _threshold(dual: DualBound, delta: float) -> float:
    return min(dual.bound + delta * max(abs(dual.bound), 1e-6 * abs(dual.most)), dual.most)


def solve_restricted(
    dual: DualBound,
    *,
    seconds: float | None = None,
    on_progress: Callable[[float, float], None] | None = None,
    worker: Worker | None = None,
) -> Outcome:
    """Climb the ladder until the optimum is proved or time is up; the dual's `upper` and `bound` follow.

    With a time limit HiGHS runs in a process of its own (the `worker`'s, which stays); a limit that it overruns costs
    what it was at, not more time.
    """
    stop = np.inf if seconds is None else monotonic() + seconds
    best: Ints | None = None
    with nullcontext(worker) if worker is not None else Worker() as worker:
        for delta in _LADDER:
            if dual.closed or monotonic() >= stop:
                break
            left = dual.remainder()
            if dual.closed:
                break
            threshold = _threshold(dual, delta)
            choice, proved = best_open(dual, left, threshold, worker, stop)
            if choice is not None:
                best = choice
                dual.lower_upper(evaluate(dual.problem, choice))
            dual.raise_bound(min(proved, threshold) if threshold < dual.most else proved)
            if on_progress is not None:
                on_progress(dual.upper, dual.bound)
    return Outcome(choice=best, cost=dual.upper, bound=dual.bound)


def best_open(
    dual: DualBound, left: Remainder, threshold: float, worker: Worker, stop: float, relative_gap: float = 0.0
) -> tuple[Ints | None, float]:
    """The cheapest choice open at a threshold, where it fits and beats `upper`, and what every open one costs at least.

    relative_gap: of what lies between bound and threshold, where the program may stop.
    """
    problem, first = dual.problem, dual.problem.first_option[:-1]
    unit = max((threshold - dual.bound) / _UNITS, 1e-10 * abs(dual.bound), 1e-10 * abs(threshold)) or 1.0
    spare = threshold - left.proved
    transport = Transport(problem, left, left.option <= spare, left.pair <= spare, unit)
    if not np.logical_or.reduceat(transport.open_option, first).all():
        return None, np.inf
    relaxed, proved, most = True, -np.inf, (threshold - transport.fixed) / unit + _TOLERANCE * _UNITS
    while (seconds := stop - monotonic()) > 0.0:
        # A choice above the threshold proves nothing; to look for none is several times quicker.
        answer = worker.solve(
            transport.model,
            seconds=seconds,
            relaxed=relaxed,
            cutoff=None if relaxed else most,
            relative_gap=relative_gap,
        )
        if answer is None or answer.infeasible:
            return None, proved if answer is None else np.inf
        if not relaxed:
            proved = max(proved, transport.fixed + (answer.bound - _TOLERANCE * _UNITS) * unit)
        if answer.values is None:
            return None, proved
        if relaxed:
            missing = transport.violated(transport.usage_of(answer.values), by=_TOLERANCE)
            relaxed = bool(len(missing))
        else:
            choice = transport.choice(answer.values)
            cost = evaluate(problem, choice)
            if fits(problem, choice):
                proved = cost if answer.optimal and not relative_gap else proved
                return (choice if cost < dual.upper else None), proved
            if not answer.optimal:
                return None, proved
            missing = transport.violated(usage(problem, choice), by=0.0)
            if not len(missing):
                # Over the limit by less than HiGHS sees.
                transport.forbid(choice)
        transport.add_times(missing)
    return None, proved
