"""How do tensors lie when a graph runs? Their strides, call by call, without values.

A pass that writes other calls leaves the strides of what it replaced. In a stage what is received comes contiguous,
whatever it was where it was made: what a permutation made (heads of attention, an image's patches) is sent as a
contiguous copy, and sums of it then lie otherwise than in the whole graph; so does what the stage sends on, which is
copied again only where it is no contiguous tensor.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.graph_tools import run_without_values
from autopar.values.graph import CapturedModel, operands

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


def lay_out(captured: CapturedModel) -> CapturedModel:
    """Give every value of a graph the strides that it has when it runs."""
    _lay_out(captured.graph, set(captured.graph.nodes), ())
    return captured


def lay_out_received(graph: fx.Graph, received: Collection[str]) -> None:
    """Give what is `received`, and what is computed of it, the strides that it has in the stage's own graph."""
    _lay_out(graph, set(), received)


def _lay_out(graph: fx.Graph, changed: set[fx.Node], contiguous: Collection[str]) -> None:
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in contiguous:
            value: Any = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
        elif is_known(node) and any(source in changed for source in operands(node)):
            value = results_of(node, {})
        else:
            continue
        if _strides(value) != _strides(node.meta["val"]):
            node.meta = {**node.meta, "val": value}
            changed.add(node)


def results_of(node: fx.Node, lying: Mapping[str, Tensor]) -> Any:
    """A call's results without values, of operands as they lie if not as the graph says. A view may copy."""
    given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: lying.get(n.name, n.meta["val"]))
    args, kwargs = given
    target = aten.reshape.default if node.target in VIEWS else node.target
    return run_without_values(target, args, kwargs, known=node.meta["val"])


def is_known(node: fx.Node) -> bool:
    """Whether torch says how results lie, without values."""
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    return node.op == "call_function" and (is_torch or node.target is operator.getitem)


def _strides(value: Any) -> tuple[tuple[int, ...], ...]:
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(v.stride() for v in values if isinstance(v, Tensor))
