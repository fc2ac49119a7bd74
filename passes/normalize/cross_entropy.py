"""Which dims does the loss see? All of them, classes last: `cross_entropy(logits[b, s, v], target[b, s])`."""

from typing import Any

from torch import fx

from autopar.ops.cross_entropy import cross_entropy
from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.passes.normalize.linear import leading_dims
from autopar.values.graph import CapturedModel, dtype_of, shape_of

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def normalize_cross_entropy(captured: CapturedModel) -> CapturedModel:
    """Undo the two flattening views around `cross_entropy_loss` and put classes last.

    Calls with class weights or soft targets stay as they are.
    """
    for node in calls(captured.graph, aten.cross_entropy_loss.default):
        args: list[Any] = [*node.args, *(None,) * (6 - len(node.args))]
        logits, target, weight, reduction, ignore_index, smoothing = args
        rank = len(shape_of(logits))
        if weight is not None or dtype_of(target).is_floating_point or rank < 2:
            continue
        if rank > 2:
            logits = insert(node, aten.permute.default, (logits, [0, *range(2, rank), 1]))
        else:
            logits, target = unflatten(node, logits, target)
        options = {
            "ignore_index": -100 if ignore_index is None else ignore_index,
            "label_smoothing": 0.0 if smoothing is None else smoothing,
            "reduction": REDUCTIONS[1 if reduction is None else reduction],
        }
        loss = insert(node, cross_entropy, (logits, target), options)
        if shape_of(loss) != shape_of(node):
            loss = insert(node, aten.reshape.default, (loss, list(shape_of(node))))
        substitute(node, loss)
    return captured


def unflatten(anchor: fx.Node, logits: Any, target: Any) -> tuple[fx.Node, fx.Node]:
    """Logits and target before they were flattened to [rows, classes] and [rows]; as given if they were not."""
    if logits.target is not aten.reshape.default:
        return logits, target
    whole = logits.args[0]
    leading = leading_dims(shape_of(whole), shape_of(logits))
    if leading is None or shape_of(whole) != (*leading, shape_of(logits)[-1]):
        return logits, target
    source = target.args[0] if target.target is aten.reshape.default else target
    if shape_of(source) != leading:
        source = insert(anchor, aten.reshape.default, (target, list(leading)))
    return whole, source
