"""The stages of a plan as a table: which blocks on which devices, what each takes and holds."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.report.units import nbytes_text, seconds_text
from autopar.values.blocks import blocks_text
from autopar.values.graph import CapturedModel, requires_grad
from autopar.values.plan import Plan


def stages_table(plan: Plan, stages: Sequence[CapturedModel]) -> Table:
    """`stages`: captured models; without them (a plan just loaded) blocks are left out."""
    table = Table(title="stages", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "blocks", "devices", "a micro-batch", "once a step", "memory of its rank"):
        table.add_column(name, justify="left" if name in ("blocks", "devices") else "right")
    costs = plan.estimate.search.stages or [None] * plan.num_stages
    for number, cost in enumerate(costs):
        first = plan.stage_rank(number) * plan.mesh.size
        table.add_row(
            str(number),
            stage_blocks(stages[number]) if stages else "",
            f"{first}-{first + plan.mesh.size - 1}",
            seconds_text(cost.seconds) if cost else "",
            seconds_text(cost.once) if cost else "",
            nbytes_text(cost.nbytes) if cost else "",
        )
    return table


def stage_blocks(stage: CapturedModel) -> str:
    """The blocks of what is trained in a stage."""
    return blocks_text(n.meta["module"] for n in stage.graph.nodes if n.op == "call_function" and requires_grad(n))
