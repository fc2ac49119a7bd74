"""How do tensors lie in a stage? What it receives comes contiguous, whatever it was where it was made.

What a permutation made (heads of attention, an image's patches) is sent as a contiguous copy, and sums of it then lie
otherwise than in the whole graph; so does what the stage sends on, which is copied again only where it is no
contiguous tensor.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import operands


def lay_out_received(graph: fx.Graph, received: Collection[str]) -> None:
    """Give what is `received`, and what is computed of it, the strides that it has in the stage's own graph."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in received:
            value: Any = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
        elif _is_known(node) and any(source in changed for source in operands(node)):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            value = node.target(*args, **kwargs)
        else:
            continue
        if _strides(value) != _strides(node.meta["val"]):
            node.meta = {**node.meta, "val": value}
            changed.add(node)


def _is_known(node: fx.Node) -> bool:
    """Whether torch says how results lie, without values."""
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    is_torch = is_torch and "attention" not in str(node.target)
    return node.op == "call_function" and (is_torch or node.target is operator.getitem)


def _strides(value: Any) -> tuple[tuple[int, ...], ...]:
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(v.stride() for v in values if isinstance(v, Tensor))
