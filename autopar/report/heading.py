"""What does a plan come to? The answer, its proof, what it holds and sends, whether it pays: a labelled line each."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from autopar.cost_models.compute import HOST
from autopar.report.search_text import one_microbatch_text, space_text, timeline_text
from autopar.report.units import count_text, nbytes_text, percent_text, saving_text, seconds_text, share_text
from autopar.rules.registry import rule_of
from autopar.values.cluster import Cluster
from autopar.values.estimate import ONE_DEVICE, Estimate
from autopar.values.graph import CapturedModel
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh
from autopar.values.plan import Plan
from autopar.values.stage_plan import Way

COMPUTE = ("forward", "backward", "recompute", "optimizer")
WHOLE = ("replicate", "invariant")
MOST_WORK = 0.5
"""Of a step's operations: where all ranks do more than this alike, the plan's first lines say so."""
AS_FAST = 1.05
"""One device that takes less than a step times this is called as fast: what is predicted is seldom nearer."""

LEAST_GAP = 1e-4
"""A gap below it is called so: what is added up has no more digits."""
LABEL = 7
"""Letters of the longest label."""

Row = tuple[str, str]


def heading(plan: Plan, machine: Cluster | None, locals_: Sequence[LocalModel] = ()) -> RenderableType:
    """What the plan is for, and a line for each answer; without `locals_` those that the graph gives are left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=LABEL)
    grid.add_column(overflow="fold")
    for label, text in heading_rows(plan, machine, locals_):
        grid.add_row(label, text)
    return Group(Text(_title(plan, locals_)), grid, Text(""))


def heading_rows(plan: Plan, machine: Cluster | None, locals_: Sequence[LocalModel] = ()) -> list[Row]:
    """The labelled lines: a line without a label goes on with the one before."""
    assumed = ", ".join(getattr(plan, "assumed", ()))
    chosen = [("assumed", assumed)] if assumed else []
    return [*chosen, *_answers(plan, machine, locals_), *_how_found(plan), *_keys(plan)]


def _title(plan: Plan, locals_: Sequence[LocalModel]) -> str:
    call, config = getattr(plan, "call", None), plan.config
    batch = f", global batch {call.batch()}" if call is not None and call.batch() else ""
    batch += f" in {plan.microbatches} micro-batches" if plan.microbatches > 1 else ""
    schedule = f", {plan.schedule}" if plan.num_stages > 1 else ""
    return (
        f"{plan.model} on {plan.cluster or 'no cluster'}, {plan.arrangement}{schedule}{batch}, {config.optimizer}, "
        f"{config.dtypes} [{plan.origin}]"
    )


def _answers(plan: Plan, machine: Cluster | None, locals_: Sequence[LocalModel]) -> list[Row]:
    estimate = plan.estimate
    captured = [local.captured for local in locals_]
    rows: list[Row] = []
    if estimate.seconds:
        rows += _step(plan, machine, captured)
        memory = plan.config.memory_nbytes or (machine.device.memory_bytes if machine is not None else None)
        limit = f" of {nbytes_text(memory)}" if memory else ""
        fullest = ", of the fullest rank" if plan.num_stages > 1 else ""
        rows.append(("memory", f"{nbytes_text(estimate.peak_nbytes)}{limit} a device at the peak{fullest}"))
        sent = sum(seconds for kind, seconds in estimate.seconds.items() if kind not in COMPUTE)
        if sent:
            exposed = f", {seconds_text(max(sent - estimate.hidden, 0.0))} of it exposed" if estimate.hidden else ""
            rows.append(("sent", f"{seconds_text(sent)} of collectives{exposed}"))
    if len(captured) == 1 and plan.mesh.size > 1 and (share := whole_share(locals_[0])) > MOST_WORK:
        rows.append(("whole", f"{percent_text(share)} of the operations are done whole on every rank, by all alike"))
    if paid := _does_not_pay(estimate):
        rows.append(("pays", paid))
    return rows


def _step(plan: Plan, machine: Cluster | None, captured: Sequence[CapturedModel]) -> list[Row]:
    """The step, and the proof, which is of the step itself or of a quantity that it names."""
    estimate = plan.estimate
    rate = _rate(plan, machine, captured)
    step = seconds_text(estimate.step_seconds)
    if estimate.bounded_alone:
        proved, what = estimate.alone_seconds, "with every collective alone and nothing beside compute"
    else:
        proved, what = estimate.in_turn_seconds, "with nothing beside compute"
    if not estimate.bound:
        return [("step", f"{step}{rate}")]
    within = (
        f"within {percent_text(max(estimate.gap, LEAST_GAP))} of the best in the space searched: none takes less than "
        f"{seconds_text(estimate.bound)}"
    )
    if proved == estimate.step_seconds:
        return [("step", f"{step}, proved {within}{rate}")]
    beside = f", collectives beside compute for {seconds_text(estimate.hidden)}" if estimate.hidden else ""
    return [("step", f"{step} as it runs{beside}{rate}"), ("proof", f"{seconds_text(proved)} {what}: {within}")]


def _rate(plan: Plan, machine: Cluster | None, captured: Sequence[CapturedModel]) -> str:
    """MFU and tokens (or samples) a second, as far as they are known."""
    seconds, said = plan.estimate.step_seconds, ""
    if not captured or not seconds:
        return said
    if machine is not None and machine.device.name != HOST:
        peaks = dict(machine.device.peak_flops)
        if peak := peaks.get(plan.config.dtypes.partition("-")[0]):
            flops = 3 * plan.microbatches * sum(_flops(c.graph.nodes) for c in captured)
            said += f"; MFU {percent_text(flops / (seconds * plan.world * peak))}"
    call = getattr(plan, "call", None)
    if (batch := call.batch() if call is not None else None) is not None:
        tokens = _tokens(captured[0], plan.microbatches, batch)
        unit = "tokens" if tokens is not None else "samples"
        said += f"; {count_text((tokens or batch) / seconds)} {unit}/s"
    return said


def _flops(nodes: "fx.graph._node_list | Sequence[fx.Node]") -> float:
    return sum(rule_of(node).flops for node in nodes if node.op == "call_function")


def _tokens(captured: CapturedModel, microbatches: int, batch: int) -> int | None:
    """Tokens of a step: entries of the first input of whole numbers that has a row of several a sample."""
    for spec in captured.inputs:
        shape = spec.shape
        if not spec.dtype.is_floating_point and len(shape) == 2 and shape[0] * microbatches == batch and shape[1] > 1:
            return batch * int(shape[1])
    return None


def whole_share(local: LocalModel) -> float:
    """Of the floating-point operations of a forward pass, those of ops that no axis splits: every rank does them."""
    whole = total = 0.0
    for node in local.captured.graph.nodes:
        if node.op == "call_function":
            names, flops = local.plan.choices.get(node.name, ()), rule_of(node).flops
            total += flops
            sizes = local.plan.mesh.shape
            whole += flops * all(name in WHOLE for name, size in zip(names, sizes, strict=False) if size > 1)
    return whole / total if total else 0.0


def _does_not_pay(estimate: Estimate) -> str:
    alone = estimate.baselines.get(ONE_DEVICE)
    if not isinstance(alone, float) or estimate.step_seconds * AS_FAST < alone:
        return ""
    return (
        f"not: one device alone takes {seconds_text(alone)}. More samples a step, a larger model or faster links would "
        "make parallelism pay; or train on one device"
    )


def _how_found(plan: Plan) -> list[Row]:
    estimate, search = plan.estimate, plan.estimate.search
    rows: list[Row] = []
    if plan.config.pins:
        rows.append(("pinned", "; ".join(plan.config.pins.texts)))
    if others := search.microbatches:
        prices = (seconds_text(v) if isinstance(v, float) else v for v in others.values())
        said = "; ".join(f"{n}: {price}" for n, price in zip(others, prices, strict=True))
        rows.append(("search", f"micro-batches: {said}"))
    if search.one_microbatch:
        rows.append(("search", one_microbatch_text(search.one_microbatch)))
    if search.space:
        rows.append(("search", space_text(search.space)))
    if estimate.seconds:
        if len(search.in_buckets) > 1:
            said = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in search.in_buckets.items())
            rows.append(("search", f"plans compared in buckets, by what found them: {said}"))
        if search.copies:
            said = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in search.copies.items())
            rows.append(("search", f"micro-batches compared: {said}"))
        if search.timeline:
            rows.append(("search", timeline_text(search.timeline)))
        folded, searched = search.folded_seconds, search.searched_seconds
        if folded is not None and searched is not None:
            more = share_text(folded - searched, searched)
            said = f"every layer decided for itself; equal layers deciding alike, the step would take {more} more"
            rows.append(("search", said))
    return rows


def _keys(plan: Plan) -> list[Row]:
    """What runs beside what, on what the graph was checked, and the key to the tables."""
    estimate = plan.estimate
    buckets = [names for stage in plan.stages for names in stage.buckets]
    copies = max(stage.copies for stage in plan.stages)
    rows: list[Row] = []
    if copies > 1:
        rows.append(
            (
                "weaving",
                "two micro-batches run at once, one computing while the other communicates, which hides "
                f"{seconds_text(estimate.hidden)}",
            )
        )
    if buckets:
        parameters = sum(len(names) for names in buckets)
        said = (
            f"{parameters} parameters are gathered or reduced in {len(buckets)} bucket{'s' * (len(buckets) > 1)}, "
            f"which {saving_text(estimate.saved)} of {seconds_text(estimate.alone_seconds)}"
        )
        said += "; gathers begin one bucket ahead" if any(stage.prefetch for stage in plan.stages) else ""
        rows.append(("buckets", said))
    if ways := [way for stage in plan.stages for way in stage.ways.values()]:
        rows.append(("", _ways_text(ways, plan.mesh, estimate)))
    if checked := getattr(plan, "checked", ""):
        rows.append(("graph", checked))
    if plan.num_stages == 1:
        names = ", ".join(plan.mesh.names)
        rows.append(
            (
                "key",
                f"placements, one for each of ({names}): S0 = split along dim 0, P = a summand, R, I = whole "
                "(gradients of R are summands)",
            )
        )
        rows.append(
            ("", "parameters, as stored: gathered for use = again for backward; gathered and kept = until backward")
        )
    return rows


def _ways_text(ways: Sequence[Way], mesh: Mesh, estimate: Estimate) -> str:
    """How many parameters travel otherwise than the search said, how, and what that saves."""
    words: dict[str, int] = {}
    for way in ways:
        joined = any(len(step.axes) > 1 for step in way.steps(mesh))
        several = len({axis for step in way.steps(mesh) for axis in step.axes}) > 1
        word = "as one" if joined else "axis by axis" if several else "over one axis"
        word = f"in levels, {', '.join(way.inside)} first" if way.inside else word
        words[word] = words.get(word, 0) + 1
    said = ", ".join(f"{count} {word}" for word, count in words.items())
    saved = saving_text(estimate.saved_by_ways)
    return f"otherwise than alone: {said}, which {saved} (counted above)"
