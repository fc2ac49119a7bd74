"""What does a page about a plan show? All that is known of it, as values that JSON can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.report.heading import heading_rows
from autopar.report.page_shards import Cuts, TensorCut
from autopar.report.page_tree import TreePart, model_tree, tensors_of_file
from autopar.report.plan_text import known_cluster
from autopar.report.stages_table import stage_blocks
from autopar.report.units import nbytes_text, percent_text, seconds_text
from autopar.values.cluster import Cluster
from autopar.values.difference import PlanDifference
from autopar.values.explanation import Item
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.step_picture import DrawnTimeline, HeldOverTime, SentInAStep, StepPicture

SEEN = 2e-3
"""Part of a step that shows: numbers on a page have three digits."""
MOST_ITEMS = 12
"""Items that are listed of what makes a peak; the rest is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictured:
    """A plan, and what is known of it beside: of a plan from a file alone neither graphs nor picture.

    name: what the page calls it, such as its file.
    machine: the cluster, None for the preset that the plan names, if it is one.
    """

    name: str
    plan: Plan
    stages: Sequence[CapturedModel] = ()
    picture: StepPicture | None = None
    machine: Cluster | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakItems:
    """What a rank of a stage holds at the peak of a micro-batch, and what runs then."""

    title: str
    when: str
    items: tuple[Item, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnPage:
    """One plan.

    facts: what it is for, in words, and what it takes. limit: bytes a device, 0 where that is not known.
    lines: what its text says of it, each with its label. missing: what is not shown, and how to have it.
    bounded: seconds of the plan that the bound is on, for they are counted as `bounded_as` says.
    seconds, nbytes: of its estimate, by kind; hidden: seconds that run beside compute.
    is_drawn_otherwise: whether the timeline's step is another than the estimate's, by more than a reader would see.
    """

    name: str
    model: str
    facts: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    limit: float
    step: float
    hidden: float
    bound: float
    bounded: float
    bounded_as: str
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    baselines: Mapping[str, float | str]
    stages: tuple[tuple[str, ...], ...]
    mesh: tuple[tuple[str, int], ...]
    pipeline: int
    timeline: DrawnTimeline | None
    is_drawn_otherwise: bool
    held: tuple[HeldOverTime, ...]
    sent: tuple[SentInAStep, ...] | None
    peaks: tuple[PeakItems, ...]
    tree: TreePart
    cuts: tuple[TensorCut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """A page: a plan, perhaps another beside it, and what the two decide differently where that is known."""

    plans: tuple[PlanOnPage, ...]
    difference: PlanDifference | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values; spans are columns, each name once."""
        body = asdict(self)
        for plan in body["plans"]:
            if plan["timeline"] is not None:
                plan["timeline"]["spans"] = _columns(plan["timeline"]["spans"])
        return body


def page_data(plans: Sequence[Pictured], difference: PlanDifference | None = None) -> PageData:
    """Everything that a page of these plans shows."""
    return PageData(plans=tuple(map(_on_page, plans)), difference=difference)


def _on_page(of: Pictured) -> PlanOnPage:
    plan, estimate, picture = of.plan, of.plan.estimate, of.picture
    of = replace(of, machine=of.machine or known_cluster(plan.cluster))
    cuts = Cuts(plan.mesh)
    if picture is not None and of.machine is not None:
        tree = model_tree(plan, of.stages, picture, of.machine, cuts)
    else:
        tree = tensors_of_file(plan, cuts)
    memory = plan.config.memory_nbytes or (of.machine.device.memory_bytes if of.machine is not None else 0.0)
    drawn = picture.timeline if picture is not None else None
    return PlanOnPage(
        name=of.name,
        model=plan.model,
        facts=tuple(_facts(of, memory)),
        lines=tuple(heading_rows(plan, of.machine)),
        missing=tuple(_missing(of)),
        limit=float(memory),
        step=estimate.step_seconds,
        hidden=estimate.hidden,
        bound=estimate.bound,
        bounded=estimate.alone_seconds if estimate.bounded_alone else estimate.in_turn_seconds,
        bounded_as="every collective alone" if estimate.bounded_alone else "everything in turn",
        seconds=estimate.seconds,
        nbytes=estimate.memory,
        baselines=estimate.baselines,
        stages=tuple(_stages(of)),
        mesh=tuple(zip(plan.mesh.names, plan.mesh.shape, strict=True)),
        pipeline=plan.pipeline,
        timeline=drawn,
        is_drawn_otherwise=drawn is not None and abs(drawn.seconds - estimate.step_seconds) > SEEN * drawn.seconds,
        held=picture.held if picture is not None else (),
        sent=picture.sent if picture is not None else None,
        peaks=tuple(_peaks(plan, picture)) if picture is not None else (),
        tree=tree,
        cuts=cuts.all(),
    )


def _facts(of: Pictured, memory: float) -> list[tuple[str, str]]:
    plan, estimate = of.plan, of.plan.estimate
    limit, is_staged = f" of {nbytes_text(memory)}" if memory else "", plan.num_stages > 1
    said = [
        ("cluster", plan.cluster or "none"),
        ("mesh", str(plan.mesh)),
        ("pipeline", f"{plan.num_stages} stages on {plan.pipeline} ranks, {plan.schedule}" if is_staged else ""),
        ("micro-batches", f"{plan.microbatches} a step"),
        ("precision, optimizer", f"{plan.config.dtypes}, {plan.config.optimizer}"),
        ("found by", plan.origin),
        ("step", seconds_text(estimate.step_seconds) if estimate.seconds else ""),
        ("proved bound", seconds_text(estimate.bound) if estimate.bound else "none proved"),
        ("gap", percent_text(estimate.gap) if estimate.bound else ""),
        ("memory at the peak", f"{nbytes_text(estimate.peak_nbytes)}{limit} a device" if estimate.memory else ""),
    ]
    return [(name, text) for name, text in said if text]


def _missing(of: Pictured) -> list[str]:
    said = []
    if of.picture is None:
        said.append(
            "the step over time, memory over time, bytes by collective, modules, shapes and costs of tensors need the "
            "model: say --trust to run the code that the plan's file names, or name the model with --model"
        )
    if of.machine is None:
        said.append("the cluster is no preset, so that its figures are not known: give --cluster with its file")
    if not of.plan.estimate.seconds:
        said.append("the plan was not priced: its file holds no estimate")
    return said


def _stages(of: Pictured) -> list[tuple[str, ...]]:
    """Rows: number, blocks, ranks, seconds of a micro-batch, once a step, bytes."""
    plan = of.plan
    if plan.num_stages == 1:
        return []
    rows = list[tuple[str, ...]]()
    costs = plan.estimate.search.stages
    for number in range(plan.num_stages):
        first = plan.stage_rank(number) * plan.mesh.size
        blocks = stage_blocks(of.stages[number]) if of.stages else ""
        cost = costs[number] if costs else None
        taken = (seconds_text(cost.seconds), seconds_text(cost.once), nbytes_text(cost.nbytes)) if cost else ("",) * 3
        rows.append((str(number), blocks, f"{first}-{first + plan.mesh.size - 1}", *taken))
    return rows


def _peaks(plan: Plan, picture: StepPicture) -> list[PeakItems]:
    out = []
    for number, ledger in enumerate(picture.ledgers):
        shown, rest = ledger.nbytes[:MOST_ITEMS], ledger.nbytes[MOST_ITEMS:]
        if rest:
            count, amount = sum(item.count for item in rest), sum(item.amount for item in rest)
            shown = (*shown, Item(kind="", what=f"{len(rest)} more", count=count, amount=amount))
        title = f"stage {number}, one micro-batch in flight" if plan.num_stages > 1 else ""
        total = sum(item.amount for item in ledger.nbytes)
        out.append(PeakItems(title=title, when=ledger.peak, items=shown, total=total))
    return out


def _columns(spans: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names: dict[str, int] = {}
    columns: dict[str, list[Any]] = {key: [] for key in ("track", "start", "seconds", "action", "tasks", "name")}
    for span in spans:
        for key in ("track", "start", "seconds", "action", "tasks"):
            columns[key].append(span[key])
        columns["name"].append(names.setdefault(span["name"], len(names)))
    return {**columns, "names": list(names)}
