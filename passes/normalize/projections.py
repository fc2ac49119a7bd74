"""Can parts of a fused projection be split by heads? Not while they share a matrix: each part gets its own linear."""

from itertools import pairwise
from typing import Any

from torch import fx

from autopar.ops.grouped_linear import grouped_linear
from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.passes.normalize.slices import bounds, take
from autopar.values.graph import CapturedModel, shape_of


def split_projections(captured: CapturedModel) -> CapturedModel:
    """A linear (such as GPT-2's `c_attn`) of which only slices of the last dim are read becomes a linear a slice, whose
    weight and bias are slices of the whole: contiguous shards of the fused weight would not align with heads."""
    for node in calls(captured.graph, aten.linear.default, grouped_linear):
        if is_fused(node):
            make = _part if node.target is aten.linear.default else _part_of_grouped
            for part in list(node.users):
                _, _, start, end, _ = bounds(part)
                substitute(part, make(part, node, start, end))
    return captured


def is_fused(node: fx.Node) -> bool:
    """Is a linear's result read only through two or more slices of its last dim that do not overlap?"""
    last = len(shape_of(node)) - 1
    if len(node.users) < 2 or any(user.target is not aten.slice.Tensor for user in node.users):
        return False
    spans = [bounds(user) for user in node.users]
    if any(dim != last or step != 1 for _, dim, _, _, step in spans):
        return False
    edges = sorted((start, end) for _, _, start, end, _ in spans)
    return all(left[1] <= right[0] for left, right in pairwise(edges))


def _part(anchor: fx.Node, node: fx.Node, start: int, end: int) -> fx.Node:
    x, weight, *bias = node.args
    rows = _rows(anchor, weight, start, end)
    return insert(anchor, aten.linear.default, (x, rows, *(take(anchor, b, 0, start, end) for b in bias)))


def _part_of_grouped(anchor: fx.Node, node: fx.Node, start: int, end: int) -> fx.Node:
    x, ids, weight = node.args
    return insert(anchor, grouped_linear, (x, ids, _columns(anchor, weight, start, end)))


def _columns(anchor: fx.Node, weight: Any, start: int, end: int) -> Any:
    if weight.target is aten.permute.default:
        order = weight.args[1]
        return insert(anchor, aten.permute.default, (take(anchor, weight.args[0], order[-1], start, end), order))
    return take(anchor, weight, len(shape_of(weight)) - 1, start, end)


def _rows(anchor: fx.Node, weight: Any, start: int, end: int) -> fx.Node:
    if weight.target is aten.permute.default:  # slice the stored parameter, so that the slice is next to it
        columns = take(anchor, weight.args[0], 1, start, end)
        return insert(anchor, aten.permute.default, (columns, [1, 0]))
    return take(anchor, weight, 0, start, end)  # type: ignore[no-any-return]
