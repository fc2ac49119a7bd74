"""Which assertions are the model's own? Each becomes a check that the loss passes through, so that it runs with it.

What is counted are elements that fail, before any reduction: `(x > 0).all()` fails at as many places as `x > 0` is
false. A count over a split dim is a summand on each rank, and a summand is looked at as it is, since none is negative:
no rank gathers anything, and each sees what it has of the values.
"""

from typing import Any

import torch
from torch import fx

from autopar.ops.checked import ERROR, WARNING, checked
from autopar.passes.graph_tools import ASSERTIONS, aten, calls, insert, output_node, outputs
from autopar.values.graph import CapturedModel

SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.view.default, aten.reshape.default}
ALL = {aten.all.default, aten._is_all_true.default}
ANY = {aten.any.default, aten._is_any_true.default}


def keep_checks(captured: CapturedModel) -> CapturedModel:
    """`_assert_async(condition, message)` of the model's own -> `loss = checked(loss, failures, message)`."""
    graph = captured.graph
    for node in calls(graph, *ASSERTIONS):
        condition, message = node.args[:2]
        if not isinstance(condition, fx.Node) or not str(message).startswith((ERROR, WARNING)):
            continue
        failing = _failing(node, condition, False)
        counted = insert(node, aten._to_copy.default, (failing,), {"dtype": torch.float32})
        failures = insert(node, aten.sum.default, (counted,))
        end = output_node(graph)
        loss, *others = outputs(graph)
        kept = insert(end, checked, (loss, failures), {"message": message})
        end.args = ((kept, *others),)
        if node.target is aten._assert_async.msg:
            graph.erase_node(node)
    return captured


def _failing(anchor: fx.Node, condition: fx.Node, value: bool) -> fx.Node:
    """Where a condition is `value`, in a tensor that is true anywhere if it is."""
    source: Any = condition.args[0] if condition.args else None
    if condition.op == "call_function" and isinstance(source, fx.Node):
        if condition.target in SAME:
            return _failing(anchor, source, value)
        if condition.target is aten.logical_not.default:
            return _failing(anchor, source, not value)
        if (condition.target in ALL and not value) or (condition.target in ANY and value):
            return _failing(anchor, source, value)
    if value:
        return insert(anchor, aten.ne.Scalar, (condition, 0))
    return insert(anchor, aten.logical_not.default, (condition,))
