"""Proof of a rule that a user wrote: the op is run whole and in parts, values and gradients are compared."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import RuleError
from autopar.ops.own_gradient import Applied, ArgumentSlot
from autopar.rules.describe import dim_name, grads_of
from autopar.rules.discovered import call_of
from autopar.rules.proof import difference, is_float, run, tensors_of
from autopar.rules.registered import local_word, op_key, sizes_of, written_for
from autopar.rules.registry import rule_of
from autopar.rules.rule import choices
from autopar.values.graph import operands, target_name

TOLERANCE = 1e-9
"""Of values that are compared, in float64; of others, what their rounding explains."""


def check_rule(op: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Prove an op's rule on example arguments: every split that it allows, values and gradients. Names the splits.

    args, kwargs: as the op is called; its floating tensors are taken to need gradients where `requires_grad` is set.
        Use float64 and sizes of 4 and more, all different, so that a wrong rule shows.

    Raises:
        RuleError: if the op has no rule, or parts give something else than the whole.
    """
    node, tensors = _node(op_key(op), args, kwargs)
    rule = rule_of(node)
    if not rule.known:
        raise RuleError(f"{target_name(node.target)} has no rule that splits it; give it one with register_rule")
    call, graded = call_of(node), grads_of(operands(node))
    generator = torch.Generator().manual_seed(0)
    made = tensors_of(call(*[x.detach().clone() for x in tensors]))
    arriving = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) if is_float(r) else None
        for r in made
    ]
    whole = run(call, tensors, graded, arriving)
    floats = [x.dtype for x in (*tensors, *made) if is_float(x)]
    tolerance = max([TOLERANCE, *(100 * torch.finfo(d).eps for d in floats)])
    written = written_for(node)
    shapes = tuple(tuple(x.shape) for x in tensors)
    said = dict(enumerate(sizes_of(written[0], shapes, tuple(tuple(r.shape) for r in made)))) if written else {}
    names = {dim_name(number): factor for number, factor in said.items()}
    joined = [name for name, factor in names.items() if factor == local_word(node)]  # its parts are none of the whole
    tried = [choice for choice in choices(rule) if choice.name not in ("invariant", *joined)]
    for choice in tried:
        factor = rule.factors.get(choice.name)
        parts = [Fraction(k, factor.size) for k in (1, factor.size // 2)] if factor else [Fraction(1, 2)]
        for at in parts:
            if why := difference(call, whole, choice, at, tolerance, generator):
                placed = ", ".join(map(str, choice.operands))
                raise RuleError(
                    f"{target_name(node.target)} is not what its parts are, {_said(choice.name, names)} (operands "
                    f"{placed}): {why}; take that out of its rule"
                )
    return tuple(names.get(choice.name, choice.name) for choice in tried if choice.name in rule.factors)


def _said(name: str, names: Mapping[str, str]) -> str:
    if name == "replicate":
        return "for summands of gradients (linear_gradient)"
    return f"split by {names.get(name, name)}"


def _node(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, list[Tensor]]:
    """A call of example arguments as a node of a graph of its own, and its tensors."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta.update(val=value.to("meta"), requires_grad=value.requires_grad)
            return node if is_op else ArgumentSlot(len(tensors) - 1)
        if isinstance(value, list | tuple):
            return type(value)(map(placed, value))
        return value

    is_op = isinstance(key, torch._ops.OpOverload)
    given, named = placed(args), {name: placed(value) for name, value in kwargs.items()}
    if is_op:
        node = graph.call_function(key, given, named)
    else:
        node = graph.call_function(Applied(key, given, tuple(named.items())), tuple(graph.nodes))
    made = tensors_of((key if is_op else key.apply)(*args, **kwargs))
    node.meta["val"] = made[0].to("meta") if len(made) == 1 else tuple(r.to("meta") for r in made)
    node.meta["requires_grad"] = any(r.requires_grad for r in made)
    return node, tensors
