"""How is a search done, whatever it searches? One value that every search is given."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SOLVERS = ("auto", "ilp", "double-recursive")


Tell = Callable[[str], None]
"""Is told, in words, what is being done."""


def silent(_: str) -> None:
    """Tell nobody."""


LATER = 4
"""Part of the time, one in so many, that is left at least for a search after the first: one that is given none finds
nothing. With twice as many what begins late is given up sooner."""


@dataclass(frozen=True, slots=True)
class TimeGiven:
    """So many `seconds` for all searches of one question together, from now on; None for as many as they take."""

    seconds: float | None
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float | None:
        """For the next search."""
        if self.seconds is None:
            return None
        return max(self.began + self.seconds - time.monotonic(), self.seconds / LATER)

    def is_over(self) -> bool:
        """Whether no further search is to begin that another answer can do without."""
        return self.seconds is not None and time.monotonic() >= self.began + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How a search is done.

    relative_gap: stop when the plan is proved to be within this of the best.
    seconds: stop solving then, with the best plan so far and its true gap; None for no limit.
    fold: equal blocks decide alike; without it the plan also says what folding costs, and is the folded one where the
        time ended before a better one was found.
    solver: one of `SOLVERS`; `auto` is ilp on up to three mesh axes, double-recursive on more, where tables over all
        axes grow beyond use.
    buckets: parameters share messages, in the search, its bound, the plan and the baselines.
    flatten: a bucket may take other ways than the plan's (`timeline.buckets`).
    with_baselines: price the named baselines too, and take one that is cheaper.
    tell: told what is being done.
    """

    relative_gap: float = 5e-3
    seconds: float | None = None
    fold: bool = True
    solver: str = "auto"
    buckets: bool = False
    flatten: bool = True
    with_baselines: bool = True
    tell: Tell = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAim:
    """What else is known, and wanted, of the plan that a search on one mesh looks for, or of a bound on all of them.

    cutoff: seconds from which on a plan is of no use.
    is_below: the relaxation within the limit is known to be below the cutoff.
    says_least: where nothing fits, find out what would.
    prices: of memory in seconds a byte, by moment, with which the search begins; replaced by those found.
    """

    cutoff: float = math.inf
    is_below: bool = False
    says_least: bool = True
    prices: dict[int, float] = field(default_factory=dict)
