"""Which calls can Python make with less ado? Those of aten ops that torch binds itself: `torch.mul(x, y)`.

An aten overload takes its arguments through a generic stack, which costs about a microsecond a call more than the
function that torch generates for it. Both lead to the same op: `torch.mul` finds the overload by its arguments.
"""

from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F


def call_natively(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph whose calls are made through torch's own bindings, where there are any."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        if node.op == "call_function" and "self" not in node.kwargs:
            is_torch = isinstance(node.target, torch._ops.OpOverload)
            if is_torch and (bound := native(node.target)) is not node.target and not _leaves_out_a_tensor(node):
                node.args, node.kwargs = with_reduction(node)
                node.target = bound
    return copy


def with_reduction(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, how a loss is reduced among them: the op's default is the mean, its binding's is none."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    place = next((i for i, argument in enumerate(arguments) if argument.name == "reduction"), None)
    if place is None or place < len(node.args):
        return node.args, dict(node.kwargs)
    kwargs = dict(node.kwargs)
    missing = arguments[len(node.args) : place + 1]
    return (*node.args, *(kwargs.pop(a.name, a.default_value) for a in missing)), kwargs


def _leaves_out_a_tensor(node: fx.Node) -> bool:
    """Is there a None in a list of tensors, as for `x[:, i] = y`? Bindings refuse it."""
    return any(isinstance(value, list | tuple) and None in value for value in (*node.args, *node.kwargs.values()))


@cache
def native(target: Callable[..., Any]) -> Callable[..., Any]:
    """torch's binding of an aten op that takes the same arguments (`self` by position); anything else is itself.

    Functions that torch wrote in Python are left out: they have signatures of their own.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    name = target.overloadpacket.__name__
    for place, kind in ((torch, BuiltinFunctionType), (F, BuiltinFunctionType), (Tensor, MethodDescriptorType)):
        found = getattr(place, name, None)
        if isinstance(found, kind) and not name.startswith("_"):
            return found
    return target
