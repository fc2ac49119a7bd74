"""How is a call written? Positional arguments by position, defaults left out, dims counted from 0, no device."""

from typing import Any

import torch
from torch import fx

from autopar.passes.graph_tools import is_aten
from autopar.values.graph import CapturedModel, operands

DIM_ARGUMENTS = {"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"}
# Where a result lives follows from its operands; creation calls become constants or take the device they run on.
DROPPED = {"device", "layout", "pin_memory", "non_blocking", "memory_format"}
ADDS_A_DIM = {"unsqueeze", "unsqueeze_copy", "stack", "diag_embed"}
BROADCASTS = {"cosine_similarity", "cross", "linalg_cross", "linalg_vecdot", "cat", "concat", "concatenate"}
"""Dims of these count in the operands broadcast together; `cat` also takes empty operands of rank 1."""
OTHERWISE = {"_weight_norm", "norm_except_dim"}
"""A `dim` of -1 has a meaning of its own: all dims."""


def canonicalize_arguments(captured: CapturedModel) -> CapturedModel:
    """Write each ATen call's arguments in the one canonical way."""
    for node in captured.graph.nodes:
        if node.op == "call_function" and is_aten(node.target):
            canonicalize(node)
    return captured


def canonicalize(node: fx.Node) -> None:
    """Rewrite one call in place; its value stays the same."""
    schema = node.target._schema  # type: ignore[union-attr]
    rank = operand_rank(node)
    positional: list[Any] = []
    defaults: list[bool] = []
    kwargs: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        name = argument.name
        if not argument.kwarg_only and index < len(node.args):
            value = node.args[index]
        elif name in node.kwargs:
            value = node.kwargs[name]
        else:
            value = argument.default_value
        if name in DROPPED:
            value = argument.default_value
        if name in DIM_ARGUMENTS and rank is not None:
            value = from_zero(value, rank)
        is_default = argument.has_default_value() and same(value, argument.default_value)
        if not argument.kwarg_only:
            positional.append(value)
            defaults.append(is_default)
        elif not is_default:
            kwargs[name] = value
    while defaults and defaults[-1]:
        positional.pop()
        defaults.pop()
    node.args = tuple(positional)
    node.kwargs = kwargs


def operand_rank(node: fx.Node) -> int | None:
    """Rank that the dims of a call count in: of its first operand, or one more; None if they count in none."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    ranks = [node.meta["val"].dim() for node in operands(node) if isinstance(node.meta["val"], torch.Tensor)]
    if not ranks or name in OTHERWISE:
        return None
    return int(max(ranks) if name in BROADCASTS else ranks[0]) + (name in ADDS_A_DIM)


def from_zero(value: Any, rank: int) -> Any:
    """`-1` of 3 dims is `2`; lists dim by dim; anything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value + rank if value < 0 else value
    if isinstance(value, list | tuple):
        return [from_zero(item, rank) for item in value]
    return value


def same(left: Any, right: Any) -> bool:
    """Equal without asking fx nodes, and without taking `0` for `False`."""
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)
