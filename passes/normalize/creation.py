"""Which calls look at a tensor only for its shape or dtype? They become calls without that operand.

So creation calls can be folded, and no tensor travels, and waits for a gradient that never comes, to tell its dtype.
"""

import operator
from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.values.graph import CapturedModel, dtype_of, shape_of

FILL: dict[Any, Any] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.zero.default: 0,
    # A functional graph writes every element of an empty tensor before reading it, so any value will do.
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.empty.memory_format: 0,
    aten.new_empty_strided.default: 0,
    aten.empty_strided.default: 0,
    aten.empty_permuted.default: 0,
}
FILL_ARGUMENT: dict[Any, int] = {aten.full_like.default: 1, aten.new_full.default: 2, aten.fill.Scalar: 1}


def simplify_creation(captured: CapturedModel) -> CapturedModel:
    """`zeros_like(x)` -> `full(sizes, 0)`; `x.type_as(y)` -> x in that dtype; `copy(a, b)` -> b; `pad` by a constant
    -> `constant_pad_nd`."""
    for node in calls(captured.graph, *FILL):
        substitute(node, _full(node, FILL[node.target]))
    for node in calls(captured.graph, *FILL_ARGUMENT):
        substitute(node, _full(node, node.args[FILL_ARGUMENT[node.target]]))
    for node in calls(captured.graph, aten.copy.default):
        substitute(node, _like(node, node.args[1]))
    for node in calls(captured.graph, aten.type_as.default, aten.to.other):
        substitute(node, _like(node, node.args[0]))
    for node in calls(captured.graph, aten.pad.default):
        mode = node.args[2] if len(node.args) > 2 else "constant"
        value: Any = node.args[3] if len(node.args) > 3 else None
        if mode == "constant":
            filled = 0 if value is None else value
            substitute(node, insert(node, aten.constant_pad_nd.default, (node.args[0], node.args[1], filled)))
    for node in calls(captured.graph, aten.index.Tensor):
        indices: Any = node.args[1]
        if len(indices) == 1 and _is_row_lookup(node.args[0], indices[0]):
            rows = _from_first(node, indices[0], shape_of(node.args[0])[0])  # type: ignore[arg-type]
            substitute(node, insert(node, aten.embedding.default, (node.args[0], rows)))
    return captured


def _from_first(anchor: fx.Node, index: fx.Node, rows: int) -> fx.Node:
    """An index whose negative elements count from the end, which `embedding` does not know, counted from the first."""
    if counts_from_first(index):
        return index
    negative = insert(anchor, aten.lt.Scalar, (index, 0))
    return insert(anchor, aten.where.self, (negative, insert(anchor, aten.add.Tensor, (index, rows)), index))


PLACES: dict[Any, tuple[int, ...]] = {
    aten.topk.default: (1,),
    aten.sort.default: (1,),
    aten.max.dim: (1,),
    aten.min.dim: (1,),
    aten.argmax.default: (0,),
    aten.argmin.default: (0,),
    aten.argsort.default: (0,),
}
"""Calls with those of their results that say where something stands."""
MOVES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.alias.default),
    *(aten.expand.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.slice.Tensor, aten.select.int, aten._to_copy.default, aten.clone.default, aten.detach.default),
    *(aten.index.Tensor, aten.gather.default, aten.sort.default),
}
"""Calls whose (first) result has the elements of the first operand."""


def counts_from_first(index: fx.Node) -> bool:
    """Whether no element of an index can be negative: it is made of places that torch found."""
    call: Any = index
    result = 0
    if call.target is operator.getitem:
        call, result = call.args
    if result in PLACES.get(call.target, ()):
        return True
    source = call.args[0] if call.args else None
    return call.target in MOVES and result == 0 and isinstance(source, fx.Node) and counts_from_first(source)


def _full(node: fx.Node, value: Any) -> fx.Node:
    dtype = dtype_of(node)
    if dtype.is_floating_point:
        value = float(value)
    return insert(node, aten.full.default, (list(shape_of(node)), value), {"dtype": dtype})


def _like(node: fx.Node, source: Any) -> fx.Node:
    """The source in dtype and shape of the call."""
    if dtype_of(source) != dtype_of(node):
        source = insert(node, aten._to_copy.default, (source,), {"dtype": dtype_of(node)})
    if shape_of(source) != shape_of(node):
        source = insert(node, aten.expand.default, (source, list(shape_of(node))))
    return source  # type: ignore[no-any-return]


def _is_row_lookup(table: Any, index: Any) -> bool:
    """Is `table[index]` an embedding: rows of a trainable matrix by integer?"""
    if not isinstance(index, fx.Node) or not dtype_of(table).is_floating_point:
        return False
    integer = not dtype_of(index).is_floating_point and dtype_of(index).itemsize > 1
    return table.op == "placeholder" and bool(table.meta["requires_grad"]) and len(shape_of(table)) == 2 and integer
