"""Where nothing fits: what is the least limit that would do? Bisection, each half proved or reached by the search.

Without costs a choice that fits is a best one, so that a search ends as soon as it finds one; and where its bound is
above zero none is to be found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, usage

RELATIVE = 1e-9
"""Of a limit that is no whole number: how closely it is found."""

Fitting = Callable[[Pairwise, float], Ints]
"""problem, seconds -> a choice that fits; InfeasibleError if it is proved that none does, SearchTimeoutError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """`reached` bytes do, `refuted` do not; both proved. Nothing in between was decided, usually there is nothing."""

    refuted: float
    reached: float

    @property
    def proved(self) -> bool:
        """Whether `reached` is the least that does."""
        return self.refuted >= below(self.reached)


def below(nbytes: float) -> float:
    """The next limit below: a byte less, or a rounding."""
    return nbytes - 1.0 if nbytes == np.floor(nbytes) else nbytes * (1.0 - RELATIVE)


def least_memory(problem: Pairwise, fitting: Fitting, *, refuted: float, seconds: float) -> LeastMemory:
    """The least limit under which some choice is allowed and fits; that none does under `refuted` is proved.

    Raises:
        InfeasibleError: if none is allowed under any limit.
        SearchTimeoutError: if not even one without a limit was found.
    """
    stop = monotonic() + seconds
    free = replace(problem, cost=_free(problem.cost), pair_cost=_free(problem.pair_cost))

    def left() -> float:
        return max(stop - monotonic(), 0.01)

    reached = float(usage(problem, fitting(replace(free, limit=np.inf), left())).max())
    whole = not (problem.usage % 1.0).any() and not (problem.base % 1.0).any()
    while refuted < below(reached) and monotonic() < stop:
        middle = (refuted + reached) / 2.0
        middle = min(np.floor(middle) if whole else middle, below(reached))
        try:
            choice = fitting(replace(free, limit=max(middle, refuted)), left())
        except InfeasibleError:
            refuted = middle
        except SearchTimeoutError:
            break
        else:
            reached = float(usage(problem, choice).max())
    return LeastMemory(refuted=refuted, reached=reached)


def _free(costs: Floats) -> Floats:
    return np.where(np.isfinite(costs), 0.0, np.inf)
