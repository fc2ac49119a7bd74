"""Dropout: linear, its mask a function of the shard. It keeps one bool an element for backward."""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.dropout import dropout
from autopar.rules.describe import numel
from autopar.rules.elementwise import elementwise_rule
from autopar.rules.rule import Call, Local, Rule


def _dropout(node: fx.Node) -> Rule:
    shape = tuple(node.meta["val"].shape)
    rule = elementwise_rule(node, linear=(frozenset({0}),), saves_nbytes=numel(shape))

    def localize(local: Local) -> Call:
        layout = local.operands[0]
        shards = tuple((local.mesh.names[a], d) for d in layout.sharded_dims() for a in layout.axes_of(d))
        placed = {"shape": shape, "shards": shards} if shards else {}
        return dropout, node.args, {**node.kwargs, **placed}

    return Rule(
        factors=rule.factors,
        operands=rule.operands,
        results=rule.results,
        linear=rule.linear,
        saves_nbytes=rule.saves_nbytes,
        flops=rule.flops,
        backward_flops=rule.backward_flops,
        localize=localize,
    )


RULES: dict[Any, Callable[[fx.Node], Rule]] = {dropout: _dropout}
