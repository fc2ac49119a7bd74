"""Advice for a model of any kind as text: its planned configurations, and what to paste."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.advice.framework import ConfigFile
from autopar.advice.planned import ModelAdvice, PlannedConfiguration
from autopar.report.advice_text import near_limit
from autopar.report.tables import columns_of
from autopar.report.units import seconds_text


def model_advice_text(advice: ModelAdvice, written: Sequence[ConfigFile], most: int) -> RenderableType:
    """The whole answer, but for what to paste. written: that. most: rows of each table."""
    cluster, global_batch = advice.site.cluster, advice.job.global_batch
    memory = cluster.device.memory_bytes / 1e9
    parts: list[RenderableType] = [
        Text(
            f"{advice.site.model}   {advice.num_params:,} parameters   {cluster.num_devices} {cluster.device.name}   "
            f"batch {global_batch}   {advice.job.precision}"
        ),
        Text(""),
    ]
    if advice.best:
        best = advice.best[0]
        parts.append(
            Text(
                f"{advice.framework.title}: {seconds_text(best.seconds)} a step, {global_batch / best.seconds:,.0f} "
                f"samples/s, {best.nbytes / 1e9:.1f} of {memory:.0f} GB a device"
            )
        )
        parts.append(Text(f"  {_words(best)}"))
        parts += [Text(line) for line in near_limit(best.nbytes, cluster)]
    else:
        parts.append(Text(f"no data-parallel configuration of {advice.framework.title} fits"))
    if (own := advice.own) is not None:
        fits = "" if own.fits else ", which does not fit"
        samples = own.config.global_batch
        parts.append(
            Text(
                f"yours: {seconds_text(own.seconds)} a step of {samples} samples, {samples / own.seconds:,.0f} "
                f"samples/s, {own.nbytes / 1e9:.1f} of {memory:.0f} GB a device{fits}"
            )
        )
        parts.append(Text(f"  {_words(own)}"))
    for title, rows in (("that fit", advice.best), (f"that do not fit in {memory:.0f} GB", advice.too_large)):
        if rows:
            table = columns_of(f"configurations {title}", "configuration", "step", "GB a device", folded=1)
            for row in rows[:most]:
                table.add_row(_words(row), seconds_text(row.seconds), f"{row.nbytes / 1e9:.1f}")
            parts.append(table)
    parts += [Text(f"left out: {reason}") for reason in advice.left_out]
    if not advice.site.layer_paths:
        parts.append(
            Text(
                "the model has no list of layers of one class: no part is wrapped or recomputed by itself, and FSDP "
                "gathers all of it at once"
            )
        )
    if not advice.has_switch and any("gradient_checkpointing" in one.text for one in written):
        parts.append(Text(f"{advice.site.model} has no gradient_checkpointing_enable(); what is pasted calls it"))
    parts.append(Text("each is priced as a plan; without these limits: autopar plan MODEL --cluster C --mesh auto"))
    return Group(*parts)


def planned_values(row: PlannedConfiguration) -> dict[str, Any]:
    """A configuration as plain values."""
    config = row.config
    return {
        "words": row.words,
        "sharding": row.sharding.name,
        "dp": config.dp,
        "micro_batch": config.micro_batch,
        "accumulate": config.num_microbatches,
        "recompute": config.recompute,
        "step_seconds": row.seconds,
        "gigabytes": row.nbytes / 1e9,
        "fits": row.fits,
        "memory_gb": {kind: nbytes / 1e9 for kind, nbytes in row.memory.items()},
    }


def _words(row: PlannedConfiguration) -> str:
    config = row.config
    recompute = "nothing recomputed" if config.recompute == "none" else f"recompute {config.recompute}"
    return f"{row.sharding.name}, micro-batch {config.micro_batch} x {config.num_microbatches}, {recompute}"
