"""What does torch's loss reduce? Each element's or row's loss, then their mean or sum, as calls of their own.

The kernels that do both write every element's loss first, and what they return is one number on all of that storage:
whoever holds the loss of a micro-batch to the step's end holds them all. Apart, each has a rule by which it splits.
"""

from typing import Any

import torch
from torch import fx

from autopar.passes.graph_tools import aten, insert, substitute
from autopar.values.graph import CapturedModel

NONE, MEAN = 0, 1
REDUCTIONS = {MEAN: aten.mean.default, 2: aten.sum.default}
"""By ATen's `reduction`."""
OF_COUNTS = ("nll_loss", "cross_entropy", "ctc_loss")
"""Losses whose mean is no mean of what they return unreduced: by weights, by labels that count, by lengths."""


def part_losses(captured: CapturedModel) -> CapturedModel:
    """Losses without a reduction, and a mean or a sum of them; an `l1_loss` is by definition `|x - y|`."""
    for node in list(captured.graph.nodes):
        position = reduction_position(node)
        if position is None:
            continue
        args, kwargs = list(node.args), dict(node.kwargs)
        reduction: Any = args[position] if position < len(args) else kwargs.get("reduction", MEAN)
        if node.target is aten.l1_loss.default:
            each = insert(node, aten.abs.default, (insert(node, aten.sub.Tensor, tuple(args[:2])),))
        elif reduction == NONE:
            continue
        else:
            if position < len(args):
                args[position] = NONE
            else:
                kwargs["reduction"] = NONE
            each = insert(node, node.target, tuple(args), kwargs)
        substitute(node, each if reduction == NONE else insert(node, REDUCTIONS[reduction], (each,)))
    return captured


def reduction_position(node: fx.Node) -> int | None:
    """Where a call takes ATen's `reduction`, if it is a loss whose mean is that of what it returns unreduced."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    schema = node.target._schema
    name = schema.name.removeprefix("aten::")
    if len(schema.returns) != 1 or name.startswith(OF_COUNTS) or name.endswith("backward"):
        return None
    names = [a.name for a in schema.arguments if isinstance(a.type, torch.IntType)]
    if "reduction" not in names:
        return None
    return [a.name for a in schema.arguments].index("reduction")
