"""Which values are the same at every step? What depends on no parameter, buffer or input is evaluated once, here.

A mask over [batch, 1, sequence, sequence] is constant along the batch: values are kept in *compressed* form, size 1
along each dim where they do not vary, so that nothing is ever as large as the batch it stands for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.ops.batch_norm import batch_norm
from autopar.passes.graph_tools import aten, insert, is_aten, substitute
from autopar.passes.normalize.elementwise import is_elementwise
from autopar.passes.normalize.storage import READS_STORAGE
from autopar.values.graph import CapturedModel, shape_of

ALONG = (aten.cumsum.default, aten.cumprod.default, aten.diff.default)
"""Calls that do the same along one dim whatever the others hold."""
MASKS = (torch.bool, torch.uint8)
"""dtypes by which `index` selects, where others say the place."""
_READ_AS_CONTIGUOUS = (aten.batch_norm.default, batch_norm)
"""Calls whose kernels read a tensor's memory whatever its strides: what they read is not compressed."""
VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Copies that they rest on are not kept (`drop_noops`), nor are the strides of a compressed value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """`tensor` expanded to `shape` is the value."""

    tensor: Tensor
    shape: tuple[int, ...]

    @property
    def whole(self) -> Tensor:
        return self.tensor.expand(self.shape)


def compress(value: Tensor) -> Tensor:
    """The value with size 1 along each dim where it is constant."""
    for dim in range(value.dim()):
        if value.shape[dim] <= 1:
            continue
        if value.stride(dim) == 0 or _is_constant(value, dim):
            value = value.narrow(dim, 0, 1)
    return value


def fold_constants(captured: CapturedModel) -> CapturedModel:
    """Evaluate constant calls; those that others read become constant placeholders, expanded where they vary less."""
    graph = captured.graph
    values = {name: Compressed(tensor=compress(t), shape=tuple(t.shape)) for name, t in captured.constants.items()}
    frontier: list[fx.Node] = []
    pending: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _foldable(node, values):
            values[node.name] = evaluate(node, values)
            pending[node] = len(node.users)
            if any(user.op == "output" or not _foldable(user, values) for user in node.users):
                frontier.append(node)
        for operand in node.all_input_nodes:  # what no later call reads is freed, masks being large
            if operand in pending:
                pending[operand] -= 1
                if pending[operand] == 0 and operand not in frontier:
                    values.pop(operand.name, None)
    placed = {node.name: node for node in graph.nodes}
    for own in (*captured.constants, *(node.name for node in frontier)):
        if any(user.target in _READ_AS_CONTIGUOUS for user in placed[own].users):
            values[own] = replace(values[own], tensor=values[own].whole.contiguous())
    constants = {name: values[name].tensor for name in captured.constants}
    last = _last_of_constants(captured)
    for node in frontier:
        value = values[node.name]
        alike = (n for n, t in constants.items() if shape_of(placed[n]) == t.shape and _equal(t, value.tensor))
        name = next(alike, None)  # not one that is compressed below
        if name is None:
            name = _fresh(f"c_{node.name}", graph)
            constants[name] = value.tensor.clone(memory_format=torch.contiguous_format)
            last = placed[name] = _placeholder(last, name, constants[name])
        placeholder = placed[name]
        if shape_of(placeholder) != value.shape:
            placeholder = insert(node, aten.expand.default, (placeholder, list(value.shape)))
        substitute(node, placeholder)
    for name in captured.constants:
        _expand_lifted(graph, name, values[name])
    return replace(captured, constants=constants)


def evaluate(node: fx.Node, values: Mapping[str, Compressed]) -> Compressed:
    """Run a call on the CPU: elementwise calls on compressed operands, calls that work along one dim or look up on what
    varies along it or is looked up, others on stride-0 views of the whole."""
    target: Any = aten.reshape.default if node.target in VIEWS else node.target

    def value(operand: fx.Node) -> Tensor:
        known = values[operand.name]
        if is_elementwise(target):
            return known.tensor
        return known.whole.contiguous() if target in READS_STORAGE else known.whole

    if target in ALONG and shape_of(node):
        args, kwargs = _along(node, values)
    elif target is aten.index.Tensor:
        args, kwargs = _looked_up(node, values)
    else:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        result = target(*args, **kwargs)
    return Compressed(tensor=compress(result), shape=shape_of(node))


def _along(node: fx.Node, values: Mapping[str, Compressed]) -> tuple[Any, Any]:
    """Arguments of a call of `ALONG`, with size 1 along every other dim along which all operands are constant."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    operands = [values[operand.name] for operand in node.all_input_nodes]
    dim = int(given.get("dim", -1)) % len(operands[0].shape)
    sizes = [max(known.tensor.shape[d] for known in operands) for d in range(len(operands[0].shape))]

    def value(operand: fx.Node) -> Tensor:
        known = values[operand.name]
        return known.tensor.expand([known.shape[d] if d == dim else n for d, n in enumerate(sizes)])

    found: tuple[Any, Any] = fx.node.map_arg((node.args, node.kwargs), value)
    return found


def _looked_up(node: fx.Node, values: Mapping[str, Compressed]) -> tuple[Any, Any]:
    """Arguments of `aten.index`: where a tensor is constant along an indexed dim, its first element is what all are."""
    operand, indices, *_ = cast(tuple[Any, ...], node.args)
    known = values[operand.name]
    places = [None if index is None else values[index.name] for index in indices]
    if any(place is not None and place.tensor.dtype in MASKS for place in places):  # a mask, of one or more dims
        return (known.whole, [None if place is None else place.whole for place in places]), {}
    found: list[Tensor | None] = []
    for dim, place in enumerate(places):
        if place is not None and known.tensor.shape[dim] == 1 < known.shape[dim]:
            found.append(torch.zeros([1] * len(place.shape), dtype=torch.int64))
        else:
            found.append(None if place is None else place.tensor)
    return (known.tensor, found), {}


def _foldable(node: fx.Node, values: dict[str, Compressed]) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not is_aten(target):
        return False
    if not isinstance(node.meta["val"], Tensor) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return all(operand.name in values for operand in node.all_input_nodes)


def _is_constant(value: Tensor, dim: int) -> bool:
    first = value.narrow(dim, 0, 1)
    if not torch.equal(first, value.narrow(dim, 1, 1)):  # the cheap test first: most dims vary at once
        return False
    return bool((value == first).all())


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def _expand_lifted(graph: fx.Graph, name: str, value: Compressed) -> None:
    """A constant that came with the model is stored compressed as well."""
    node = next(n for n in graph.nodes if n.op == "placeholder" and n.name == name)
    if shape_of(node) == tuple(value.tensor.shape):
        return
    node.meta["val"] = torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta")
    for user in list(node.users):
        expanded = insert(user, aten.expand.default, (node, list(value.shape)))
        user.replace_input_with(node, expanded)


def _last_of_constants(captured: CapturedModel) -> fx.Node:
    """The node behind which a new constant's placeholder goes: the last one that is no input, or the graph's root."""
    first_input = captured.inputs[0].placeholder if captured.inputs else None
    nodes: list[fx.Node] = list(captured.graph.nodes)
    return next(n for n in nodes if n.op != "placeholder" or n.name == first_input).prev


def _placeholder(last: fx.Node, name: str, value: Tensor) -> fx.Node:
    with last.graph.inserting_after(last):
        node = last.graph.create_node("placeholder", name, name=name)
    val: Any = torch.empty(value.shape, dtype=value.dtype, device="meta")
    node.meta = {"val": val, "requires_grad": False, "module": ""}
    return node


def _fresh(wish: str, graph: fx.Graph) -> str:
    taken = {node.name for node in graph.nodes}
    name, number = wish, 1
    while name in taken:
        name, number = f"{wish}_{number}", number + 1
    return name
