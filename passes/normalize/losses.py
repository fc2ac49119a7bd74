"""What does torch's loss of two tensors reduce? Each element's loss, then their mean or sum, as calls of their own.

The kernels that do both write every element's loss first, and what they return is one number on all of that storage:
whoever holds the loss of a micro-batch to the step's end holds them all. Apart, each has a rule by which it splits.
"""

from typing import Any

from autopar.graph import CapturedModel
from autopar.passes.graph_tools import aten, calls, insert, substitute

TARGETS = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.l1_loss.default,
)
"""`loss(x, y, reduction, ...)`; the last is by definition `|x - y|`."""

NONE, MEAN = 0, 1
REDUCTIONS = {MEAN: aten.mean.default, 2: aten.sum.default}
"""By ATen's `reduction`."""


def part_losses(captured: CapturedModel) -> CapturedModel:
    """Losses of elements without a reduction, and a mean or a sum of them."""
    for node in calls(captured.graph, *TARGETS):
        x, y, *rest = node.args
        kwargs = dict(node.kwargs)
        named = kwargs.pop("reduction", MEAN)
        reduction: Any
        reduction, *options = rest or [named]
        if node.target is aten.l1_loss.default:
            each = insert(node, aten.abs.default, (insert(node, aten.sub.Tensor, (x, y)),))
        elif reduction == NONE:
            continue
        else:
            each = insert(node, node.target, (x, y, NONE, *options), kwargs)
        reduced = each if reduction == NONE else insert(node, REDUCTIONS[reduction], (each,))
        substitute(node, reduced)
    return captured
