"""The explanation of a plan in stages as text of 120 columns: the pipeline, its stages, what binds, what was near."""

import io
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.report.explain_text import (
    NOISE,
    WIDTH,
    baselines_table,
    columns_of,
    items_table,
    offers_table,
    signed,
)
from autopar.report.units import nbytes_text, percent_text, seconds_text
from autopar.search.explanation.explain_stages import StagedExplanation


def explain_stages_text(explanation: StagedExplanation) -> str:
    """The explanation as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(render(explanation))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def render(explanation: StagedExplanation) -> RenderableType:
    """The explanation for a rich console."""
    estimate = explanation.plan.estimate
    parts: list[RenderableType] = [Text("\n".join(_heading(explanation)) + "\n")]
    parts.append(_step(explanation.parts, estimate.step_seconds))
    parts.append(_stages(explanation))
    parts.append(_memory(explanation))
    parts.append(offers_table(explanation.offers, estimate.step_seconds, estimate.step_seconds))
    if explanation.near or explanation.not_below or explanation.schedules:
        parts.append(_near(explanation))
    slowest, own = explanation.slowest, explanation.items
    spent = sum(item.amount for item in own.seconds)
    title = f"where the seconds of a step go in stage {slowest}, the slowest"
    parts.append(items_table(title, own.seconds, spent, seconds_text))
    held = sum(item.amount for item in own.nbytes)
    title = f"what stage {slowest} holds at its peak with one micro-batch in flight, {own.peak}"
    parts.append(items_table(title, own.nbytes, held, nbytes_text))
    if explanation.baselines:
        parts.append(baselines_table(explanation.baselines, estimate.step_seconds))
    if explanation.unanswered:
        listed = "; ".join(explanation.unanswered)
        parts.append(Text(f"not asked, for the time was over: {listed}; give --seconds more\n"))
    return Group(*parts)


def _heading(explanation: StagedExplanation) -> list[str]:
    plan, estimate = explanation.plan, explanation.plan.estimate
    proved = f", none takes less than {seconds_text(estimate.bound)}" if estimate.bound else ""
    room = explanation.limit - estimate.peak_nbytes
    fullest = max(explanation.stages, key=lambda s: sum(s.memory.values()) + s.in_flight)
    binding = max(explanation.parts, key=lambda name: explanation.parts[name] if name[:4] != "work" else 0.0)
    share = percent_text(explanation.parts[binding] / estimate.step_seconds)
    left = f"{nbytes_text(abs(room))} {'are free' if room >= 0 else 'too much'}"
    return [
        f"{plan.model} on {plan.cluster}: {plan.num_stages} stages on {plan.pipeline} pipeline ranks of mesh "
        f"{plan.mesh}, {plan.schedule}, {plan.microbatches} micro-batches [{plan.origin}]",
        f"step {seconds_text(estimate.step_seconds)}{proved}; the fullest rank holds "
        f"{nbytes_text(estimate.peak_nbytes)} of {nbytes_text(explanation.limit)} a device, {left}",
        f"beside the work itself most of the step is: {binding}, {share}; stage {explanation.slowest} is the slowest, "
        f"stage {fullest.number} holds most",
    ]


def _step(parts: Mapping[str, float], total: float) -> Table:
    table = columns_of("what the step is", "what", "seconds", "share", folded=1)
    for name, seconds in parts.items():
        said = seconds_text(seconds) if seconds >= 0 else f"−{seconds_text(-seconds)}"
        table.add_row(name, said if abs(seconds) > NOISE * total else "0", percent_text(abs(seconds) / total))
    table.add_row("total", seconds_text(total), "")
    return table


def _stages(explanation: StagedExplanation) -> Table:
    plan = explanation.plan
    names = ("stage", "blocks", "devices", "forward", "backward", "message", "once a step", "works")
    table = columns_of(
        "stages: seconds of a micro-batch, and the share of the step that its rank works for it", *names, folded=0
    )
    for stage in explanation.stages:
        first = stage.rank * plan.mesh.size
        busy = plan.microbatches * (stage.forward + stage.backward) + stage.once
        table.add_row(
            str(stage.number),
            stage.blocks,
            f"{first}-{first + plan.mesh.size - 1}",
            seconds_text(stage.forward),
            seconds_text(stage.backward),
            seconds_text(stage.sent),
            seconds_text(stage.once),
            percent_text(busy / plan.estimate.step_seconds),
        )
    return table


def _memory(explanation: StagedExplanation) -> Table:
    kinds = [k for k in explanation.stages[0].memory if any(s.memory[k] for s in explanation.stages)]
    title = "what a device holds of each stage at its peak, and of further micro-batches in flight"
    table = columns_of(title, "stage", *(kind.replace("_", "-") for kind in kinds), "in flight", "together", folded=0)
    for stage in explanation.stages:
        amounts = [stage.memory[kind] for kind in kinds]
        more = f"{nbytes_text(stage.in_flight)} ({stage.flying - 1})" if stage.in_flight else "0"
        together = nbytes_text(sum(amounts) + stage.in_flight)
        table.add_row(str(stage.number), *map(nbytes_text, amounts), more, together)
    return table


def _near(explanation: StagedExplanation) -> Table:
    own = explanation.plan.estimate
    table = columns_of("plans near this one", "what", "why not", "step", "more than this", "peak", folded=2)
    for name, found in explanation.schedules.items():
        if isinstance(found, str):
            table.add_row(f"the same stages, {name}", found, "", "", "")
        else:
            more = signed(found[0] - own.step_seconds, own.step_seconds)
            fits = "" if found[1] <= explanation.limit else "does not fit"
            table.add_row(f"the same stages, {name}", fits, seconds_text(found[0]), more, nbytes_text(found[1]))
    for name, seconds in explanation.near.items():
        table.add_row(name, "", seconds_text(seconds), signed(seconds - own.step_seconds, own.step_seconds), "")
    for name, bound in explanation.not_below.items():
        more = signed(bound - own.step_seconds, own.step_seconds)
        table.add_row(name, "not planned: no plan of it takes less", seconds_text(bound), more, "")
    return table
