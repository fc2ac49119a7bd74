"""Which choice is provably the best? A mixed program over the options and pairs that matter, more until all do.

Options and pairs with a floor at most (1 + delta) * bound are open, delta = 0.1%, 0.3%, 1%, 3%, ...: every other choice
costs more than that threshold. If the best of the open ones costs no more either, it is optimal; if none costs as
little, the threshold is a bound, and the next one is tried. Memory rows join as relaxations, then choices, are seen to
violate them. Proofs are HiGHS's, good to 1e-6 of what lies between bound and threshold.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autopar.search.exact.array_model import Answer
from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.bound import DualBound, Floors
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
    floors = dual.floors()
    return 0 if dual.closed else int((floors.pair <= _threshold(dual, _LADDER[0])).sum())


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
            floors = dual.floors()
            if dual.closed:
                break
            threshold = _threshold(dual, delta)
            choice, proved = _solve(dual, floors, threshold, worker, stop)
            if choice is not None:
                best = choice
                dual.lower_upper(evaluate(dual.problem, choice))
            dual.raise_bound(min(proved, threshold) if threshold < dual.most else proved)
            if on_progress is not None:
                on_progress(dual.upper, dual.bound)
    return Outcome(choice=best, cost=dual.upper, bound=dual.bound)


def _solve(dual: DualBound, floors: Floors, threshold: float, worker: Worker, stop: float) -> tuple[Ints | None, float]:
    """The cheapest open choice, where it fits and beats `upper`, and what every open choice costs at least."""
    problem = dual.problem
    unit = max((threshold - dual.bound) / _UNITS, 1e-10 * abs(dual.bound), 1e-10 * abs(threshold)) or 1.0
    open_option, open_pair = floors.option <= threshold, floors.pair <= threshold
    if not np.logical_or.reduceat(open_option, problem.first_option[:-1]).all():
        return None, np.inf
    transport = Transport(problem, dual.remainder(), open_option, open_pair, unit)
    if not np.logical_or.reduceat(transport.open_option, problem.first_option[:-1]).all():
        return None, np.inf
    relaxed, proved = True, -np.inf
    while True:
        answer = _answer(transport, relaxed, (threshold - transport.fixed) / unit, worker, stop)
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
                proved = cost if answer.optimal else proved
                return (choice if cost < dual.upper else None), proved
            if not answer.optimal:
                return None, proved
            missing = transport.violated(usage(problem, choice), by=0.0)
            if not len(missing):
                # Over the limit by less than HiGHS sees.
                transport.forbid(choice)
        transport.add_times(missing)


def _answer(transport: Transport, relaxed: bool, cutoff: float, worker: Worker, stop: float) -> Answer | None:
    # A choice above the threshold proves nothing; to look for none is several times quicker.
    most = None if relaxed else cutoff + _TOLERANCE * _UNITS
    if stop == np.inf:
        return transport.model.solve(relaxed=relaxed, cutoff=most)
    left = stop - monotonic()
    return worker.solve(transport.model, seconds=left, relaxed=relaxed, cutoff=most) if left > 0.0 else None
