"""Which calls read how a tensor is stored? Only those that read it contiguous: copies are dropped, strides may change.

`as_strided` reads elements by their place in storage: it becomes a lookup in the operand's elements in that order.
"""

import math
from typing import Any

from torch import fx

from autopar.errors import CaptureError
from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.values.graph import CapturedModel, shape_of

STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
READS_STORAGE = (aten.view.dtype, aten.view_as_complex.default)
"""Calls that need their operand's last dim contiguous; `drop_noops` keeps the copy that makes it so."""
PENDING: dict[Any, Any] = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Views of which the operation is pending; `view_as_real` takes none, and torch.export saw no `resolve_conj`."""


def resolve_storage(captured: CapturedModel) -> CapturedModel:
    """`as_strided` becomes `index` of constants, `as_strided_scatter` `index_put`; other readers get a contiguous
    operand, conjugates and negatives are computed."""
    for node in calls(captured.graph, *PENDING):
        substitute(node, insert(node, PENDING[node.target], node.args))
    for node in calls(captured.graph, *READS_STORAGE):
        node.args = (insert(node, aten.contiguous.default, (node.args[0],)), *node.args[1:])
    for node in calls(captured.graph, *STRIDED):
        _look_up(node)
    return captured


def offset_from_operand(node: fx.Node, start: int) -> None:
    """Count where an `as_strided` call begins from where its operand does, at `start` in their storage."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("storage_offset") is not None:
        given["storage_offset"] -= start
    node.args, node.kwargs = tuple(given[name] for name in names if name in given), {}


def _look_up(node: fx.Node) -> None:
    x: Any = node.args[0]
    scatters = node.target is aten.as_strided_scatter.default
    sizes, strides, *rest = node.args[2 if scatters else 1 :]
    offset: Any = rest[0] if rest and rest[0] is not None else 0
    order = stored_order(x)
    spans = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]  # type: ignore[arg-type]
    if order is None or sum(spans) + offset >= max(1, math.prod(shape_of(x))) or offset < 0:
        raise CaptureError(
            f"as_strided in {node.meta['module'] or 'the model'} reads memory that is not its operand's, a tensor "
            f"{shape_of(x)} with strides {x.meta['val'].stride()}; use contiguous() before it, or slices or unfold"
        )
    stored = insert(node, aten.permute.default, (x, order)) if order != sorted(order) else x
    flat = insert(node, aten.reshape.default, (stored, [-1]))
    places = insert(node, aten.arange.default, (shape_of(flat)[0],))
    places = insert(node, aten.as_strided.default, (places, sizes, strides, offset))
    if not scatters:
        substitute(node, insert(node, aten.index.Tensor, (flat, [places])))
        return
    written = insert(node, aten.index_put.default, (flat, [places], node.args[1]))
    written = insert(node, aten.reshape.default, (written, list(shape_of(stored))))
    if stored is not x:
        written = insert(node, aten.permute.default, (written, [order.index(dim) for dim in range(len(order))]))
    substitute(node, written)


def stored_order(x: fx.Node) -> list[int] | None:
    """The dims of a value as it was captured, outermost in storage first; None if its storage has gaps or overlaps."""
    value = x.meta["val"]
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim] > 1), reverse=True)
    return order if value.permute(order).is_contiguous() else None
