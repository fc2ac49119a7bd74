"""A plan with stages in a few lines: which calls on which ranks, what each takes and holds, what the pipeline idles."""

from collections.abc import Sequence
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autopar.report.rules_text import rules_lines
from autopar.report.search_text import one_microbatch_text, search_text, timeline_text
from autopar.report.units import nbytes_text, percent_text, saving_text, seconds_text
from autopar.values.blocks import blocks_text
from autopar.values.graph import CapturedModel, requires_grad
from autopar.values.staged_plan import StagedPlan


def staged_text(plan: StagedPlan, stages: Sequence[CapturedModel]) -> str:
    """The plan as text; `stages` are the captured models of its stages."""
    estimate = plan.estimate
    lines = [
        f"{plan.model} on {plan.cluster}: {plan.num_stages} stages on {plan.pipeline} pipeline ranks, each of mesh "
        f"{plan.mesh}; {plan.schedule}, {plan.microbatches} micro-batches, {plan.config.optimizer}, "
        f"{plan.config.dtypes} [{plan.origin}]"
    ]
    if why := estimate.solver.get("one_microbatch"):
        lines.append(one_microbatch_text(why))
    if searched := estimate.solver.get("search"):
        lines.append(search_text(searched))
    if estimate.seconds:
        bound, gap = seconds_text(estimate.bound), percent_text(estimate.gap)
        proved = f", in the space searched none takes less than {bound} (gap {gap})" if estimate.bound else ""
        count = sum(len(stage.buckets) for stage in plan.stages)
        alone = f"; {seconds_text(estimate.alone_seconds)} if every collective went alone" if count else ""
        proved = alone + proved if estimate.bounded_alone else proved + alone
        lines.append(
            f"step {seconds_text(estimate.step_seconds)}{proved}; memory at the peak of the fullest rank "
            f"{nbytes_text(estimate.peak_nbytes)}"
        )
        if count:
            parameters = sum(len(names) for stage in plan.stages for names in stage.buckets)
            lines.append(
                f"buckets: {parameters} parameters are gathered or reduced in {count} bucket{'s' * (count > 1)}, which "
                f"{saving_text(estimate.saved)}"
            )
        kinds = (f"{kind} {seconds_text(seconds)}" for kind, seconds in estimate.seconds.items() if seconds)
        lines.append(f"of which {', '.join(kinds)}")
    if ranked := estimate.solver.get("timeline"):
        lines.append(timeline_text(ranked))
    if checked := getattr(plan, "checked", ""):
        lines.append(f"graph: {checked}")
    lines += rules_lines([node for stage in stages for node in stage.graph.nodes], {}, estimate.step_seconds)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "blocks", "devices", "a micro-batch", "once a step", "memory of its rank"):
        table.add_column(name, justify="left" if name in ("blocks", "devices") else "right")
    prices = estimate.solver.get("stages", [{}] * plan.num_stages)
    for number, (stage, price) in enumerate(zip(stages, prices, strict=True)):
        first = plan.stage_rank(number) * plan.mesh.size
        table.add_row(
            str(number),
            blocks_text(n.meta["module"] for n in stage.graph.nodes if n.op == "call_function" and requires_grad(n)),
            f"{first}-{first + plan.mesh.size - 1}",
            seconds_text(price["seconds"]) if price else "",
            seconds_text(price["once"]) if price else "",
            nbytes_text(price["memory"]) if price else "",
        )
    console = Console(file=StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return "\n".join(lines) + "\n" + console.file.getvalue()
