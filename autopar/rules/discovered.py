"""The rule of a call that nobody wrote one for: what running it shows (`discover`), once for all calls alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.ops.own_gradient import is_own, renewed
from autopar.rules.describe import dim_name, free_dims, result_values, shapes_of
from autopar.rules.discover import discover
from autopar.rules.kept import kept_by_autograd
from autopar.rules.proof import Function
from autopar.rules.rule import Dims, Factor, Rule, choices, replicated_rule
from autopar.rules.split_search import FoundSplits, split_size
from autopar.values.graph import is_random, operands, requires_grad
from autopar.values.placement import PARTIAL, Shard

TORCH = ("aten", "prims", "torchvision")
"""Namespaces of ops whose backward is linear in the gradient that arrives."""
_FOUND: dict[Any, FoundSplits | None] = {}


def discovered_rule(node: fx.Node) -> Rule:
    """The rule of a call node; whole on every rank where no dims are found to be independent, or it does not run."""
    sources = operands(node)
    shapes, results = shapes_of(sources), tuple(tuple(v.shape) for v in result_values(node))
    rule = replicated_rule(tuple(map(len, shapes)), tuple(map(len, results)))
    if node.op != "call_function":
        return rule
    saves, saves_results, nbytes = kept(node)
    flops, backward_flops = num_flops(node)
    rule = replace(
        rule,
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=flops,
        backward_flops=backward_flops,
        whole_gradient=has_own_backward(node) and requires_grad(node),
    )
    if not is_tried(node):
        return rule
    dtypes = tuple(source.meta["val"].dtype for source in sources)
    grads = tuple(requires_grad(source) for source in sources)
    key = (node.target, node_constants(node), shapes, results, dtypes, grads)
    if key not in _FOUND:
        _FOUND[key] = discover(call_of(node), shapes, results, dtypes, grads)
    found = _FOUND[key]
    return rule if found is None else _with(rule, found, node)


def is_tried(node: fx.Node) -> bool:
    """Whether running a call shows what it does: an op or a Function that does not draw numbers, write operands, or
    read sparse tensors, which are not put on ranks in parts."""
    target = node.target
    if any(map(makes_sparse, operands(node))):
        return False
    if is_own(target):
        return True
    return isinstance(target, torch._ops.OpOverload) and not is_random(node) and not target._schema.is_mutable


def makes_sparse(node: fx.Node) -> bool:
    """Whether a call's result is sparse; without values it is a dense tensor."""
    return isinstance(node.target, torch._ops.OpOverload) and "sparse" in str(node.target)


def has_own_backward(node: fx.Node) -> bool:
    """Whether a call's backward is a user's, which need not be linear in the gradient that arrives."""
    target = node.target
    return is_own(target) or (isinstance(target, torch._ops.OpOverload) and target.namespace not in TORCH)


def _with(rule: Rule, found: FoundSplits, node: fx.Node) -> Rule:
    """The rule with the factors that were found."""
    sources = operands(node)
    shapes, results = shapes_of(sources), tuple(tuple(v.shape) for v in result_values(node))
    dims: list[list[str | None]] = [[None] * len(s) for s in (*shapes, *results)]
    factors, summands = {}, [frozenset(_summands(split.operands)) for split in found.splits]
    for number, split in enumerate(found.splits):
        for row, place in zip(dims, (*split.operands, *split.results), strict=True):
            if isinstance(place, Shard):
                row[place.dim] = dim_name(number)
        factors[dim_name(number)] = Factor(size=split_size(split, shapes, results), summed=PARTIAL in split.results)
    named: tuple[Dims, ...] = tuple(map(tuple, dims))
    is_alone = len(set(sources)) == len(sources)
    made = replace(
        rule,
        factors=factors,
        operands=named[: len(shapes)],
        results=named[len(shapes) :],
        added=next(filter(None, summands), frozenset()),
        linear=found.linear if is_alone else (),
        whole_gradient=requires_grad(node) and not found.linear_gradient,
        known=bool(found.splits),
        discovered=True,
    )
    given = {choice.name: choice for choice in choices(made)}
    wanted = [replace(split, name=dim_name(number)) for number, split in enumerate(found.splits)]
    return replace(made, extra=tuple(choice for choice in wanted if given[choice.name] != choice))


def _summands(placements: tuple[Any, ...]) -> list[int]:
    return [i for i, placement in enumerate(placements) if placement == PARTIAL]


def node_constants(node: fx.Node) -> str:
    """What a call is given beside tensors."""
    return str(fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: "tensor"))


def call_of(node: fx.Node) -> Function:
    """The node's call as a function of its tensor operands, on their device."""

    def call(*tensors: Tensor) -> Any:
        values = iter(tensors)
        given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: next(values))
        named = {k: tensors[0].device if isinstance(v, torch.device) else v for k, v in given[1].items()}
        return node.target(*given[0], **named)  # type: ignore[operator]

    return call


def kept(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """What autograd keeps (`kept_by_autograd`); everything where the call does not run on tensors without values."""
    try:
        return kept_by_autograd(node)
    except Exception:  # whatever the user's code makes of them
        return tuple(range(len(operands(node)))), tuple(range(len(result_values(node)))), 0


def num_flops(node: fx.Node) -> tuple[float, float]:
    """Of forward and backward: of the products that torch counts in it, or one an element of the results."""
    count = float(sum(v.numel() for v in result_values(node)))
    try:
        with FlopCounterMode(display=False) as counter:
            call_of(node)(*[torch.empty_like(source.meta["val"]) for source in operands(node)])
    except Exception:  # whatever the user's code makes of tensors without values
        return count, count
    products = float(counter.get_total_flops())
    return (products, 2 * products) if products else (count, count)


def renewed_rule(node: fx.Node) -> Rule:
    """`renewed(parameter, value)`: every dim by itself; the result is the value's storage."""
    factors, names = free_dims(tuple(node.meta["val"].shape), even=True)
    return Rule(factors=factors, operands=(names, names), results=(names,), alias=1)


RULES: dict[Any, Callable[[fx.Node], Rule]] = {renewed: renewed_rule}
