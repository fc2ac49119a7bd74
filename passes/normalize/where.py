"""Which choices are settled? `where` under a condition that is constant and the same everywhere."""

from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.passes.normalize.drop_noops import returns_operand
from autopar.values.graph import CapturedModel, dtype_of, shape_of


def simplify_where(captured: CapturedModel) -> CapturedModel:
    """`where(all true, x, y)` -> x, `where(all false, x, y)` -> y, `masked_fill(x, all false, v)` -> x."""
    for node in calls(captured.graph, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        condition, if_true, if_false = node.args
        settled = uniform(captured, condition)
        if settled is not None:
            _choose(node, if_true if settled else if_false)
    for node in calls(captured.graph, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        if uniform(captured, node.args[1]) is False:
            _choose(node, node.args[0])
    return captured


def uniform(captured: CapturedModel, condition: Any) -> bool | None:
    """The one value of a constant condition, None if it varies or is not constant."""
    while condition.target is aten.expand.default:
        condition = condition.args[0]
    value = captured.constants.get(condition.name)
    return bool(value) if value is not None and value.numel() == 1 else None


def _choose(node: fx.Node, choice: Any) -> None:
    if not isinstance(choice, fx.Node):
        return
    if dtype_of(choice) != dtype_of(node):
        choice = insert(node, aten._to_copy.default, (choice,), {"dtype": dtype_of(node)})
    expanded = insert(node, aten.expand.default, (choice, list(shape_of(node))))
    substitute(node, choice if returns_operand(expanded) else expanded)
