"""How is a projection written? One n-dim `linear(x, w, b)`: a flattened dim could not carry a split sequence."""

import math
from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.values.graph import CapturedModel, shape_of


def fold_linear(captured: CapturedModel) -> CapturedModel:
    """`addmm(b, x, w)` and `mm(x, w)` by a matrix of the model become `linear(x, permute(w), b)`; then the flattening
    before a linear moves behind it, where it meets the view that undoes it."""
    graph = captured.graph
    for node in calls(graph, aten.addmm.default):
        bias, x, weight = node.args
        if not node.kwargs and shape_of(bias) == shape_of(node)[1:]:  # type: ignore[arg-type]
            _as_linear(node, x, weight, bias)
    for node in calls(graph, aten.mm.default, aten.matmul.default):
        x, weight = node.args
        if len(shape_of(weight)) == 2 and _is_parameter(weight):  # type: ignore[arg-type]
            _as_linear(node, x, weight, None)
    for node in calls(graph, aten.linear.default):
        _part_broadcast_bias(node)
    for node in calls(graph, aten.linear.default):
        _move_flattening_behind(node)
    return captured


def _part_broadcast_bias(node: fx.Node) -> None:
    """A bias that is not one number a feature is added behind: `linear` would broadcast it."""
    if len(node.args) > 2 and shape_of(node.args[2]) != shape_of(node)[-1:]:  # type: ignore[arg-type]
        plain = insert(node, aten.linear.default, node.args[:2])
        substitute(node, insert(node, aten.add.Tensor, (plain, node.args[2])))


def _as_linear(node: fx.Node, x: Any, weight: Any, bias: Any) -> None:
    if weight.target is aten.permute.default and shape_of(weight) == shape_of(weight.args[0])[::-1]:
        transposed = weight.args[0]
    else:
        transposed = insert(node, aten.permute.default, (weight, [1, 0]))
    args = (x, transposed) if bias is None else (x, transposed, bias)
    substitute(node, insert(node, aten.linear.default, args))


def _is_parameter(weight: Any) -> bool:
    while weight.target in (aten.permute.default, aten.slice.Tensor, aten._to_copy.default):
        weight = weight.args[0]
    return weight.op == "placeholder" and bool(weight.meta["requires_grad"])


def _move_flattening_behind(node: fx.Node) -> None:
    flat: Any = node.args[0]
    if flat.target is not aten.reshape.default:
        return
    x = flat.args[0]
    leading = leading_dims(shape_of(x), shape_of(flat))
    if leading is None:
        return
    features = shape_of(flat)[-1]
    if shape_of(x)[-1] != features:  # heads merge into features by the same view: keep that part of it before
        x = insert(node, aten.reshape.default, (x, [*leading, features]))
    result = insert(node, aten.linear.default, (x, *node.args[1:]))
    substitute(node, insert(node, aten.reshape.default, (result, list(shape_of(node)))))


def leading_dims(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    """The two or more dims that a reshape to `after = [rows, features]` merges into rows; None if it does not."""
    if len(after) != 2:
        return None
    for count in range(2, len(before)):
        if math.prod(before[:count]) == after[0] and math.prod(before[count:]) == after[1]:
            return before[:count]
    return None
