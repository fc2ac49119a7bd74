"""Exchange systems as a table: the predicted order of architectures and schedules for a step's gradients."""

from collections.abc import Sequence

from rich.table import Table

from autopar.cost_models.gradient_exchange.recommend import ExchangeChoice


def exchange_table(choices: Sequence[ExchangeChoice], most: int = 12) -> Table:
    """The `most` fastest, the one to take first."""
    table = Table("architecture", "schedule", "step s", "not hidden s", "speedup", title="Exchange of gradients")
    for choice in choices[:most]:
        table.add_row(
            choice.architecture, choice.schedule, f"{choice.seconds:.4g}", f"{choice.exposed_seconds:.3g}",
            f"{choice.speedup:.1f}x",
        )  # fmt: skip
    return table
