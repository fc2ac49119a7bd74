"""Why a plan is as it is, as a value: what binds, what a change would buy, what was near, where all goes.

Seconds are of a step; bytes are those that a rank holds at the peak, the first moment that has most of them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`count` things of one kind, alike but for the numbers in their paths; `amount` is theirs together.

    over: the mesh axes that a collective joins.
    """

    kind: str
    what: str
    count: int
    amount: float
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Items, dearest first. peak: what runs at the peak. levels: link level -> seconds of collectives whose slowest
    links are of that level."""

    seconds: tuple[Item, ...]
    nbytes: tuple[Item, ...]
    peak: str
    levels: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a change would buy. same: seconds of the plan as it is, under the change (None where it does not fit).
    best, nbytes: of the best plan found under it; `why_not` says why none beside the plan itself was, `best` is then
    None or that. in_turn: of the best if nothing runs beside compute, where that may be another, and what no such plan
    is below is `bound`."""

    change: str
    same: float | None = None
    best: float | None = None
    in_turn: float | None = None
    bound: float = 0.0
    nbytes: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What is forbidden, what is done instead ("" where that is many things), and seconds, a lower bound on those of
    any such plan, and bytes; or `why_not`. plan: the best of these."""

    without: str
    instead: str = ""
    seconds: float | None = None
    bound: float = 0.0
    nbytes: float = 0.0
    why_not: str = ""
    plan: StagePlan | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Everything but the plan."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OddRows:
    """Products with rows of these lengths on a rank, which are no whole pieces of 16 bytes. seconds: of a step; padded:
    if their rows were. name: the module of the first; count: how many ops."""

    name: str
    rows: tuple[int, ...]
    count: int
    seconds: float
    padded: float

    @property
    def lost(self) -> float:
        return self.seconds - self.padded


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage: seconds of a micro-batch, of its message to the next and once a step; bytes by kind at its own peak,
    and what the further micro-batches in flight keep beside."""

    number: int
    rank: int
    blocks: str
    forward: float
    backward: float
    sent: float
    once: float
    memory: Mapping[str, float]
    flying: int
    in_flight: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All of it.

    limit: bytes a device.
    ledger: where the seconds and bytes of the slowest stage go, which is the only one of a plan of one.
    unanswered: what the time given did not suffice for.
    is_in_buckets: so are all others, named baselines too.

    Of one stage:
    limit_costs: seconds that the limit costs the best plan at least and at most, None if that was not asked.
    odd_rows: products that take long for the lengths of their rows.

    pins: the best plans without each pin, and without any, in the order of the pins.

    Of several stages:
    parts: of the step, in seconds.
    schedules: the same stages in another order, seconds and bytes.
    near, not_below: what the search met.
    """

    plan: Plan
    limit: float
    ledger: Ledger
    offers: tuple[Offer, ...]
    baselines: Mapping[str, float | str]
    unanswered: tuple[str, ...]
    is_in_buckets: bool = False
    limit_costs: tuple[float, float] | None = None
    alternatives: tuple[Alternative, ...] = ()
    pins: tuple[Alternative, ...] = ()
    odd_rows: tuple[OddRows, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[StageFacts, ...] = ()
    slowest: int = 0
    schedules: Mapping[str, tuple[float, float] | str] = field(default_factory=dict)
    near: Mapping[str, float] = field(default_factory=dict)
    not_below: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; of the plan its estimate."""
        plain = ("is_in_buckets", "parts", "slowest", "schedules", "near", "not_below")
        return {
            "model": self.plan.model,
            "estimate": asdict(self.plan.estimate),
            "hidden_seconds": self.plan.estimate.hidden,
            "limit_nbytes": self.limit,
            "limit_costs_seconds": self.limit_costs,
            "ledger": asdict(self.ledger),
            "offers": [asdict(offer) for offer in self.offers],
            "alternatives": [other.to_json() for other in self.alternatives],
            "pins": [other.to_json() for other in self.pins],
            "odd_rows": [asdict(odd) for odd in self.odd_rows],
            "stages": [asdict(stage) for stage in self.stages],
            "baselines": dict(self.baselines),
            "unanswered": list(self.unanswered),
            **{name: getattr(self, name) for name in plain},
        }
