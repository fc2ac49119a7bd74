"""What does a call allocate beside its operands, results and what autograd keeps, and which gradients does it hand on?

Spare bytes are counted in units of the call's largest tensor on the rank: temporary results of kernels that torch
composes of others, seen as one peak (tests/test_rules_spare.py measures each). A gradient is *handed on* where backward
gives an operand the storage of the gradient that it got, as views and sums do; else it is written anew.
"""

from torch import fx

from autopar.graph import operands, target_name
from autopar.rules.rule import Rule

WRITTEN = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "expand", "diagonal"})
"""Views whose gradient is written: a sum, or zeros around a part."""

HANDED = frozenset({"add", "clone", "alias"})
"""Ops that hand on a gradient to each operand of the result's size, `sub` to its first."""

BACKWARD: dict[str, float] = {
    "abs": 1.0, "sin": 1.0, "cos": 2.0, "erf": 4.0, "square": 2.0, "sqrt": 1.0, "rsqrt": 2.0, "reciprocal": 2.0,
    "log1p": 1.0, "pow": 2.0, "clamp": 0.5, "div": 2.0, "where": 1.0, "dropout": 0.75, "cumsum": 2.0, "maximum": 1.0,
    "minimum": 1.0, "amax": 0.75, "amin": 0.75, "logsumexp": 2.0, "max": 1.0, "min": 1.0, "var": 1.33, "std": 1.5,
    "topk": 1.0, "sort": 1.0, "index": 1.0, "index_select": 1.0, "gather": 1.0, "cross_entropy": 1.0, "atan2": 5.0,
}  # fmt: skip
"""Spare tensors of backward; an elementwise op with an operand that is broadcast needs one for its sum."""

FORWARD: dict[str, float] = {"dropout": 1.0}


def short_name(node: fx.Node) -> str:
    """`mul` of `aten.mul.Tensor`, `dropout` of our own function."""
    return target_name(node.target).removeprefix("aten.").split(".")[0].rsplit(":")[-1]


def spare(node: fx.Node, rule: Rule) -> tuple[float, float]:
    """Spare tensors of the forward and of the backward pass."""
    if rule.alias is not None:
        return 0.0, 0.0
    name = short_name(node)
    shapes = {tuple(source.meta["val"].shape) for source in operands(node)}
    broadcast = 1.0 if name in ("mul", "div", "add", "sub", "pow") and len(shapes) > 1 else 0.0
    return FORWARD.get(name, 0.0), max(BACKWARD.get(name, 0.0), broadcast)


def handed_on(node: fx.Node, rule: Rule) -> frozenset[int]:
    """Operands that backward gives the gradient of the (first) result as it is."""
    name = short_name(node)
    if rule.alias is not None:
        return frozenset() if name in WRITTEN else frozenset({rule.alias})
    if name not in HANDED and name != "sub":
        return frozenset()
    value = node.meta["val"]
    same = [i for i, s in enumerate(operands(node)) if s.meta["val"].shape == value.shape]
    scaled = node.kwargs.get("alpha", 1) != 1
    return frozenset(i for i in same if i == 0 or (name == "add" and not scaled))
