"""Given the cost of a choice, what is left to decide? Closing and reducing by turns, until neither finds anything.

Options and pairs that have more left over than a better choice may waste are closed (reduced-cost fixing). What is
closed makes edges into functions and options into the only ones, which the exact reductions take out; on the smaller
graph the bound climbs higher, and closes more. A choice of the last graph is, lifted, one of the first; every choice of
the first that costs less than `upper` is among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.messages import EPS
from autopar.search.pairwise.problem import Ints, Pairwise
from autopar.search.pairwise.reduce.pipeline import Reduced, reduce

SHRINK = 0.9
"""Of the nodes: what a turn must leave at most for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tightened:
    """`dual` is the bound on what `steps` reduced the first graph to; costs there are lower by `offset`.

    `dual` is None where nothing is left to decide: then `choice`, one of the first graph, is the best of those below
    the upper cost, if it fits and costs less; None if there is none.
    """

    steps: tuple[Reduced, ...]
    offset: float
    dual: DualBound | None
    choice: Ints | None = None

    def lift(self, choice: Ints) -> Ints:
        """The first graph's choice."""
        for step in reversed(self.steps):
            choice = step.lift(choice)
        return choice


def closed(dual: DualBound) -> Pairwise:
    """The problem without options and pairs of which no choice that beats the dual's `upper` can be made."""
    left, problem = dual.remainder(), dual.problem
    return replace(
        problem,
        cost=np.where(left.option == np.inf, np.inf, problem.cost),
        pair_cost=np.where(left.pair == np.inf, np.inf, problem.pair_cost),
    )


def tighten(dual: DualBound, climb: Callable[[DualBound, float], None], *, seconds: float | None = None) -> Tightened:
    """Close and reduce by turns; `climb(dual, offset)` raises the bound of each smaller graph as far as time allows.

    `dual.upper` must be the cost of a choice that is known. `seconds` are for each reduction.
    """
    steps: list[Reduced] = []
    offset = 0.0
    while True:
        problem = closed(dual)
        try:
            step = reduce(problem, seconds=seconds)
        except InfeasibleError:
            return Tightened(steps=tuple(steps), offset=offset, dual=None)
        steps.append(step)
        offset += step.offset
        if not step.problem.num_nodes:
            nothing = np.zeros(0, np.int64)
            done = Tightened(steps=tuple(steps), offset=offset, dual=None)
            return replace(done, choice=done.lift(nothing))
        smaller = DualBound(step.problem, upper=dual.upper - step.offset)
        smaller.raise_bound(dual.bound - step.offset - 4.0 * EPS * (abs(dual.bound) + abs(step.offset)))
        climb(smaller, offset)
        if smaller.closed:
            return Tightened(steps=tuple(steps), offset=offset, dual=None)
        if step.problem.num_nodes > SHRINK * dual.problem.num_nodes:
            return Tightened(steps=tuple(steps), offset=offset, dual=smaller)
        dual = smaller
