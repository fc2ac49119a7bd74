"""Ops that treat every element alone, with broadcasting: one factor a dim of the result.

Linear: a summand may pass through (add of two, scale, cast). Saved for backward: what the op's derivative reads.
Padded in use: only where garbage stays finite, in value and in derivative.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.rules.describe import aligned, all_float, argument, grads_of, numel, result_values, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Rule, replicated_rule
from autopar.values.graph import operands

aten = torch.ops.aten
Maker = Callable[[fx.Node], Rule]
Linear = tuple[frozenset[int], ...]

NONE: frozenset[int] = frozenset()
LOOKED_BACK = 4
"""Calls before an operand that are looked at for what its elements can be."""


def elementwise_rule(
    node: fx.Node,
    *,
    linear: Linear = (),
    saves: tuple[int, ...] = (),
    saves_results: tuple[int, ...] = (),
    unsafe: frozenset[int] = NONE,
    saves_nbytes: int = 0,
    flops: float = 1.0,
) -> Rule:
    """The rule of an op on elements; `flops` an element, forward and backward."""
    sources = operands(node)
    results = result_values(node)
    shape = tuple(results[0].shape)
    factors, dims, names = aligned(shapes_of(sources), shape, unsafe)
    graded = any(grads_of(sources)) and results[0].dtype.is_floating_point
    total = flops * numel(shape)
    return Rule(
        factors=factors,
        operands=dims,
        results=(names,) * len(results),
        linear=tuple(s for s in linear if all_float(node, tuple(sources[i] for i in s))),
        saves=saves if graded else (),
        saves_results=saves_results if graded else (),
        saves_nbytes=saves_nbytes if graded else 0,
        flops=total,
        backward_flops=total if graded else 0.0,
    )


def _unary(saved: str, *, unsafe: bool = False, linear: bool = False, flops: float = 1.0) -> Maker:
    """An op on one tensor that saves its `operand`, its `result` or nothing."""

    def rule(node: fx.Node) -> Rule:
        return elementwise_rule(
            node,
            linear=(frozenset({0}),) if linear else (),
            saves=(0,) if saved == "operand" else (),
            saves_results=(0,) if saved == "result" else (),
            unsafe=frozenset({0}) if unsafe else NONE,
            flops=flops,
        )

    return rule


def _sum_of_two(node: fx.Node) -> Rule:
    """add, sub, rsub: linear in both tensors together; adding a number is not linear."""
    both = frozenset({0, 1}) if len(operands(node)) == 2 else NONE
    return elementwise_rule(node, linear=(both,) if both else ())


def _product(node: fx.Node) -> Rule:
    """mul: linear in either factor; each is saved for the gradient of the other."""
    sources = operands(node)
    if len(sources) == 1:
        return elementwise_rule(node, linear=(frozenset({0}),))
    first, second = grads_of(sources)
    saves = tuple(i for i, needed in ((0, second), (1, first)) if needed)
    linear = (frozenset({0}), frozenset({1})) if sources[0] is not sources[1] else ()
    return elementwise_rule(node, linear=linear, saves=saves)


def _quotient(node: fx.Node) -> Rule:
    """div: linear in the numerator; the garbage of a denominator may be zero."""
    sources = operands(node)
    linear = (frozenset({0}),) if node.kwargs.get("rounding_mode") is None else ()
    if not isinstance(node.args[0], fx.Node):
        return elementwise_rule(node, saves=(0,), unsafe=frozenset({0}))
    if len(sources) == 1:
        return elementwise_rule(node, linear=linear)
    first, second = grads_of(sources)
    saves = (0, 1) if second else (1,) if first else ()
    unsafe = NONE if is_positive(sources[1]) else frozenset({1})
    return elementwise_rule(node, linear=linear, saves=saves, unsafe=unsafe)


def _whole_quotient(node: fx.Node) -> Rule:
    """floor_divide has no gradient, but zeros as padding of an integer denominator raise an error."""
    return elementwise_rule(node, unsafe=frozenset(range(1, len(operands(node)))))


def _power(node: fx.Node) -> Rule:
    """pow: garbage is harmless only under a positive whole exponent."""
    base, exponent = node.args[0], node.args[1]
    if isinstance(exponent, int | float):
        safe = exponent >= 1 and float(exponent).is_integer()
        return elementwise_rule(node, saves=(0,) if exponent != 0 else (), unsafe=NONE if safe else frozenset({0}))
    everything = frozenset(range(len(operands(node))))
    if not isinstance(base, fx.Node):
        return elementwise_rule(node, saves=(0,), saves_results=(0,), unsafe=everything)
    return elementwise_rule(node, saves=(0, 1), saves_results=(0,), unsafe=everything)


def _root(saved: str) -> Maker:
    """rsqrt, sqrt, log, reciprocal: harmless only on what stays above zero whatever its input is."""

    def rule(node: fx.Node) -> Rule:
        source = operands(node)[0]
        unsafe = NONE if is_positive(source) else frozenset({0})
        return elementwise_rule(
            node,
            saves=(0,) if saved == "operand" else (),
            saves_results=(0,) if saved == "result" else (),
            unsafe=unsafe,
        )

    return rule


def _where(node: fx.Node) -> Rule:
    """where: linear in both branches together; a branch that is a number must be zero for that."""
    sources = operands(node)
    branches: tuple[Any, ...] = node.args[1:3]
    numbers = [b for b in branches if not isinstance(b, fx.Node)]
    linear = (frozenset(range(1, len(sources))),) if len(sources) > 1 and not any(numbers) else ()
    # garbage in the condition may choose an infinite branch for every element of a row, and a softmax of it is NaN
    shape = tuple(node.meta["val"].shape)
    whole = all(tuple(b.meta["val"].shape) == shape for b in branches if isinstance(b, fx.Node))
    safe = whole and all(math.isfinite(n) for n in numbers)
    return elementwise_rule(node, linear=linear, saves=(0,), unsafe=NONE if safe else frozenset({0}))


def _masked_fill(node: fx.Node) -> Rule:
    """masked_fill: linear where the value is zero, or a tensor (then together with it)."""
    value: Any = argument(node, 2, "value")
    if isinstance(value, fx.Node):
        return elementwise_rule(node, linear=(frozenset({0, 2}),), saves=(1,), unsafe=frozenset({1}))
    linear = (frozenset({0}),) if value == 0 else ()
    return elementwise_rule(node, linear=linear, saves=(1,), unsafe=NONE if math.isfinite(value) else frozenset({1}))


def _both_saved(node: fx.Node) -> Rule:
    """maximum, minimum: both operands are compared again in backward."""
    return elementwise_rule(node, saves=tuple(range(len(operands(node)))))


def _loss(*, unsafe: bool = False) -> Maker:
    """A loss of two tensors, of each element; one that torch reduces in the same call has no rule."""

    def rule(node: fx.Node) -> Rule:
        if argument(node, 2, "reduction", 1):
            return replicated_rule(tuple(map(len, shapes_of(operands(node)))), (0,))
        both = frozenset({0, 1})
        return elementwise_rule(node, saves=(0, 1), unsafe=both if unsafe else NONE, flops=2.0)

    return rule


def _loss_of_elements(node: fx.Node) -> Rule:
    """Any other loss of each element, which may have weights; what is kept for backward is looked at."""
    sources = operands(node)
    shapes, value = shapes_of(sources), node.meta["val"]
    if value.shape != torch.broadcast_shapes(*shapes):  # type: ignore[no-untyped-call]  # torch reduces it
        return replicated_rule(tuple(map(len, shapes)), (value.dim(),))
    saves, saves_results, nbytes = kept_by_autograd(node)
    return elementwise_rule(
        node,
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        unsafe=frozenset(range(len(sources))),
        flops=8.0,
    )


def _plain(node: fx.Node) -> Rule:
    """Comparisons and logic: nothing to save, garbage stays garbage."""
    return elementwise_rule(node)


def pointwise_rule(node: fx.Node) -> Rule:
    """Any other op that torch tags as pointwise: assumed to save all it touches and to be unsafe in padding."""
    num = len(operands(node))
    return elementwise_rule(
        node,
        saves=tuple(range(num)),
        saves_results=tuple(range(len(result_values(node)))),
        unsafe=frozenset(range(num)),
    )


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says that the op is pointwise and not random, and it has a tensor to follow."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not operands(node):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def is_positive(node: fx.Node, depth: int = LOOKED_BACK) -> bool:
    """Whether every element is above zero, garbage or not: `x + c` with c > 0 and x never negative."""
    if node.op != "call_function" or node.target not in (aten.add.Tensor, aten.add.Scalar):
        return False
    other = node.args[1]
    return isinstance(other, float) and other > 0 and is_nonnegative(node.args[0], depth)


def is_nonnegative(node: object, depth: int) -> bool:
    """Whether no element can be negative, as far as `depth` calls back tell."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or depth == 0:
        return False
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if name in ("abs", "relu", "exp", "sigmoid", "softmax"):
        return True
    if name == "pow":
        exponent = node.args[1]
        return isinstance(exponent, int | float) and exponent > 0 and exponent % 2 == 0
    if name == "mul":
        return len(node.args) > 1 and node.args[0] is node.args[1]
    if name in ("mean", "sum", "_to_copy", "view", "clone"):
        return is_nonnegative(node.args[0], depth - 1)
    return False


def _names(text: str, *overloads: str) -> list[str]:
    return [f"aten.{name}.{overload}" for name in text.split() for overload in overloads]


RULES: dict[str, Maker] = {
    **dict.fromkeys(_names("add sub subtract rsub", "Tensor", "Scalar"), _sum_of_two),
    **dict.fromkeys(_names("mul multiply", "Tensor", "Scalar"), _product),
    **dict.fromkeys(_names("div divide", "Tensor", "Scalar", "Tensor_mode", "Scalar_mode"), _quotient),
    **dict.fromkeys(_names("floor_divide", "default", "Scalar"), _whole_quotient),
    **dict.fromkeys(_names("pow", "Tensor_Scalar", "Tensor_Tensor", "Scalar"), _power),
    **dict.fromkeys(_names("rsqrt sqrt reciprocal", "default"), _root("result")),
    **dict.fromkeys(_names("log log2 log10 log1p", "default"), _root("operand")),
    **dict.fromkeys(_names("where", "self", "ScalarOther", "ScalarSelf", "Scalar"), _where),
    **dict.fromkeys(_names("masked_fill", "Scalar", "Tensor"), _masked_fill),
    **dict.fromkeys(_names("maximum minimum fmax fmin", "default"), _both_saved),
    **dict.fromkeys(_names("max min", "other"), _both_saved),
    **dict.fromkeys(_names("neg _to_copy clone alias detach lift_fresh_copy", "default"), _unary("", linear=True)),
    **dict.fromkeys(_names("gelu silu mish", "default"), _unary("operand", flops=8.0)),
    **dict.fromkeys(_names("abs clamp clamp_min clamp_max hardtanh", "default"), _unary("operand")),
    **dict.fromkeys(
        _names("sin cos erf softplus leaky_relu elu hardswish hardsigmoid relu6", "default"), _unary("operand")
    ),
    **dict.fromkeys(_names("square", "default"), _unary("operand")),
    **dict.fromkeys(_names("relu tanh sigmoid", "default"), _unary("result")),
    **dict.fromkeys(_names("exp expm1", "default"), _unary("result", unsafe=True)),
    **dict.fromkeys(_names("mse_loss smooth_l1_loss huber_loss", "default"), _loss()),
    **dict.fromkeys(_names("soft_margin_loss", "default"), _loss(unsafe=True)),
    **dict.fromkeys(
        _names("binary_cross_entropy binary_cross_entropy_with_logits kl_div", "default"), _loss_of_elements
    ),
    **dict.fromkeys(_names("poisson_nll_loss margin_ranking_loss hinge_embedding_loss", "default"), _loss_of_elements),
    **dict.fromkeys(_names("eq ne lt le gt ge", "Tensor", "Scalar"), _plain),
    **dict.fromkeys(_names("__and__ __or__ __xor__", "Tensor", "Scalar"), _plain),
    **dict.fromkeys(_names("bitwise_and bitwise_or bitwise_xor", "Tensor", "Scalar"), _plain),
    **dict.fromkeys(_names("bitwise_not logical_not logical_and logical_or logical_xor", "default"), _plain),
    **dict.fromkeys(_names("isnan isinf isfinite sign floor ceil round trunc", "default"), _plain),
    **dict.fromkeys(_names("zeros_like ones_like full_like empty_like", "default"), _plain),
}
