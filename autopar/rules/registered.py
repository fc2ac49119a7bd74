"""Rules that a user writes for an own op (`rules.check_registered` proves them)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.ops.own_gradient import Applied
from autopar.ops.own_local import LOCAL_FUNCTIONS, own_local
from autopar.rules.describe import dim_name, result_values, shapes_of
from autopar.rules.discovered import kept, num_flops
from autopar.rules.notation import Notation, parse
from autopar.rules.rule import Call, Dims, Factor, Local, Rule, Shapes
from autopar.values.custom_ops import defining_module
from autopar.values.graph import operands, requires_grad, target_name

_REGISTERED: dict[Any, tuple[tuple[Notation, ...], bool]] = {}
_LOCAL: dict[Any, str] = {}
"""The word of an op's rules that its own function joins (`ops.own_local`)."""


def register_rule(
    op: Any, *rules: str, linear_gradient: bool = True, local: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Say how an op of one's own may be split, in place of what autopar finds by running it.

    Args:
        op: an op of `torch.library` (what `custom_op` returns, `torch.ops.lib.name`, `"lib::name"`) or an
            `autograd.Function`.
        rules: lines such as `"x[b.. i], w[o i], +bias[o] -> y[b.. o]"` (`rules.notation`); several for calls with other
            numbers of tensors or dims.
        linear_gradient: False if its backward is not linear in the gradient that arrives (a clipped gradient).
        local: a word of the rules whose parts are not computed apart, and the function that ranks run where it is
            split: `function(*args, group=...)` on local shards, which lie as the line says, with the process group of
            the ranks that share the word out. It communicates itself, forward and backward.

    Raises:
        RuleError: for an op that is none, or a line that cannot be read.
    """
    key = op_key(op)
    _register_local(key, rules, dict(local or {}))
    if not rules:
        raise RuleError(f"no rule was given for {target_name(key)}; give a line such as 'x[b i], w[o i] -> y[b o]'")
    _REGISTERED[key] = tuple(map(parse, rules)), linear_gradient


def _register_local(key: Any, rules: tuple[str, ...], local: dict[str, Callable[..., Any]]) -> None:
    name = _local_name(key)
    _LOCAL.pop(key, None)
    LOCAL_FUNCTIONS.pop(name, None)
    if not local:
        return
    if not isinstance(key, torch._ops.OpOverload):
        raise RuleError(f"{target_name(key)} is an autograd.Function; a local function is one of a torch.library op")
    known = {
        factor for line in rules for term in (*parse(line).operands, *parse(line).results) for factor in term.factors
    }
    if len(local) != 1 or not set(local) <= known:
        raise RuleError(f"local says {', '.join(local)}: give one word of the rules, of {', '.join(sorted(known))}")
    (word, function), *_ = local.items()
    _LOCAL[key], LOCAL_FUNCTIONS[name] = word, function


def _local_name(key: Any) -> str:
    return str(key._schema.name) if isinstance(key, torch._ops.OpOverload) else ""


def _localize(node: fx.Node, factor: str) -> Callable[[Local], Call]:
    """The call on one rank: the user's function where its factor is split."""

    def localize(local: Local) -> Call:
        target, axes = node.target, local.axes(factor)
        if not axes or not isinstance(target, torch._ops.OpOverload):
            return target, node.args, dict(node.kwargs)  # type: ignore[return-value]
        known = {"op": _local_name(target), "module": defining_module(target), "axes": axes}
        return own_local, node.args, {**node.kwargs, **known}

    return localize


def registered_rule(node: fx.Node) -> Rule | None:
    """The rule that was registered for a call, None if there is none.

    Raises:
        RuleError: if the call has tensors that no line of it takes, or dims of one factor have two sizes.
    """
    found = written_for(node)
    if found is None:
        return None
    notation, linear_gradient = found
    shapes, results = shapes_of(operands(node)), tuple(tuple(v.shape) for v in result_values(node))
    sizes = sizes_of(notation, shapes, results)
    names = {factor: dim_name(number) for number, factor in enumerate(sizes)}
    terms = (*notation.operands, *notation.results)
    every = [term.dims(len(shape)) for term, shape in zip(terms, (*shapes, *results), strict=True)]
    summed = {f for f in sizes if any(f not in dims for dims in every[len(shapes) :])}
    if not all(v.dtype.is_floating_point for v in result_values(node)):
        names = {f: name for f, name in names.items() if f not in summed}
    dims: tuple[Dims, ...] = tuple(
        tuple(names.get(f) if n > 1 else None for f, n in zip(factors, shape, strict=True))
        for factors, shape in zip(every, (*shapes, *results), strict=True)
    )
    saves, saves_results, nbytes = kept(node)
    flops, backward_flops = num_flops(node)
    return Rule(
        factors={name: Factor(size=sizes[f], summed=f in summed) for f, name in names.items()},
        operands=dims[: len(shapes)],
        results=dims[len(shapes) :],
        added=frozenset(i for i, term in enumerate(notation.operands) if term.added),
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=flops,
        backward_flops=backward_flops,
        whole_gradient=requires_grad(node) and not linear_gradient,
        localize=_localize(node, joined) if (joined := names.get(local_word(node) or "")) else None,
    )


def local_word(node: fx.Node) -> str | None:
    """The word that the op's own function joins, None where it has none."""
    return _LOCAL.get(node.target)


def written_for(node: fx.Node) -> tuple[Notation, bool] | None:
    """The line that was registered for calls such as this, and whether their gradient is linear."""
    target = node.target
    found = _REGISTERED.get(target.function if isinstance(target, Applied) else target)
    if found is None:
        return None
    notations, linear_gradient = found
    ranks = tuple(s.meta["val"].dim() for s in operands(node)), tuple(v.dim() for v in result_values(node))
    notation = next((n for n in notations if n.takes(*ranks)), None)
    if notation is None:
        raise RuleError(
            f"{target_name(target)} is called with tensors of {ranks[0]} dims and gives {ranks[1]}, which its rule "
            f"{notations[0].text!r} does not take; register another line beside it"
        )
    return notation, linear_gradient


def sizes_of(notation: Notation, shapes: Shapes, results: Shapes) -> Mapping[str, int]:
    """The size of each factor; dims of size 1 are broadcast."""
    sizes: dict[str, int] = {}
    for term, shape in zip((*notation.operands, *notation.results), (*shapes, *results), strict=True):
        for dim, (factor, size) in enumerate(zip(term.dims(len(shape)), shape, strict=True)):
            if factor == "_" or size == 1:
                continue
            if sizes.setdefault(factor, size) != size:
                raise RuleError(
                    f"rule {notation.text!r} has {factor} of size {sizes[factor]} and, in dim {dim} of {term.name}, of "
                    f"size {size}; use _ where a dim is not that factor's"
                )
    return sizes


def op_key(op: Any) -> Any:
    """What a call of the op has as its target, or as the Function of its target."""
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return op
    found = getattr(op, "_opoverload", op)  # what `custom_op` returns
    if isinstance(found, str) and "::" in found:
        library, _, name = found.partition("::")
        found = getattr(getattr(torch.ops, library), name, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        found = getattr(found, "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise RuleError(
            f"{op!r} is no op that a graph calls; give what torch.library.custom_op returns, torch.ops.lib.name, "
            "'lib::name' or an autograd.Function"
        )
    return found
