"""The difference of two plans as text of 120 columns: what they are for, what they decide, seconds and bytes."""

from collections.abc import Callable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.report.plain import plain_text
from autopar.report.units import nbytes_text, percent_text, seconds_text
from autopar.values.difference import PlanDifference


def diff_text(difference: PlanDifference) -> str:
    """The difference as plain text."""
    return plain_text(render(difference))


def render(difference: PlanDifference) -> RenderableType:
    """The difference for a rich console."""
    if difference.is_empty:
        return Text(f"two plans of {difference.model} that decide and cost the same\n")
    parts: list[RenderableType] = [Text(f"two plans of {difference.model}\n")]
    if difference.facts:
        table = _table("what they are for", "", "first", "second")
        for name, (left, right) in difference.facts.items():
            table.add_row(name, left, right)
        parts.append(table)
    if difference.changes:
        table = _table("what they decide differently", "of", "first", "second")
        for (kind, module, left, right), names in _by_module(difference).items():
            listed = f"{module}: {', '.join(names)}" if module else ", ".join(names)
            table.add_row(Text(f"{listed} [{kind}]"), left, right)
        parts.append(table)
    else:
        parts.append(Text("they decide the same\n"))
    parts.append(_costs("step time", difference.seconds, seconds_text))
    parts.append(_costs("memory at the peak", difference.nbytes, nbytes_text))
    return Group(*parts)


def _by_module(difference: PlanDifference) -> dict[tuple[str, str, str, str], list[str]]:
    """(kind, module, first, second) -> what of the module is so, each with its count."""
    out: dict[tuple[str, str, str, str], list[str]] = {}
    for change in difference.changes:
        module, _, name = change.what.rpartition(": ")
        count = f" ×{change.count}" if change.count > 1 else ""
        out.setdefault((change.kind, module, change.left, change.right), []).append(f"{name}{count}")
    return out


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for name in columns:
        table.add_column(Text(name), overflow="fold", ratio=1)
    return table


def _costs(title: str, pairs: Mapping[str, tuple[float, float]], text: Callable[[float], str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("kind")
    for name in ("first", "second", "second - first"):
        table.add_column(name, justify="right")
    totals = tuple(sum(pair[i] for pair in pairs.values()) for i in (0, 1))
    for kind, (left, right) in (*pairs.items(), ("total", totals)):
        more = right - left
        part = f" ({percent_text(abs(more) / left)})" if left and more else ""
        sign = "+" if more > 0 else "−"
        said = f"{sign}{text(abs(more))}{part}" if more else "the same"
        table.add_row(kind.replace("_", "-"), text(left), text(right), said)
    return table
