"""Where is a small tensor made large? As late as possible: an expand moves behind the calls that broadcast anyway."""

from typing import Any

import torch
from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.passes.normalize.elementwise import is_elementwise
from autopar.values.graph import CapturedModel, dtype_of, operands, shape_of

ATTENTION = aten.scaled_dot_product_attention.default


def sink_expands(captured: CapturedModel) -> CapturedModel:
    """Elementwise calls and embeddings run on what was expanded; attention masks broadcast by themselves."""
    for node in list(captured.graph.nodes):
        if node.op != "call_function":
            continue
        if is_elementwise(node.target):
            _sink(node)
        elif node.target is aten.embedding.default:
            _sink_lookup(node)
    for node in calls(captured.graph, ATTENTION):
        if len(node.args) > 3 and _is_expand(node.args[3]):
            mask = node.args[3].args[0]  # type: ignore[union-attr]
            if len(shape_of(mask)) >= 2:  # type: ignore[arg-type]
                node.args = (*node.args[:3], mask, *node.args[4:])
    return captured


def _sink(node: fx.Node) -> None:
    """Rewrite a call on expanded operands as the expand of the call on the operands themselves.

    Not where that changes what dtype is computed in: a tensor without dims does not take part in that.
    """
    several = len({dtype_of(operand) for operand in operands(node)}) > 1
    if several and any(_is_expand(operand) and not shape_of(_unexpanded(operand)) for operand in operands(node)):
        return
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _unexpanded)
    if args == node.args and kwargs == node.kwargs:
        return
    small = insert(node, node.target, args, kwargs)
    if shape_of(small) != shape_of(node):
        small = insert(node, aten.expand.default, (small, list(shape_of(node))))
    substitute(node, small)


def _sink_lookup(node: fx.Node) -> None:
    weight, index, *rest = node.args
    counts_rows = len(rest) > 1 and bool(rest[1])  # scale_grad_by_freq: how often the whole batch reads a row
    if not _is_expand(index) or counts_rows:
        return
    small = insert(node, aten.embedding.default, (weight, _unexpanded(index), *rest))
    substitute(node, insert(node, aten.expand.default, (small, list(shape_of(node)))))


def _is_expand(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is torch.ops.aten.expand.default


def _unexpanded(node: Any) -> Any:
    return node.args[0] if _is_expand(node) else node
