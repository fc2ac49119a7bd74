"""Rules that a user writes for an own op, and their proof: the op is run whole and in parts, and compared."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import RuleError
from autopar.ops.own_gradient import Applied, Slot
from autopar.rules.describe import dim_name, grads_of, result_values, shapes_of
from autopar.rules.discovered import call_of, kept, num_flops
from autopar.rules.notation import Notation, parse
from autopar.rules.proof import difference, is_float, run, tensors_of
from autopar.rules.rule import Dims, Factor, Rule, Shapes, choices
from autopar.values.graph import operands, requires_grad, target_name

TOLERANCE = 1e-9
"""Of values that are compared, in float64; of others, what their rounding explains."""
_REGISTERED: dict[Any, tuple[tuple[Notation, ...], bool]] = {}


def register_rule(op: Any, *rules: str, linear_gradient: bool = True) -> None:
    """Say how an op of one's own may be split, in place of what autopar finds by running it.

    op: an op of `torch.library` (what `custom_op` returns, `torch.ops.lib.name`, `"lib::name"`) or an
        `autograd.Function`. rules: lines such as `"x[b.. i], w[o i], +bias[o] -> y[b.. o]"` (`rules.notation`); several
        for calls with other numbers of tensors or dims. linear_gradient: False if its backward is not linear in the
        gradient that arrives (a clipped gradient).

    Raises:
        RuleError: for an op that is none, or a line that cannot be read.
    """
    key = _key(op)
    if not rules:
        raise RuleError(f"no rule was given for {target_name(key)}; give a line such as 'x[b i], w[o i] -> y[b o]'")
    _REGISTERED[key] = tuple(map(parse, rules)), linear_gradient


def check_rule(op: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Prove an op's rule on example arguments: every split that it allows, values and gradients. Names the splits.

    args, kwargs: as the op is called; its floating tensors are taken to need gradients where `requires_grad` is set.
        Use float64 and sizes of 4 and more, all different, so that a wrong rule shows.

    Raises:
        RuleError: if the op has no rule, or parts give something else than the whole.
    """
    from autopar.rules.registry import rule_of

    node, tensors = _node(_key(op), args, kwargs)
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
    tried = [choice for choice in choices(rule) if choice.name != "invariant"]
    written = _written(node)
    shapes = tuple(tuple(x.shape) for x in tensors)
    said = dict(enumerate(_sizes(written[0], shapes, tuple(tuple(r.shape) for r in made)))) if written else {}
    names = {dim_name(number): factor for number, factor in said.items()}
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


def registered_rule(node: fx.Node) -> Rule | None:
    """The rule that was registered for a call, None if there is none.

    Raises:
        RuleError: if the call has tensors that no line of it takes, or dims of one factor have two sizes.
    """
    found = _written(node)
    if found is None:
        return None
    notation, linear_gradient = found
    shapes, results = shapes_of(operands(node)), tuple(tuple(v.shape) for v in result_values(node))
    sizes = _sizes(notation, shapes, results)
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
    )


def _written(node: fx.Node) -> tuple[Notation, bool] | None:
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


def _sizes(notation: Notation, shapes: Shapes, results: Shapes) -> Mapping[str, int]:
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


def _key(op: Any) -> Any:
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


def _node(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, list[Tensor]]:
    """A call of example arguments as a node of a graph of its own, and its tensors."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta.update(val=value.to("meta"), requires_grad=value.requires_grad)
            return node if is_op else Slot(len(tensors) - 1)
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
