"""What `plan.explain()` and `plan.diff(other)` give: values of the search that print as tables."""

from dataclasses import fields
from typing import Any

from autopar.report.diff_text import diff_text
from autopar.report.explain_text import explain_text
from autopar.values.difference import PlanDifference
from autopar.values.explanation import Explanation


class PrintedExplanation(Explanation):
    """An explanation that prints."""

    def __str__(self) -> str:
        return explain_text(self)


class PrintedDifference(PlanDifference):
    """A difference that prints."""

    def __str__(self) -> str:
        return diff_text(self)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
