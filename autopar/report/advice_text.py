"""Advice as text: the best configuration, those near it, what does not fit, and what to paste."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from autopar.advice.advise import Advice, ClusterSize
from autopar.advice.framework import ConfigFile, TransformerJob
from autopar.advice.rank import Priced
from autopar.cost_models.efficiency import nominal_efficiency
from autopar.cost_models.transformer import num_params
from autopar.report.tables import columns_of
from autopar.report.units import seconds_text
from autopar.values.cluster import Cluster

CLOSE = 0.95


def advice_text(advice: Advice) -> RenderableType:
    """The whole answer, but for what to paste."""
    job, ranking = advice.job, advice.ranking
    parts: list[RenderableType] = [Text(_headline(job)), Text("")]
    best = ranking.best[0] if ranking.best else None
    if best is None:
        parts.append(Text(f"nothing that {ranking.framework.title} can express fits; the nearest are below"))
    else:
        parts.append(Text(f"{ranking.framework.title}: {_line(best, job)}"))
        parts.append(Text(f"  {_degrees(best)}"))
        parts += [Text(line) for line in near_limit(best.nbytes, job.cluster)]
    if advice.own is not None:
        unlike = "" if (own := advice.own.config.global_batch) == job.global_batch else f" ({own} samples a step)"
        against = _against(advice.own, best) if advice.own.fits else ", which does not fit"
        parts.append(Text(f"yours{unlike}: {_line(advice.own, job)}{against}"))
        parts.append(Text(f"  {_degrees(advice.own)}"))
        if not advice.own.fits:
            parts.append(Text(f"  it does not fit: {_what(advice.own)}"))
    if (free := advice.unlimited) is not None and free.framework != ranking.framework.name:
        parts.append(Text(f"without its limits: {_line(free, job)}{_against(free, best)}, as {free.framework} can"))
        parts.append(Text(f"  {_degrees(free)}"))
    parts.append(Text(""))
    if ranking.best:
        parts.append(_table(f"the fastest that fit, of {ranking.num_priced:,} priced", ranking.best, job))
    if ranking.too_large:
        parts.append(_misses(ranking.too_large, job))
    parts += [Text(note) for note in _notes(advice)]
    return Group(*parts)


def near_limit(nbytes: float, cluster: Cluster) -> list[str]:
    """A line where the prediction's error may decide whether it fits."""
    if nbytes < CLOSE * cluster.device.memory_bytes:
        return []
    return [
        f"  within {1 - CLOSE:.0%} of the memory, about what the prediction errs: try it, and keep the next one ready"
    ]


def paste(written: Sequence[ConfigFile]) -> list[RenderableType]:
    """Files as they are, under their names."""
    parts: list[RenderableType] = []
    for one in written:
        parts += [Text(""), Text(one.name, style="bold"), Syntax(one.text.rstrip(), one.language, theme="ansi_light")]
    return parts


def sizes_table(sizes: Sequence[ClusterSize], currency: str) -> Table:
    """One line a number of GPUs. currency: what the costs are in, as the price was given."""
    largest = max((size.cluster for size in sizes), key=lambda cluster: cluster.num_devices)
    links = ", up to ".join(f"{level.size} by {level.name}" for level in reversed(largest.levels))
    title = f"how many {largest.device.name}, {links}"
    table = columns_of(title, "configuration", "GPUs", "step", "MFU", "tokens/s", "days", currency, folded=1)
    for size in sizes:
        if size.best is None:
            table.add_row(size.reason, str(size.num_devices), "", "", "", "", "")
            continue
        table.add_row(
            _degrees(size.best),
            str(size.num_devices),
            seconds_text(size.best.seconds),
            f"{size.best.time.mfu:.1%}",
            f"{size.best.time.tokens_per_second:,.0f}",
            "" if size.days is None else f"{size.days:,.1f}",
            "" if size.cost is None else f"{size.cost:,.0f}",
        )
    return table


def _headline(job: TransformerJob) -> str:
    cluster = job.cluster
    return (
        f"{job.shape.name}   {num_params(job.shape) / 1e9:.3g} B parameters   {cluster.num_devices} "
        f"{cluster.device.name}   batch {job.global_batch} x {job.seq:,}   {job.precision}"
    )


def _line(priced: Priced, job: TransformerJob) -> str:
    memory = job.cluster.device.memory_bytes / 1e9
    return (
        f"{seconds_text(priced.seconds)} a step, MFU {priced.time.mfu:.1%}, "
        f"{priced.time.tokens_per_second:,.0f} tokens/s, {priced.nbytes / 1e9:.1f} of {memory:.0f} GB a GPU"
    )


def _against(priced: Priced, best: Priced | None) -> str:
    if best is None:
        return ""
    # by tokens: a user's own batch may be another
    change = best.time.tokens_per_second / priced.time.tokens_per_second - 1
    return f" ({abs(change):.1%} {'more' if change > 0 else 'less'} time a token)"


def _degrees(priced: Priced) -> str:
    config = priced.config
    degrees = {"tp": config.tp, "pp": config.pp, "cp": config.cp, "ep": config.ep, "dp": config.dp}
    words = [f"{name} {size}" for name, size in degrees.items() if size > 1 or name == "dp"]
    if config.pp > 1:
        kind = f"interleaved x{config.virtual_stages}" if config.virtual_stages > 1 else config.schedule
        words.append(kind)
    sharding = priced.sharding.name + (f" in {config.replicate} groups" if config.replicate > 1 else "")
    words += [sharding, f"micro-batch {config.micro_batch} x {config.num_microbatches}"]
    if config.offload != "none":
        words.append("the host holds the optimizer" if config.offload == "optimizer" else "the host holds the shards")
    words.append("nothing recomputed" if config.recompute == "none" else f"recompute {config.recompute}")
    return ", ".join(words)


def _table(title: str, rows: Sequence[Priced], job: TransformerJob) -> Table:
    table = columns_of(title, "configuration", "step", "MFU", "tokens/s", "GB a GPU", folded=1)
    for row in rows:
        table.add_row(
            _degrees(row),
            seconds_text(row.seconds),
            f"{row.time.mfu:.1%}",
            f"{row.time.tokens_per_second:,.0f}",
            f"{row.nbytes / 1e9:.1f}",
        )
    return table


def _misses(rows: Sequence[Priced], job: TransformerJob) -> Table:
    memory = job.cluster.device.memory_bytes / 1e9
    table = columns_of(
        f"do not fit in {memory:.0f} GB, the nearest", "configuration", "most of it", "GB a GPU", folded=2
    )
    for row in rows:
        table.add_row(_degrees(row), _what(row), f"{row.nbytes / 1e9:.1f}")
    return table


def _what(priced: Priced) -> str:
    kinds = sorted(priced.memory.kinds, key=lambda kind: -kind[1])[:3]
    return ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in kinds)


def _notes(advice: Advice) -> list[str]:
    framework = advice.ranking.framework
    efficiency = nominal_efficiency(advice.job.cluster.device)
    return [
        f"speed of the devices: {efficiency.title}",
        f"software of {framework.title}: {framework.sources}",
        "GB: allocated at the peak of the fullest rank, with context, communicators and the allocator's free pieces",
        *framework.notes,
    ]
