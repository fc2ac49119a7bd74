"""What do the processes of a joint search ask each other, and what comes back?"""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.search.exact.ilp import CutoffError
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.critical_path import CriticalWay
from autopar.search.meshes import Arrangement
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import Cluster
from autopar.values.plan import Plan
from autopar.values.train_config import TrainConfig

Found = TypeVar("Found")


class JointProblem(Generic[Found]):
    """What one process of the search may ask another; what comes back is a `Found`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the problems of a search have in common, beside the graphs.

    counts: of micro-batches.
    options: `buckets` without stages; with those every collective is alone until a plan is found.
    """

    counts: tuple[int, ...]
    cluster: Cluster
    config: TrainConfig
    options: SearchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxing(JointProblem[float]):
    """The question what `times` micro-batches, and what is paid once, take at least with memory aside, whatever the
    cutoff, on the first of the meshes that are alike.

    cutoff: of a step's seconds.
    """

    arrangement: Arrangement
    microbatches: int
    times: int
    cutoff: float = field(compare=False, default=math.inf)

    def enough(self) -> float:
        """Seconds that show a step of this number, or of any multiple of it, to take no less than the cutoff."""
        return self.cutoff * self.arrangement.pipeline * max(self.times / self.microbatches, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """bound: seconds of a step, infinite where nothing fits. uneven: memory aside, of every mesh like the candidate's
    and every cut of its stages, None where that was not asked. prices: of memory, where it binds."""

    bound: float
    uneven: float | None
    prices: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refining(JointProblem[Refined]):
    """The question what a candidate takes at least within memory, whatever the cutoff.

    most: not 0 where all of its `shared_bounds.Group` are meant, of whose numbers of micro-batches it is the largest.
    prices: of memory, that are tried first.
    """

    key: Candidate
    most: int = 0
    cutoff: float = field(compare=False)
    prices: dict[int, float] = field(compare=False, default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """found: plan, its seconds and a bound, or why there is none. own: the candidate's bound. way: through a step.

    prices: of memory, where it binds.
    """

    found: tuple[Plan, float, float] | CutoffError | InfeasibleError | SearchTimeoutError
    own: float
    way: CriticalWay | None
    prices: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solving(JointProblem[Solved]):
    """The question what a candidate's best plan is, whatever the cutoff and the deadline (of `time.time`).

    is_refined: that `Refining` was answered, with less than the cutoff. prices: of memory, that are tried first.
    patient: so long that it is asked once nothing else is left to do.
    """

    key: Candidate
    cutoff: float = field(compare=False)
    deadline: float | None = field(compare=False)
    patient: bool = False
    is_refined: bool = field(compare=False, default=False)
    prices: dict[int, float] = field(compare=False, default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tightening(JointProblem[float]):
    """The question what a step takes at least on this way of the candidate's, whatever the cutoff.

    prices: of memory, that are tried first.
    """

    key: Candidate
    way: CriticalWay = field(compare=False)
    cutoff: float = field(compare=False)
    prices: dict[int, float] = field(compare=False)


Question = Relaxing | Refining | Solving | Tightening
