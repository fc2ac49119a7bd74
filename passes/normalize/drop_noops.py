"""Which calls return their operand? Aliases, copies, casts to the same dtype, views of the same size, x + 0, x * 1."""

from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.graph_tools import substitute
from autopar.passes.normalize.storage import READS_STORAGE
from autopar.values.graph import CapturedModel

aten = torch.ops.aten

ALIASES = {
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.positive.default,
    aten.resolve_conj.default,  # nothing is pending on a value (`resolve_storage`)
    aten.resolve_neg.default,
}
SAME_IF_SHAPE_AND_DTYPE = {
    aten._to_copy.default,
    aten.to.dtype,
    aten.expand.default,
    aten.expand_as.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.repeat.default,
}
NEUTRAL = {
    aten.add.Tensor: 0,
    aten.add.Scalar: 0,
    aten.sub.Tensor: 0,
    aten.sub.Scalar: 0,
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
}


def drop_noops(captured: CapturedModel) -> CapturedModel:
    """Let users of a call that returns its operand read the operand."""
    for node in list(captured.graph.nodes):
        if node.op == "call_function" and returns_operand(node):
            source = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
            substitute(node, source)
    return captured


def returns_operand(node: fx.Node) -> bool:
    """Is the call's value its first operand's, gradient included?"""
    target: Any = node.target
    source = node.args[0] if node.args else None
    if target is aten.cat.default:
        return len(node.args[0]) == 1  # type: ignore[arg-type]
    if not isinstance(source, fx.Node) or not isinstance(source.meta["val"], Tensor):
        return False
    if target in ALIASES:
        return not any(user.target in READS_STORAGE for user in node.users)
    if target is aten.detach.default:
        return not source.meta["requires_grad"]
    if target is aten.permute.default:
        return list(node.args[1]) == list(range(source.meta["val"].dim()))  # type: ignore[arg-type]
    if target is aten.constant_pad_nd.default:  # by -1 and 1 the shape stays and the values move
        return not any(node.args[1])  # type: ignore[arg-type]
    if not same_shape_and_dtype(node, source):
        return False
    if target in SAME_IF_SHAPE_AND_DTYPE:
        return True
    if target in NEUTRAL and len(node.args) > 1:
        other = node.args[1]
        return isinstance(other, int | float) and not isinstance(other, bool) and other == NEUTRAL[target]
    return False


def same_shape_and_dtype(node: fx.Node, source: fx.Node) -> bool:
    left, right = node.meta["val"], source.meta["val"]
    return isinstance(left, Tensor) and left.shape == right.shape and left.dtype == right.dtype
