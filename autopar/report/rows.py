"""Which lines say what a plan does to a block? One an operation, a parameter or a collective on an activation.

Views and elementwise calls that keep their producer's layout are part of its line. Collectives on parameters are part
of the parameter's line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.export.body import is_collective
from autopar.export.expressions import is_light, short_name
from autopar.lower.regions import Region, sections
from autopar.values.blocks import relative, title
from autopar.values.graph import operands
from autopar.values.local_model import LocalModel
from autopar.values.placement import Shard
from autopar.values.redistribution import Message

GATHERED = {
    "always": "",
    "step": ", gathered once a step",
    "microbatch": ", gathered and kept",
    "use": ", gathered for use",
}
"""Lifetimes in words."""

Words = Callable[[fx.Node, tuple[str, ...]], str]
"""A captured node and its choice on each axis, as a phrase."""


@dataclass(slots=True, kw_only=True)
class PlanRow:
    """`kind`: op, parameter or move. `messages` are those of one call of the block, forward and backward."""

    kind: str
    name: str
    how: str
    layout: str
    ops: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One kind of block: its title, how many blocks are like it, its rows."""

    title: str
    count: int
    rows: tuple[PlanRow, ...]


def plan_sections(local: LocalModel, words: Words) -> list[Section]:
    """Kinds of blocks in order of first use, between them what is outside of blocks."""
    found = sections(local)
    classes = {group[0].key: group for group in found.classes}
    out: list[Section] = []
    loose: list[fx.Node] = []
    shown: set[str] = set()

    def flush() -> None:
        if loose:
            rows = _rows(loose, "", local, words)
            out.append(Section(title="outside of blocks", count=1, rows=tuple(rows)))
            loose.clear()

    for item in found.order:
        if not isinstance(item, Region):
            loose.append(item)
        elif item.key not in shown:
            flush()
            shown.add(item.key)
            group = classes[item.key]
            rows = _rows(item.nodes, item.block, local, words)
            out.append(Section(title=title(r.block for r in group), count=len(group), rows=tuple(rows)))
    flush()
    return out


def _rows(nodes: Sequence[fx.Node], block: str, local: LocalModel, words: Words) -> list[PlanRow]:
    plan = local.plan
    names = {p.placeholder: p.names for p in local.captured.parameters}
    owners = {relative(name.rpartition(".")[0], block) for known_as in names.values() for name in known_as} - {""}
    rows: list[PlanRow] = []
    parameters: dict[str, PlanRow] = {}
    moves: dict[str, list[Message]] = {}
    major = False
    viewed: dict[fx.Node, list[str]] = {}
    """Parameters that views of nothing else show, whatever is sent of them in between."""
    for node in nodes:
        read = [name for s in operands(node) for name in viewed.get(s, _parameters(s, names))]
        if read and (is_collective(node) or _shows_parameters_alone(node, viewed, names)):
            viewed[node] = read
        sent = [message for direction in node.meta.get("messages", ((), ())) for message in direction]
        if is_collective(node):
            origin = node.meta["origin"]
            if origin.name in names:
                moves.setdefault(origin.name, []).extend(sent)
            elif sent:
                step = node.meta["step"]
                over = ", ".join(plan.mesh.names[a] for a in step.axes)
                kinds = " / ".join(dict.fromkeys(message.kind for message in sent))
                how = f"{kinds} over {over}"
                rows.append(
                    PlanRow(
                        kind="move",
                        name=_value_name(origin, block),
                        how=how,
                        layout=f"{step.source} → {step.target}",
                        messages=sent,
                    )
                )
                major = False
            continue
        origin = node.meta.get("origin")
        if origin is None or origin.op != "call_function" or origin.name not in plan.choices or node in viewed:
            continue
        module = relative(node.meta.get("module", ""), block)
        layout = str(node.meta["layouts"][0])
        how = words(origin, plan.choices[origin.name])
        heavy = not is_light(node) or bool(read)
        last = rows[-1] if rows and rows[-1].kind == "op" else None
        if last is not None and _joins(last, node, module, layout, heavy, major, owners):
            if last.name == module or heavy:  # a line says of one call how it is split and what it leaves
                last.how = last.how if major else how
                last.layout = layout
            last.ops.append(short_name(node))
        else:
            rows.append(PlanRow(kind="op", name=module, how=how, layout=layout, ops=[short_name(node)]))
            major = False
        major = major or heavy
        rows[-1].messages.extend(sent)
        for placeholder in read:
            if placeholder not in parameters:
                parameters[placeholder] = _parameter_row(placeholder, names[placeholder], block, local)
                rows_at = len(rows)
                rows.insert(rows_at, parameters[placeholder])
                major = False
    for placeholder, sent in moves.items():
        if placeholder in parameters:
            parameters[placeholder].messages.extend(sent)
    return _merged(rows, owners)


def _joins(last: PlanRow, node: fx.Node, module: str, layout: str, heavy: bool, major: bool, owners: set[str]) -> bool:
    """Whether a call is part of the line before it: of one module, or a small step that leaves the layout as it is."""
    if last.name == module:
        return not (heavy and major)
    if module in owners:
        return False
    return short_name(node) == "getitem" or (not heavy and layout == last.layout)


VIEWS = {"reshape", "permute", "unsqueeze", "slice", "expand"}
SMALL = {
    "add",
    "mul",
    "neg",
    "silu",
    "gelu",
    "relu",
    "tanh",
    "reshape",
    "permute",
    "unsqueeze",
    "pow",
    "slice",
    "dropout",
}


def _merged(rows: list[PlanRow], owners: set[str]) -> list[PlanRow]:
    """Operations that the line of a parameter cut in two joined again."""
    out: list[PlanRow] = []
    for row in rows:
        before = next((r for r in reversed(out) if r.kind != "parameter"), None)
        cut = before is not None and before.kind == row.kind == "op" and out[-1].kind == "parameter"
        small = set(row.ops) <= SMALL and row.name not in owners
        same = before is not None and (before.layout == row.layout or (before.how == row.how and set(row.ops) <= VIEWS))
        if cut and same and before is not None and (row.name == before.name or small):
            before.ops.extend(row.ops)
            before.messages.extend(row.messages)
        else:
            out.append(row)
    return out


def _parameters(node: fx.Node, names: dict[str, tuple[str, ...]]) -> list[str]:
    """The parameter that a node is, as stored or brought into another layout."""
    origin = node.meta.get("origin")
    return [origin.name] if origin is not None and origin.name in names else []


def _shows_parameters_alone(node: fx.Node, viewed: dict[fx.Node, list[str]], names: dict[str, tuple[str, ...]]) -> bool:
    """Is a call a view of a parameter (a slice, a transposed one)? It is part of its reader's line."""
    return short_name(node) in VIEWS and all(s in viewed or _parameters(s, names) for s in operands(node))


def _parameter_row(placeholder: str, names: tuple[str, ...], block: str, local: LocalModel) -> PlanRow:
    plan = local.plan
    own = next((n for n in names if block and n.startswith(block + ".")), names[0])
    layout = plan.layouts[placeholder]
    split: dict[int, list[str]] = {}
    for axis, placement in zip(plan.mesh.names, layout.axes, strict=True):
        if isinstance(placement, Shard):
            split.setdefault(placement.dim, []).append(axis)
    lifetime = plan.lifetimes.get(placeholder, "always")
    kept = GATHERED[lifetime]
    moved = any(
        node.meta["step"].forward == "all_gather"
        for node in local.graph.nodes
        if is_collective(node) and node.meta["origin"].name == placeholder
    )
    shape = "x".join(map(str, local.captured.nodes[placeholder].meta["val"].shape)) or "scalar"
    tied = f" (tied: {names[1]})" if len(names) > 1 else ""
    parts = "".join(f", dim {dim} on {', '.join(axes)}" for dim, axes in split.items())
    how = shape + (parts or ", whole on every rank")
    how += (kept if moved else "") + tied
    return PlanRow(kind="parameter", name=relative(own, block), how=how, layout=str(layout))


def _value_name(origin: fx.Node, block: str) -> str:
    if origin.op == "placeholder":
        return str(origin.name)
    module = relative(origin.meta.get("module", ""), block)
    return module or str(origin.name)
