"""How are dims regrouped and reordered? One `reshape` with whole sizes, one `permute`, never two in a row."""

from typing import Any

import torch
from torch import fx

from autopar.passes.graph_tools import aten, insert, results, substitute
from autopar.values.graph import CapturedModel, shape_of

REGROUPS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view_as.default,
    aten.reshape_as.default,
}
REORDERS = {
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.swapaxes.default,
    aten.numpy_T.default,
    aten.mT.default,
}


def normalize_views(captured: CapturedModel) -> CapturedModel:
    """Unify and merge views; expand with whole sizes, what is broadcast together one by one."""
    for node in list(captured.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in REGROUPS:
            _reshape(node)
        elif node.target in REORDERS:
            _permute(node)
        elif node.target in (aten.expand.default, aten.expand_as.default):
            _expand(node)
        elif node.target is aten.broadcast_tensors.default:
            _broadcast(node)
    return captured


def _reshape(node: fx.Node) -> None:
    source: Any = node.args[0]
    while source.target is aten.reshape.default:
        source = source.args[0]
    if shape_of(source) == shape_of(node):
        substitute(node, source)
        return
    substitute(node, insert(node, aten.reshape.default, (source, list(shape_of(node)))))


def _permute(node: fx.Node) -> None:
    source: Any = node.args[0]
    order = order_of(node)
    while source.target is aten.permute.default:
        order = [source.args[1][dim] for dim in order]
        source = source.args[0]
    if order == list(range(len(order))):
        substitute(node, source)
        return
    substitute(node, insert(node, aten.permute.default, (source, order)))


def order_of(node: fx.Node) -> list[int]:
    """Which operand dim each result dim is, read off a tensor whose strides tell dims apart."""
    source: Any = node.args[0]
    rank = len(shape_of(source))
    probe = torch.empty([2] * rank, device="meta")
    moved = node.target(probe, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return [rank - 1 - (stride.bit_length() - 1) for stride in moved.stride()]


def _expand(node: fx.Node) -> None:
    source: Any = node.args[0]
    while source.target is aten.expand.default:
        source = source.args[0]
    if shape_of(source) == shape_of(node):
        substitute(node, source)
        return
    substitute(node, insert(node, aten.expand.default, (source, list(shape_of(node)))))


def _broadcast(node: fx.Node) -> None:
    """Each result is its own operand, viewed: it has no storage, and no gradient where that has none."""
    sources: Any = node.args[0]
    for position, result in results(node).items():
        source = sources[position]
        if shape_of(source) != shape_of(result):
            source = insert(result, aten.expand.default, (source, list(shape_of(result))))
        substitute(result, source)
