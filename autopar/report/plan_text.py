"""A plan as text: what each operation and parameter does, what is sent, what it costs, how good it is.

Plain text of 120 columns; on a terminal `print_plan` writes the same with its width and colours.
"""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.compute import HOST
from autopar.cost_models.links import axis_links
from autopar.errors import ClusterError
from autopar.lower.messages import messages_of
from autopar.report.heading import heading
from autopar.report.plain import plain_text
from autopar.report.recompute_text import recompute_text
from autopar.report.rows import PlanRow, Section, plan_sections
from autopar.report.rules_text import rules_lines
from autopar.report.stages_table import stages_table
from autopar.report.units import nbytes_text, seconds_text, share_text
from autopar.report.words import choice_words
from autopar.values.cluster import Cluster, load_preset
from autopar.values.estimate import Estimate
from autopar.values.local_model import LocalModel
from autopar.values.plan import Plan
from autopar.values.redistribution import Message
from autopar.values.stage_plan import StagePlan


def plan_text(plan: Plan, locals_: Sequence[LocalModel], machine: Cluster | None = None) -> str:
    """The plan as plain text."""
    return plain_text(render(plan, locals_, machine))


def render(plan: Plan, locals_: Sequence[LocalModel], machine: Cluster | None = None) -> RenderableType:
    """The plan for a rich console; locals_: what the ranks of each stage run.

    Without them (a plan just loaded) the tables of operations are left out, and of several stages those of each are.
    """
    known = machine or known_cluster(plan.cluster)
    parts: list[RenderableType] = [heading(plan, known, locals_)]
    if plan.num_stages > 1:
        parts.append(stages_table(plan, [local.captured for local in locals_]))
    elif locals_:
        parts += _operations(plan.single, locals_[0], known)
    parts.append(_cost_tables(plan.estimate))
    if plan.estimate.baselines:
        parts.append(_baseline_table(plan.estimate))
    if locals_:
        seconds = {op: n * plan.microbatches for op, n in plan.estimate.search.whole_seconds.items()}
        nodes = [node for local in locals_ for node in local.captured.graph.nodes]
        parts += [Text(line + "\n") for line in rules_lines(nodes, seconds, plan.estimate.step_seconds)]
    else:
        parts.append(Text("loaded from a file: plan.bind(model) adds the tables of operations\n"))
    return Group(*parts)


def _operations(plan: StagePlan, local: LocalModel, machine: Cluster | None) -> list[RenderableType]:
    """What each operation and parameter of a stage does, and what is sent."""
    clock, words = Clock(plan, machine), choice_words(local.captured, plan.mesh)
    again = recompute_text(plan, local)
    return [
        *([Text(again + "\n")] if again else []),
        *(_section_table(section, clock) for section in plan_sections(local, words)),
        _traffic_table(local, clock),
    ]


def known_cluster(cluster: str) -> Cluster | None:
    """The preset of that name, None if there is none."""
    try:
        return load_preset(cluster)
    except ClusterError:
        return None


class Clock:
    """Predicted time of messages; None where the cluster is not known."""

    def __init__(self, plan: StagePlan, machine: Cluster | None) -> None:
        self.plan, self.machine = plan, machine

    def seconds(self, messages: Sequence[Message]) -> float | None:
        if self.machine is None:
            return None
        shape = self.plan.mesh.shape
        links = {m.axes: axis_links(self.machine, shape, m.axes) for m in messages}
        return sum(collective_seconds(m.kind, m.nbytes, links[m.axes])[0] for m in messages)

    def text(self, messages: Sequence[Message]) -> str:
        seconds = self.seconds(messages)
        return "" if seconds is None or not messages else seconds_text(seconds)


def _section_table(section: Section, clock: Clock) -> Table:
    count = f" ×{section.count}" if section.count > 1 else ""
    table = Table(
        title=f"{section.title}{count}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("operation or parameter", overflow="fold", width=34)
    table.add_column("how", overflow="fold", ratio=1)
    table.add_column("placements", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.expand = True
    for row in section.rows:
        total = sum(message.nbytes for message in row.messages)
        table.add_row(
            _name(row), row.how, row.layout, nbytes_text(total) if total else "", clock.text(row.messages),
            style={"move": "cyan", "parameter": "dim"}.get(row.kind, ""),
        )  # fmt: skip
    return table


def _name(row: PlanRow) -> str:
    if row.kind == "parameter":
        return f"  {row.name}"
    if row.kind == "move":
        return f"→ {row.name}"
    ops = list(dict.fromkeys(row.ops))
    heavy = [_SPOKEN.get(op, op) for op in ops if op not in _QUIET] or ops
    listed = ", ".join(heavy[:3]) + (", …" if len(heavy) > 3 else "")
    return f"{row.name}: {listed}" if row.name else listed


_SPOKEN = {"scaled_dot_product_attention": "attention"}

_QUIET = {
    "to_copy",
    "constant_pad_nd",
    "reshape",
    "permute",
    "unsqueeze",
    "expand",
    "slice",
    "view",
    "transpose",
    "getitem",
    "cat",
    "neg",
    "pow",
}


def _traffic_table(local: LocalModel, clock: Clock) -> RenderableType:
    """Everything that one step sends, by collective and axes."""
    on_host = clock.machine is None or clock.machine.device.name == HOST
    sent = messages_of(local.captured, local.plan, on_host=on_host)
    if not sent:
        return Text("nothing is sent\n")
    table = Table(
        title="sent in a step by each rank", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for name, justify in (
        ("collective", "left"),
        ("over", "left"),
        ("calls", "right"),
        ("bytes", "right"),
        ("a call", "right"),
    ):
        table.add_column(name, justify="left" if justify == "left" else "right")
    for (kind, axes), (calls, nbytes) in sorted(sent.items()):
        table.add_row(kind, ", ".join(axes), str(calls), nbytes_text(nbytes), nbytes_text(nbytes / calls))
    return table


def _cost_tables(estimate: Estimate) -> RenderableType:
    tables = []
    for title, column, values, text in (
        ("step time", "seconds", estimate.seconds, seconds_text),
        ("memory at the peak", "bytes", estimate.memory, nbytes_text),
    ):
        if not values:
            continue
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("kind")
        table.add_column(column, justify="right")
        total = sum(values.values())
        table.add_column("share", justify="right")
        for kind, value in values.items():
            if value:
                table.add_row(kind.replace("_", "-"), text(value), share_text(value, total))
        if column == "seconds" and estimate.hidden:
            table.add_row("beside compute", f"-{text(estimate.hidden)}", share_text(-estimate.hidden, total))
            total -= estimate.hidden
        table.add_row("total", text(total), "")
        tables.append(table)
    return Columns(tables, padding=(0, 6))


def _baseline_table(estimate: Estimate) -> Table:
    table = Table(
        title="baselines in the same cost model",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("name")
    table.add_column("step", justify="right")
    table.add_column("of this plan", justify="right")
    table.add_column("why not", overflow="fold")
    for name, result in estimate.baselines.items():
        if isinstance(result, str):
            table.add_row(name, "", "", result)
        else:
            ratio = result / estimate.step_seconds if estimate.step_seconds else 0.0
            table.add_row(name, seconds_text(result), f"{ratio:.2f}×", "")
    return table


def print_plan(plan: Plan, locals_: Sequence[LocalModel], machine: Cluster | None, console: Any) -> None:
    """Write the plan on a console: with colours on a terminal, 120 columns wide elsewhere."""
    if console.is_terminal:
        console.print(render(plan, locals_, machine))
    else:
        console.print(plan_text(plan, locals_, machine), soft_wrap=True)
