"""What is said of an explanation of several stages alone: what the pipeline idles, its stages, plans that were near."""

from collections.abc import Mapping

from rich.table import Table

from autopar.report.tables import NOISE, columns_of, signed
from autopar.report.units import nbytes_text, percent_text, seconds_text, share_text
from autopar.values.explanation import Explanation


def pipeline_lines(explanation: Explanation) -> list[str]:
    """What stands between a plan of several stages and a faster one."""
    estimate = explanation.plan.estimate
    room = explanation.limit - estimate.peak_nbytes
    fullest = max(explanation.stages, key=lambda s: sum(s.memory.values()) + s.in_flight)
    binding = max(explanation.parts, key=lambda name: explanation.parts[name] if name[:4] != "work" else 0.0)
    share = percent_text(explanation.parts[binding] / estimate.step_seconds)
    return [
        f"memory: {nbytes_text(abs(room))} {'are free' if room >= 0 else 'too much'}",
        f"beside the work itself most of the step is: {binding}, {share}; stage {explanation.slowest} is the slowest, "
        f"stage {fullest.number} holds most",
    ]


def pipeline_tables(explanation: Explanation) -> list[Table]:
    """What the step is, what each stage takes, and what it holds."""
    step = _step(explanation.parts, explanation.plan.estimate.step_seconds)
    return [step, _stages(explanation), _memory(explanation)]


def _step(parts: Mapping[str, float], total: float) -> Table:
    table = columns_of("what the step is", "what", "seconds", "share", folded=1)
    for name, seconds in parts.items():
        said = seconds_text(seconds) if seconds >= 0 else f"−{seconds_text(-seconds)}"
        table.add_row(name, said if abs(seconds) > NOISE * total else "0", share_text(abs(seconds), total))
    table.add_row("total", seconds_text(total), "")
    return table


def _stages(explanation: Explanation) -> Table:
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
            share_text(busy, plan.estimate.step_seconds),
        )
    return table


def _memory(explanation: Explanation) -> Table:
    kinds = [k for k in explanation.stages[0].memory if any(s.memory[k] for s in explanation.stages)]
    title = "what a device holds of each stage at its peak, and of further micro-batches in flight"
    table = columns_of(title, "stage", *(kind.replace("_", "-") for kind in kinds), "in flight", "together", folded=0)
    for stage in explanation.stages:
        amounts = [stage.memory[kind] for kind in kinds]
        more = f"{nbytes_text(stage.in_flight)} ({stage.flying - 1})" if stage.in_flight else "0"
        together = nbytes_text(sum(amounts) + stage.in_flight)
        table.add_row(str(stage.number), *map(nbytes_text, amounts), more, together)
    return table


def near_table(explanation: Explanation) -> Table:
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
