"""Which rule does a node have? Looked up by its target; an op without one runs whole on every rank.

`operator.getitem` picks one result of a node with several. It is no op of its own: `resolve` says whose result it is,
and the layout of a consumer's operand that is a getitem node is the layout of that result.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.graph import operands
from autopar.ops.own_gradient import is_own
from autopar.rules import (
    attention,
    bags,
    convolution,
    creation,
    discovered,
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
from autopar.rules.describe import free_dims, result_values
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Rule, replicated_rule

RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    key: rule
    for module in (
        attention,
        bags,
        convolution,
        creation,
        discovered,
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
    target = node.target
    maker = RULES.get(str(target) if isinstance(target, torch._ops.OpOverload) else target)
    if maker is not None:
        return maker(node)
    if is_own(target):
        return discovered.discovered_rule(node)
    if elementwise.is_pointwise(node):
        return elementwise.pointwise_rule(node)
    ranks = tuple(source.meta["val"].dim() for source in operands(node))
    rule = replicated_rule(ranks, tuple(value.dim() for value in result_values(node)))
    if node.op != "call_function":
        return rule
    saves, saves_results, nbytes = kept_by_autograd(node)
    return replace(rule, saves=saves, saves_results=saves_results, saves_nbytes=nbytes)


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
