"""Do two runs learn the same? Their loss curves side by side, and the largest difference between them."""

import math
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

WIDTH = 48
HEIGHT = 12


def largest_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """max |one - other| over steps and the step (from 1) where it is; inf at the first loss that is not a number.

    Raises ValueError when the runs are empty or of unequal length: such runs cannot be compared.
    """
    if len(one) != len(other) or not one:
        raise ValueError(f"runs of {len(one)} and {len(other)} steps cannot be compared; both must run every step")
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(one, other, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return differences[worst], worst + 1


def plot(losses: Sequence[float], *, low: float, high: float, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """The curve as `height` lines of `width` characters between the losses `low` (bottom) and `high` (top).

    A column shows the mean of the steps that fall in it (more columns than steps repeat steps), and is empty where that
    mean is not a number.
    """
    grid = [[" "] * width for _ in range(height)]
    for column in range(width):
        first = column * len(losses) // width
        last = max(first + 1, (column + 1) * len(losses) // width)
        mean = sum(losses[first:last]) / (last - first)
        if not math.isfinite(mean):
            continue
        share = (mean - low) / (high - low) if high > low else 0.0
        grid[round((1 - min(max(share, 0.0), 1.0)) * (height - 1))][column] = "•"
    return ["".join(row) for row in grid]


def side_by_side(runs: dict[str, Sequence[float]]) -> RenderableType:
    """One panel a run, all on one scale, each with its first and last loss."""
    finite = [loss for losses in runs.values() for loss in losses if math.isfinite(loss)] or [0.0]
    low, high = min(finite), max(finite)
    labels = [f"{high:5.2f} ┤", *["      │"] * (HEIGHT - 2), f"{low:5.2f} ┤"]
    panels = []
    for title, losses in runs.items():
        lines = [label + line for label, line in zip(labels, plot(losses, low=low, high=high), strict=True)]
        footer = f"steps 1 to {len(losses)}: loss {losses[0]:.4f} to {losses[-1]:.4f}"
        panels.append(Panel(Group(Text("\n".join(lines), no_wrap=True), Text(footer)), title=title, expand=False))
    return Columns(panels)
