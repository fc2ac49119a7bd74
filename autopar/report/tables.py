"""Tables of an explanation: columns that share 120 characters, items with their shares."""

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.report.units import seconds_text, share_text
from autopar.values.explanation import Item

SHOWN = 10
"""Rows of each list of items."""
NOISE = 1e-6
"""Parts of the step below which a difference is none."""


def columns_of(title: str, *columns: str, folded: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        wide = number < folded
        table.add_column(name, justify="left" if wide else "right", overflow="fold", ratio=1 if wide else None)
    table.expand = True
    return table


def signed(seconds: float, total: float, plus: str = "+") -> str:
    if abs(seconds) <= NOISE * total:
        return "nothing"
    return f"{plus if seconds > 0 else '−'}{seconds_text(abs(seconds))} ({share_text(abs(seconds), total)})"


def items_table(title: str, items: tuple[Item, ...], total: float, text: Callable[[float], str]) -> Table:
    table = columns_of(title, "what", "kind", "count", "together", "share", folded=2)
    for item in items[:SHOWN]:
        over = f" over {', '.join(item.over)}" if item.over else ""
        kind = item.kind.replace("_", "-") + over
        table.add_row(item.what, kind, str(item.count), text(item.amount), share_text(item.amount, total))
    rest = items[SHOWN:]
    if rest:
        amount = sum(item.amount for item in rest)
        table.add_row(f"{len(rest)} more", "", "", text(amount), share_text(amount, total))
    table.add_row("total", "", "", text(sum(item.amount for item in items)), "")
    return table
