"""What does a call allocate beside its operands, results and what autograd keeps, and which gradients does it hand on?

Spare bytes are counted in units of the call's largest tensor on the rank: temporary results of kernels that torch
composes of others (tests/test_rules_spare.py measures them). A gradient is *handed on* where backward gives an operand
the storage of the gradient that it got, as views and sums do; else it is written anew.
"""

from functools import cache
from typing import Any

from torch import Tensor, fx

from autopar.rules.rule import Rule
from autopar.values.graph import operands, requires_grad, target_name

WRITTEN = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "expand", "diagonal"})
"""Views whose gradient is written: a sum, or zeros around a part."""

HANDED: dict[str, tuple[int, ...]] = {
    "clone": (0,),
    "alias": (0,),
    "add": (0, 1),
    "sub": (0,),
    "_to_copy": (0,),
    "baddbmm": (0,),
    "index_add": (0,),
    "scatter_add": (0,),
    "index_put": (0,),
}
"""Operands of the result's size and dtype that are given its gradient."""

VIEWED: dict[str, tuple[int, ...]] = {
    "sum": (0,), "view": (0,), "reshape": (0,), "slice_scatter": (1,), "select_scatter": (1,),
}  # fmt: skip
"""Operands that are given a view of it, a part or expanded; `stack` and `cat` give each of its own."""

BACKWARD: dict[str, float] = {
    "abs": 1.0, "sin": 1.0, "cos": 2.0, "erf": 4.0, "square": 2.0, "sqrt": 1.0, "rsqrt": 2.0, "reciprocal": 2.0,
    "log1p": 1.0, "pow": 2.0, "clamp": 0.5, "div": 3.0, "where": 1.0, "dropout": 0.75, "cumsum": 2.0, "maximum": 1.0,
    "minimum": 1.0, "amax": 0.75, "amin": 0.75, "logsumexp": 2.0, "max": 1.0, "min": 1.0, "var": 1.33, "std": 1.5,
    "topk": 1.0, "sort": 1.0, "cross_entropy": 1.0, "atan2": 5.0,
}  # fmt: skip
"""Spare tensors of backward; an elementwise op with an operand that is broadcast needs one for its sum."""

AT_ONCE = frozenset({"scaled_dot_product_attention", "prelu", "_prelu_kernel", "grouped_linear", "scatter_reduce"})
"""Ops that make all gradients in one call, which is not told those asked for."""

FORWARD: dict[str, float] = {"dropout": 1.0, "alpha_dropout": 1.0, "rrelu": 1.0}


def short_name(node: fx.Node) -> str:
    """`mul` of `aten.mul.Tensor`, `dropout` of our own function."""
    return _short(node.target)


@cache
def _short(target: Any) -> str:
    return target_name(target).removeprefix("aten.").split(".")[0].rsplit(":")[-1]


def spare(node: fx.Node, rule: Rule) -> tuple[float, float]:
    """Spare tensors of the forward and of the backward pass."""
    if rule.alias is not None:
        return 0.0, 0.0
    name = short_name(node)
    shape = tuple(value.shape) if isinstance(value := node.meta["val"], Tensor) else ()
    summed = any(requires_grad(s) and tuple(s.meta["val"].shape) != shape for s in operands(node))
    is_scaled = name != "add" or node.kwargs.get("alpha", 1) != 1  # what a sum hands on is reduced as it is
    broadcast = 1.0 if name in ("mul", "div", "add", "sub", "pow") and summed and is_scaled else 0.0
    backward = BACKWARD.get(name, 0.0)
    if name == "div" and not any(requires_grad(s) for s in operands(node)[1:]):
        backward = 0.0  # all is spent on the divisor's gradient
    return FORWARD.get(name, 0.0), max(backward, broadcast)


def gives_all(node: fx.Node) -> bool:
    """Whether backward makes the gradients of all operands at once, whichever are asked for: torch's kernels without
    a mask, and what a library registers (it may not, which nobody can see)."""
    return short_name(node) in AT_ONCE or getattr(node.target, "namespace", "aten") not in ("aten", "autopar")


def handed_on(node: fx.Node, rule: Rule) -> frozenset[int]:
    """Operands that backward gives the gradient of the (first) result as it is."""
    name = short_name(node)
    if rule.alias is not None:
        return frozenset() if name in WRITTEN else frozenset({rule.alias})
    sources = operands(node)
    if name in ("stack", "cat") or (name == "einsum" and _is_sum(str(node.args[0]))):
        return frozenset(range(len(sources)))
    value = node.meta["val"]
    given = HANDED.get(name, ()) if node.kwargs.get("alpha", 1) == 1 else HANDED.get(name, ())[:1]
    if name == "index_put" and not (len(node.args) > 3 and node.args[3]):  # what is written over has no gradient
        given = ()
    alike = (i for i in given if i < len(sources) and sources[i].meta["val"].shape == value.shape)
    same = frozenset(i for i in alike if sources[i].meta["val"].dtype == value.dtype)
    return same | frozenset(VIEWED.get(name, ()))


def _is_sum(equation: str) -> bool:
    """Whether an einsum sums one operand over some of its letters."""
    letters = equation.split("->")[0].replace(" ", "").replace("...", "")
    return "," not in letters and len(set(letters)) == len(letters)
