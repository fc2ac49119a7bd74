"""Which modules does a model have, and what does a plan do to their calls and tensors? A tree, alike parts folded.

A part is a module, a call, a parameter or a redistribution of what a call made. Numbered modules that are alike in all
that is decided are one part; its seconds and bytes, and those of what is below it, are those of all of them together.
Views, which cost nothing and decide nothing of their own, are left out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.compute import HOST
from autopar.lower.calls import WAIT, LoweredCall
from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import make_program
from autopar.lower.target import Target
from autopar.passes.graph_tools import copied_name
from autopar.report.page_shards import Cuts
from autopar.report.rows import GATHERED
from autopar.report.words import choice_words
from autopar.values.blocks import NUMBER, ranges
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel, target_name
from autopar.values.placement import Layout
from autopar.values.plan import Plan
from autopar.values.redistribution import COLLECTIVES
from autopar.values.stage_plan import StagePlan
from autopar.values.step_picture import StepPicture

DIGITS = re.compile(r"\d+")


@dataclass(slots=True, kw_only=True)
class TreePart:
    """One part of a model.

    kind: `module`, `call`, `parameter`, `input` or `redistribution`. count: how many are folded into it.
    cut: number of what is drawn of its tensor. computed, communicated: seconds of a step; nbytes: at the peak.
    """

    name: str
    kind: str
    how: str = ""
    layout: str = ""
    cut: int | None = None
    count: int = 1
    computed: float = 0.0
    communicated: float = 0.0
    nbytes: float = 0.0
    parts: list["TreePart"] = field(default_factory=list)


def model_tree(
    plan: Plan, stages: Sequence[CapturedModel], picture: StepPicture, machine: Cluster, cuts: Cuts
) -> TreePart:
    """The model's tree; of several stages each is a part below it."""
    roots = []
    for number, stage in enumerate(stages):
        after: Mapping[str, Layout] = plan.stages[number + 1].layouts if number + 1 < plan.num_stages else {}
        own = plan.stages[number]
        target = Target(mesh=plan.mesh, config=plan.config, on_host=machine.device.name == HOST)
        sent = {name: after[name] for name in stage.sends}
        step = lower(own, make_program(stage), target, sent)
        costs = _Costs(picture.computed[number], picture.communicated[number], picture.nbytes[number])
        root = _stage_tree(own, stage, step, costs, cuts)
        if plan.num_stages > 1:
            first = plan.stage_rank(number) * plan.mesh.size
            root.name = f"stage {number}"
            root.how = f"on ranks {first}-{first + plan.mesh.size - 1}"
        roots.append(root)
    if len(roots) == 1:
        roots[0].name = plan.model
        return roots[0]
    whole = TreePart(name=plan.model, kind="module", parts=roots)
    _count_in(whole)
    return whole


def tensors_of_file(plan: Plan, cuts: Cuts) -> TreePart:
    """What a plan's file alone says of tensors: their layouts under their names in the graph, without shapes."""
    root = TreePart(name=plan.model, kind="module")
    for number, stage in enumerate(plan.stages):
        groups = Counter(
            (DIGITS.sub("*", name), str(layout), _lifetime(stage, name), cuts.number(layout, None))
            for name, layout in stage.layouts.items()
        )
        parts = [
            TreePart(name=name, kind="parameter" if how else "input", how=how, layout=layout, cut=cut, count=count)
            for (name, layout, how, cut), count in groups.items()
        ]
        if plan.num_stages == 1:
            root.parts = parts
        else:
            root.parts.append(TreePart(name=f"stage {number}", kind="module", parts=parts))
    return root


@dataclass(slots=True)
class _Costs:
    computed: Mapping[str, float]
    communicated: Mapping[str, float]
    nbytes: Mapping[str, float]


def _stage_tree(plan: StagePlan, captured: CapturedModel, step: LoweredStep, costs: _Costs, cuts: Cuts) -> TreePart:
    root = TreePart(name="", kind="module")
    modules: dict[str, TreePart] = {"": root}
    rows: dict[str, TreePart] = {}  # of what costs; what has none (a view, a constant) is the whole model's
    moved: dict[str, TreePart] = {}

    def module(path: str) -> TreePart:
        if path not in modules:
            above, _, name = path.rpartition(".")
            modules[path] = TreePart(name=name, kind="module")
            module(above).parts.append(modules[path])
        return modules[path]

    words = choice_words(captured, plan.mesh)
    inputs = [spec.placeholder for spec in captured.inputs]
    for name in inputs:
        layout = plan.layouts[name]
        shape = captured.nodes[name].meta["val"].shape
        rows[name] = TreePart(name=name, kind="input", how=_shape(shape), layout=str(layout))
        rows[name].cut = cuts.number(layout, shape)
        root.parts.append(rows[name])
    unread: dict[str, tuple[str, TreePart]] = {}
    for spec in captured.parameters:
        layout = plan.layouts[spec.placeholder]
        path, _, name = spec.names[0].rpartition(".")
        tied = f"; tied: {', '.join(spec.names[1:])}" if len(spec.names) > 1 else ""
        how = f"{_shape(spec.shape)} {_dtype(spec.storage)}{_lifetime(plan, spec.placeholder)}{tied}"
        row = TreePart(name=name, kind="parameter", how=how, layout=str(layout))
        row.cut = cuts.number(layout, spec.shape)
        rows[spec.placeholder] = row
        unread[spec.placeholder] = (path, row)
    last = ""
    original = {copied_name(name, 1): name for name, copy in step.program.copy_of.items() if copy == 0}
    for call in step.calls:
        if call.part == WAIT or any(value is not None and value[0] in original for value in call.results):
            continue
        if call.op is not None:
            last = call.op.module
            for name in call.op.operands:
                if name in unread:
                    path, row = unread.pop(name)
                    module(path).parts.append(row)
            if call.op.rule.alias is None:
                row = _call_row(call, plan, step, cuts)
                row.how = words(call.op.node, plan.choices[call.op.name])
                if call.op.name in plan.recompute:
                    row.how += "; recomputed in backward"
                rows[call.op.name] = row
                module(call.op.module).parts.append(row)
                rows.update({name: row for name in call.op.results if name is not None})
        elif (found := _redistribution(call, step, cuts)) is not None:
            name = call.operands[0][0]
            moved.setdefault(name, found)
            module(last).parts.append(found)
    for path, row in unread.values():
        module(path).parts.append(row)
    for name, seconds in costs.communicated.items():
        name = original.get(name, name)
        (moved.get(name) or rows.get(name, root)).communicated += seconds
    for name, seconds in costs.computed.items():
        rows.get(original.get(name, name), root).computed += seconds
    for name, nbytes in costs.nbytes.items():
        rows.get(original.get(name, name), root).nbytes += nbytes
    return _folded(_summed(root))


def _call_row(call: LoweredCall, plan: StagePlan, step: LoweredStep, cuts: Cuts) -> TreePart:
    op = call.op
    assert op is not None
    layouts = step.target.op(op, plan.choices[op.name]).results
    called = target_name(op.node.target).removeprefix("aten.").split(".")[0]
    row = TreePart(name=called, kind="call", layout=str(layouts[0]))
    row.cut = cuts.number(layouts[0], op.result_shapes[0])
    return row


def _redistribution(call: LoweredCall, step: LoweredStep, cuts: Cuts) -> TreePart | None:
    """Of what a call made, where a collective does it; those of parameters are the parameters' own."""
    name, change = call.operands[0][0], call.step
    assert change is not None
    tensor = step.program.tensors[name]
    kinds = [kind for kind in dict.fromkeys((change.forward, change.backward)) if kind in COLLECTIVES]
    if tensor.kind == "parameter" or not kinds:
        return None
    over = ", ".join(step.plan.mesh.names[axis] for axis in change.axes)
    row = TreePart(
        name=f"{' / '.join(kinds)} over {over}",
        kind="redistribution",
        how=f"of {_shape(tensor.shape)}",
        layout=f"{change.source} → {change.target}",
    )
    row.cut = cuts.number(change.target, tensor.shape)
    return row


def _lifetime(plan: StagePlan, name: str) -> str:
    """Of a parameter's gathered copy, in words; "" for what is no parameter."""
    lifetime = plan.lifetimes.get(name)
    return "" if lifetime is None else GATHERED[lifetime] or ", used as it is stored"


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _summed(part: TreePart) -> TreePart:
    """With what is below a module counted into it."""
    for below in part.parts:
        _summed(below)
    _count_in(part)
    return part


def _count_in(part: TreePart) -> None:
    """Count into a part what is right below it."""
    part.computed += sum(below.computed for below in part.parts)
    part.communicated += sum(below.communicated for below in part.parts)
    part.nbytes += sum(below.nbytes for below in part.parts)


def _folded(part: TreePart) -> TreePart:
    """With numbered modules that are alike as one."""
    out: list[TreePart] = []
    alike: dict[object, list[TreePart]] = {}
    places: dict[object, int] = {}
    for below in map(_folded, part.parts):
        key = _key(below) if below.kind == "module" and NUMBER.match(below.name) else id(below)
        if key not in alike:
            places[key] = len(out)
            out.append(below)
        alike.setdefault(key, []).append(below)
    for key, members in alike.items():
        if len(members) > 1:
            merged = _merged(members)
            merged.name = ranges(int(member.name) for member in members)
            out[places[key]] = merged
    part.parts = out
    return part


def _key(part: TreePart) -> object:
    """All that is decided of a part, and none of its numbers."""
    below = tuple((one.name, _key(one)) for one in part.parts)
    return part.kind, part.how, part.layout, part.cut, part.count, below


def _merged(members: Sequence[TreePart]) -> TreePart:
    first = members[0]
    return TreePart(
        name=first.name, kind=first.kind, how=first.how, layout=first.layout, cut=first.cut,
        count=sum(member.count for member in members),
        computed=sum(member.computed for member in members),
        communicated=sum(member.communicated for member in members),
        nbytes=sum(member.nbytes for member in members),
        parts=[_merged(alike) for alike in zip(*(member.parts for member in members), strict=True)],
    )  # fmt: skip
