"""What two plans of one model decide differently, and what each takes, as a value."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """`count` things of one kind, alike but for the numbers in their paths, that are `left` here and `right` there."""

    kind: str
    what: str
    count: int
    left: str
    right: str


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """facts: what the plans are for, where that differs; seconds of a step and bytes at the peak by kind, of both."""

    model: str
    facts: Mapping[str, tuple[str, str]]
    changes: tuple[PlanChange, ...]
    seconds: Mapping[str, tuple[float, float]]
    nbytes: Mapping[str, tuple[float, float]]

    @property
    def is_empty(self) -> bool:
        """Nothing is decided differently, and nothing costs another amount."""
        both = (*self.seconds.values(), *self.nbytes.values())
        return not self.facts and not self.changes and all(a == b for a, b in both)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "is_empty": self.is_empty}
