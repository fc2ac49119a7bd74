"""Which sums are in a `scatter_reduce`? One of sums is a `scatter_add`; a mean is a sum and a count of what arrives.

A sum may be split by what arrives (edges of a graph), a mean may not; and a `scatter_add` keeps its index alone for
backward.
"""

from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.values.graph import CapturedModel, dtype_of, shape_of


def part_scatters(captured: CapturedModel) -> CapturedModel:
    """Sums and means of floating numbers by `scatter_add`."""
    for node in calls(captured.graph, aten.scatter_reduce.two):
        given: tuple[Any, ...] = node.args
        x, dim, index, source, how = given[:5]
        if not dtype_of(x).is_floating_point or shape_of(index) != shape_of(source):
            continue
        with_itself = bool(given[5] if len(given) > 5 else node.kwargs.get("include_self", True))
        if how == "sum" and with_itself:
            substitute(node, insert(node, aten.scatter_add.default, (x, dim, index, source)))
        elif how == "mean":
            substitute(node, _mean(node, x, dim, index, source, with_itself))
    return captured


def _mean(node: fx.Node, x: Any, dim: Any, index: Any, source: Any, with_itself: bool) -> fx.Node:
    """`(x + sum) / (1 + count)`, or without x, which stays where nothing arrives."""
    start = insert(node, aten.ones_like.default if with_itself else aten.zeros_like.default, (x,))
    ones = insert(node, aten.ones_like.default, (source,))
    count = insert(node, aten.scatter_add.default, (start, dim, index, ones))
    into = x if with_itself else insert(node, aten.zeros_like.default, (x,))
    total = insert(node, aten.scatter_add.default, (into, dim, index, source))
    if with_itself:
        return insert(node, aten.div.Tensor, (total, count))
    arrived = insert(node, aten.gt.Scalar, (count, 0))
    mean = insert(node, aten.div.Tensor, (total, insert(node, aten.clamp_min.default, (count, 1))))
    return insert(node, aten.where.self, (arrived, mean, x))
