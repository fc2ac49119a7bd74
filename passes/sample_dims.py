"""Where the samples of a batch are after an op (`sample_states`), or that it joins them.

An op treats samples alone if, by its sharding rule, one factor runs over the batch in all operands and results; an op
without a rule, if running it says so (`alone_by_running`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ops.checked import checked
from autopar.ops.cross_entropy import cross_entropy
from autopar.passes.alone_by_running import runs_alone
from autopar.passes.sample_states import (
    ADDED,
    UNIFORM,
    VIEWS,
    Batch,
    Each,
    Fixed,
    Joined,
    State,
    Total,
    fixed_after,
    growth,
    joined,
    name_of,
)
from autopar.passes.sample_views import moved_by
from autopar.rules.describe import aligned, argument, normalized_dims, result_values, shapes_of
from autopar.rules.registry import rule_of
from autopar.rules.rule import Rule
from autopar.values.graph import is_random, operands

MEAN, SUM = 1, 2
"""Of ATen's `reduction` arguments."""
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})
ON_ELEMENTS = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)
"""ATen's losses that are reductions of a value of each element."""


def states_after(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    """The states of an op's results for those of its operands."""
    if node.target is checked:  # whatever is checked, the first operand passes through
        return (states[0],)
    num = len(result_values(node))
    if (first := next((s for s in states if isinstance(s, Joined)), None)) is not None:
        return (first,) * num
    if name_of(node) in UNIFORM or all(isinstance(s, Fixed) for s in states):
        return (fixed_after(node, states, batch),) * num
    if any(isinstance(s, Fixed) and s.sized for s in states):
        return (joined(node, "takes a value that depends on how many samples there are"),) * num
    scale = growth(node, batch)
    if scale is None:
        return (joined(node, "takes a number that depends on how many samples there are"),) * num
    found = _after(node, states, batch)
    return tuple(_checked(node, i, _grown(state, scale), batch) for i, state in enumerate(found))


def _after(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    num = len(result_values(node))
    if any(isinstance(s, Total) for s in states):
        return (_linear(node, states, batch),) * num
    name = name_of(node)
    for known in (_loss, _sum, moved_by):
        if (state := known(node, name, states, batch)) is not None:
            return state
    return _by_rule(node, states, batch)


def _grown(state: State, scale: int) -> State:
    return state if isinstance(state, Fixed | Joined) or not scale else replace(state, power=state.power + scale)


def _checked(node: fx.Node, index: int, state: State, batch: Batch) -> State:
    """The state, if sizes with few samples are what it says."""
    few = batch.shapes(node)
    if few is None or isinstance(state, Joined | Fixed):
        return state
    shape, small = tuple(result_values(node)[index].shape), few[index]
    expected = list(shape)
    if isinstance(state, Each):
        expected[state.dim] = expected[state.dim] * batch.few // batch.size
    if tuple(expected) == small:
        return state
    return joined(node, f"has the sizes {shape} with {batch.size} samples, but {small} with {batch.few}")


def _sum(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    (state, *_) = states
    if name not in ("sum", "mean") or not isinstance(state, Each):
        return None
    rank = len(shapes_of(operands(node))[0])
    dims = normalized_dims(argument(node, 1, "dim"), rank)
    if state.dim in dims:
        return (Total(power=state.power + (name == "sum"), kind=f"{node.name} ({name})"),)
    keepdim = bool(argument(node, 2, "keepdim", False))
    return (state if keepdim else replace(state, dim=state.dim - sum(d < state.dim for d in dims)),)


def _loss(node: fx.Node, name: str, states: Sequence[State], batch: Batch) -> tuple[State, ...] | None:
    if node.target is cross_entropy:
        return (_cross_entropy(node, states),)
    reduction = _reduction(node)
    if reduction is None:
        return None
    shapes = shapes_of(operands(node))
    power = int(reduction[1] == SUM)
    if name in ON_ELEMENTS:
        shape: tuple[int, ...] = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        _, dims, result = aligned(shapes, shape)
        rule = Rule(factors={}, operands=dims, results=(result,))
        ((state),) = _by_factors(node, rule, states)
    else:
        args = list(node.args)
        kwargs = dict(node.kwargs)
        if reduction[0] < len(args):
            args[reduction[0]] = 0
        else:
            kwargs["reduction"] = 0
        state = _by_running(node, states, batch, args, kwargs)[0]
    if not isinstance(state, Each):
        return (state,)
    word = ("", "mean", "sum")[reduction[1]]
    return (Total(power=power, kind=f"{node.name} ({word})"),)


def _reduction(node: fx.Node) -> tuple[int, int] | None:
    """Which argument of ATen's own losses says how they are reduced, and how; None for what is none, is not reduced or
    weighs samples by their labels."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    arguments = {a.name: (i, a.default_value) for i, a in enumerate(node.target._schema.arguments)}
    if "reduction" not in arguments:
        return None
    position, default = arguments["reduction"]
    value: Any = argument(node, position, "reduction", default)
    labelled = "ignore_index" in arguments and not operands(node)[1].meta["val"].is_floating_point()
    return (position, int(value)) if value in (MEAN, SUM) and not (labelled and value == MEAN) else None


def _cross_entropy(node: fx.Node, states: Sequence[State]) -> State:
    reduction = node.kwargs.get("reduction", "mean")
    (state,) = _by_factors(node, rule_of(node), states, kept=True)
    if not isinstance(state, Each) or reduction == "none":
        return state
    if reduction == "sum":
        return Total(power=1, kind=f"{node.name} (sum)")
    if node.kwargs.get("count") is not None:
        return joined(node, "divides by a number of labels")
    labels = operands(node)[1].name, node.kwargs.get("ignore_index", -100)
    kind = f"{node.name} (mean over labels that are not ignored)"
    return Total(power=0, labels=labels, losses=(node.name,), kind=kind)


def _by_rule(node: fx.Node, states: Sequence[State], batch: Batch) -> tuple[State, ...]:
    num = len(result_values(node))
    if is_random(node) and len(states) == 1 and isinstance(states[0], Each):
        same = [v for v in result_values(node) if v.dim() > states[0].dim]
        size = shapes_of(operands(node))[0][states[0].dim]
        if len(same) == num and all(v.shape[states[0].dim] == size for v in same):
            return tuple(states) * num
    rule = rule_of(node)
    if not rule.known:
        return _by_running(node, states, batch, node.args, dict(node.kwargs))
    return _by_factors(node, rule, states)


def _by_factors(node: fx.Node, rule: Rule, states: Sequence[State], *, kept: bool = False) -> tuple[State, ...]:
    """By one factor that runs over the batch. kept: results without it are taken as one value a sample."""
    num = len(rule.results)
    found = [(i, s, rule.operands[i][s.dim]) for i, s in enumerate(states) if isinstance(s, Each)]
    factor, outer = found[0][2], found[0][1].outer
    name = name_of(node)
    shapes = shapes_of(operands(node))
    parts = {f: factor.size for f, factor in rule.factors.items()}
    if any(f is None or parts.get(f, math.inf) < shapes[i][s.dim] for i, s, f in found):  # or several are one
        return (joined(node, "joins the samples of the batch"),) * num
    if any((f, s.outer) != (factor, outer) for _, s, f in found):
        return (joined(node, "brings every sample together with every other"),) * num
    for state, dims in zip(states, rule.operands, strict=True):
        if isinstance(state, Fixed) and factor in dims:
            dim = dims.index(factor)
            if dim in state.varies and (dim, outer) not in state.alike:
                return (joined(node, "takes a constant that differs from sample to sample"),) * num
    scaled = {i for i, s, _ in found if s.power}
    power = max((s.power for _, s, _ in found), default=0)
    is_product = name in PRODUCTS and not rule.added
    if is_product:
        power = sum(s.power for _, s, _ in found)
    elif scaled and not (
        any(scaled == together for together in rule.linear)  # what else is added is not scaled
        and all(s.power == power for i, s, _ in found)
        and not (name in ADDED and len(found) < len(node.args))
    ):
        return (joined(node, "is not linear in what the number of samples scales"),) * num
    results: list[State] = []
    summed = factor in rule.factors and rule.factors[factor].summed if factor is not None else False
    for dims in rule.results:
        if factor in dims and not summed:
            results.append(Each(dim=dims.index(factor), outer=outer, power=power))
        elif kept and factor != "classes":
            dim = dims.index(factor) if factor in dims else 0
            results.append(Each(dim=dim, outer=outer, power=power))
        elif is_product and summed:
            results.append(Total(power=power + 1, kind=f"{node.name} (sum)"))
        else:
            results.append(joined(node, "joins the samples of the batch"))
    return tuple(results)


def _by_running(
    node: fx.Node, states: Sequence[State], batch: Batch, args: Any, kwargs: dict[str, Any]
) -> tuple[State, ...]:
    num = len(result_values(node))
    each = [s for s in states if isinstance(s, Each)]
    if any(s.outer != 1 or s.power for s in each) or is_random(node):
        return (joined(node, "has no sharding rule, and was not run to see whether it treats samples alone"),) * num
    dims = [s.dim if isinstance(s, Each) else None for s in states]
    found = runs_alone(node, args, kwargs, dims, batch.size)
    if found is None:
        return (joined(node, "has no sharding rule, and gives other values where samples are run apart"),) * num
    return tuple(Each(dim=dim) for dim in found)


def _linear(node: fx.Node, states: Sequence[State], batch: Batch) -> State:
    """After a sum over samples: all has to be linear in it, and what is added has to be a sum of its kind."""
    totals = [s for s in states if isinstance(s, Total)]
    if any(isinstance(s, Each) for s in states):
        return joined(node, "joins single samples with a sum over the batch")
    first, where = totals[0], {i for i, s in enumerate(states) if isinstance(s, Total)}
    name = name_of(node)
    numbers = [a for a in node.args[:2] if isinstance(a, int | float) and a] if name in ADDED else []
    sets = rule_of(node).linear if name not in ADDED else (frozenset(range(len(states))),)
    together = min((s for s in sets if where <= s), key=len, default=None)
    if name in ("sum", "mean", *VIEWS):
        together = frozenset({0})
    if together is None:
        return joined(node, "is not linear in a sum over the batch")
    adds = len(together) > len(totals) or bool(numbers)
    mixed = any((s.power, s.labels) != (first.power, first.labels) for s in totals)
    if mixed or (adds and (first.power or first.labels)):
        kinds = list(dict.fromkeys(k for s in totals for k in s.kind.split("; ")))
        kinds += ["a constant"] if adds else []
        return Joined(
            why=f"the loss adds up means of several kinds: {', '.join(kinds)}; their sums over micro-batches have no "
            "common weight (reduce all terms alike: all means over every element, or all sums)"
        )
    if not batch.is_exact and math.prod(node.meta["val"].shape) > max(math.prod(v) for v in shapes_of(operands(node))):
        return joined(node, "repeats a sum over the batch")
    losses = tuple(dict.fromkeys(loss for s in totals for loss in s.losses))
    kind = "; ".join(dict.fromkeys(k for s in totals for k in s.kind.split("; ")))
    return replace(first, losses=losses, kind=kind)
