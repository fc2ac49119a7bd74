"""Which rule does a node have? The user's, ours, or else what running the call shows (`discovered`).

`operator.getitem` picks one result of a node with several. It is no op of its own: `resolve` says whose result it is,
and the layout of a consumer's operand that is a getitem node is the layout of that result.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules import (
    attention,
    bags,
    convolution,
    creation,
    discovered,
    einsum,
    elementwise,
    embedding,
    grouped_linear,
    linear,
    loss,
    normalization,
    random,
    recurrent,
    reductions,
    scatter,
    views,
)
from autopar.rules.describe import free_dims
from autopar.rules.registered import registered_rule
from autopar.rules.rule import Rule
from autopar.values.graph import operands

RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    key: rule
    for module in (
        attention,
        bags,
        convolution,
        creation,
        discovered,
        einsum,
        elementwise,
        embedding,
        grouped_linear,
        linear,
        loss,
        normalization,
        random,
        recurrent,
        reductions,
        scatter,
        views,
    )
    for key, rule in module.RULES.items()
}


def rule_of(node: fx.Node) -> Rule:
    """The sharding rule of a call node, whose operands and itself carry `meta["val"]`.

    A rule lives as long as its graph is not changed: it holds the node's sizes and may hold the node.
    """
    if node.target is operator.getitem:
        return _item_rule(node)
    if (own := registered_rule(node)) is not None:
        return own
    target = node.target
    maker = RULES.get(str(target) if isinstance(target, torch._ops.OpOverload) else target)
    if any(map(discovered.makes_sparse, operands(node))):
        return discovered.discovered_rule(node)
    if maker is None and elementwise.is_pointwise(node):
        maker = elementwise.pointwise_rule
    rule = discovered.discovered_rule(node) if maker is None else maker(node)
    return rule if rule.known or rule.discovered else discovered.discovered_rule(node)


def resolve(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that computes this value, and which of its results it is."""
    if node.target is operator.getitem:
        return operands(node)[0], result_index(node)
    return node, 0


def result_index(node: fx.Node) -> int:
    """Which result of its operand a getitem node picks, 0 for any other node."""
    if node.target is not operator.getitem:
        return 0
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _item_rule(node: fx.Node) -> Rule:
    """Passes the result through as it lies: every dim and every summand; used by those who follow aliases."""
    value = node.meta["val"]
    factors, names = free_dims(tuple(value.shape))
    together = (frozenset({0}),) if value.dtype.is_floating_point else ()
    return Rule(factors=factors, operands=(names,), results=(names,), linear=together, alias=0)
