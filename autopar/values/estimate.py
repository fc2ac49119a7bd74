"""What the cost model says of a plan, as a value, and the proof of how good it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.values.schema import of_file
from autopar.values.search_report import SearchReport

ROUNDING = 1e-9
ONE_DEVICE = "one device"
"""Among baselines: the same step on one device, which computes alone."""


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the cost model says of a plan, and the proof of how good it is. Seconds a step, bytes a rank.

    seconds: by kind: forward, backward, recompute?, communication kinds, optimizer.
    hidden: seconds for which collectives run beside compute: those of one micro-batch beside another's (`copies`),
        or what buckets send beside it (`search.costs.overlapped_seconds`).
    saved: seconds that buckets save, and the ways that they take.
    saved_by_ways: those of them that other ways than those of parameters alone save.
    memory: bytes by kind at the peak moment; their sum is the predicted peak.
    rates: whose formulas priced compute: constants fitted for the device, or the roofline of its own figures.
    bound: a proved lower bound on the step seconds, everything in turn, over the space searched: of plans in buckets
        where it was searched for those, else of every collective alone. 0 if none is proved.
    bounded_alone: the bound is one on `alone_seconds`, and buckets were chosen afterwards.
    baselines: named baselines, in buckets if the plan may be, and one device: seconds, or why they do not apply.
    search: what there is to say of how the plan was found.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    saved: float = 0.0
    saved_by_ways: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    rates: str = ""
    bound: float = 0.0
    bounded_alone: bool = False
    baselines: Mapping[str, float | str] = field(default_factory=dict)
    search: SearchReport = field(default_factory=SearchReport)

    @property
    def step_seconds(self) -> float:
        return self.in_turn_seconds - self.hidden

    @property
    def in_turn_seconds(self) -> float:
        """The step if nothing ran beside compute."""
        return sum(self.seconds.values())

    @property
    def alone_seconds(self) -> float:
        """The step if every collective went alone and nothing beside it."""
        return sum(self.seconds.values()) + self.saved

    @property
    def named_baselines(self) -> Mapping[str, float | str]:
        """The recipes among the baselines."""
        return {name: result for name, result in self.baselines.items() if name != ONE_DEVICE}

    @property
    def peak_nbytes(self) -> float:
        return sum(self.memory.values())

    @property
    def gap(self) -> float:
        """How far the plan can be from optimal in the space searched, relative to the plan; rounding is none."""
        seconds = self.alone_seconds if self.bounded_alone else self.in_turn_seconds
        gap = (seconds - self.bound) / seconds if seconds else 0.0
        return gap if gap > ROUNDING else 0.0
