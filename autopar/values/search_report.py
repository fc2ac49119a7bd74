"""What is there to say of the search that found a plan? Saved with the plan, and printed by `report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.values.schema import of_file


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGraph:
    """The strategy graph of which the plan is a choice.

    method: `ilp`, or `double recursion`, which proves nothing beside the work alone.
    status: why it stopped: `optimal` (within the gap asked for), `time limit`, `interrupted`, or what it proves.
    nodes, options, arcs: the size of the graph.
    build_seconds, solve_seconds, price_seconds: of making the graph, solving it, and pricing what was found.
    """

    method: str
    status: str
    nodes: int = 0
    options: int = 0
    arcs: int = 0
    build_seconds: float = 0.0
    solve_seconds: float = 0.0
    price_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.build_seconds + self.solve_seconds + self.price_seconds


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What recompute takes in seconds, and saves in bytes at the peak, beside the same plan that keeps everything."""

    seconds: float
    nbytes: float


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class LeastInTurn:
    """The plan that takes least if nothing runs beside compute, where another takes less as it runs."""

    plan: str
    in_turn_seconds: float
    step_seconds: float


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSearched:
    """Meshes, numbers of micro-batches, stages and schedules that were searched, each of them a problem.

    space: in words.
    status: `proved`, `time limit` or `interrupted`.
    candidates, planned, do_not_fit: numbers of problems: all, those whose plans were looked for, those without any.
    near: problems whose plans come next, with their seconds.
    not_below: problems that were left out, with seconds that they take at least.
    """

    space: str
    status: str
    candidates: int
    planned: int
    do_not_fit: int
    seconds: float
    near: Mapping[str, float]
    not_below: Mapping[str, float]
    in_turn: LeastInTurn | None = None


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Of one stage: seconds of a micro-batch, forward and back, and once a step; bytes at the peak of its rank."""

    seconds: float
    once: float
    nbytes: float


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan that the timeline ranked: seconds of a step by the additive cost, and overlapped."""

    plan: str
    sum_seconds: float
    timeline_seconds: float


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRanking:
    """The plans that the timeline ranked, the first by the sum first, and which was chosen.

    left_out: numbers of micro-batches that were not looked at, and why.
    """

    bucket_nbytes: float
    ahead: int
    chosen: int
    plans: tuple[RankedPlan, ...]
    left_out: Mapping[str, str]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What is known of a plan's search; what was not done is None or empty.

    solved: the last strategy graph.
    memory_limit: bytes a device.
    searched_seconds, folded_seconds: a step of what was found, and with equal blocks that decide alike.
    whole_seconds: what ops that nothing splits take on every rank, by name, in one micro-batch.
    is_in_buckets: the plan was priced in buckets, whether some pay or not.
    in_buckets: seconds of the plans that were compared in buckets.
    is_rough: no search proved the plan to be near the best.
    microbatches: seconds with each number of micro-batches, or why there is no plan.
    one_microbatch: why a step has to be one micro-batch.
    copies: seconds of the plans with one and two micro-batches at once.
    stages: of a pipeline.
    instead: what the plan is beside another.
    """

    solved: SolvedGraph | None = None
    memory_limit: float | None = None
    searched_seconds: float | None = None
    folded_seconds: float | None = None
    whole_seconds: Mapping[str, float] = field(default_factory=dict)
    recompute: Recomputed | None = None
    is_in_buckets: bool = False
    in_buckets: Mapping[str, float] = field(default_factory=dict)
    is_rough: bool = False
    space: SpaceSearched | None = None
    microbatches: Mapping[str, float | str] = field(default_factory=dict)
    one_microbatch: str = ""
    copies: Mapping[str, float] = field(default_factory=dict)
    timeline: TimelineRanking | None = None
    stages: tuple[StageCost, ...] = ()
    instead: str = ""
