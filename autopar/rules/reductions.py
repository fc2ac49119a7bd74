"""Reductions and orderings: reduced dims are summed factors for sum and mean, whole for everything else.

A mean over a split dim is the local sum over the global count, a summand.
"""

from collections.abc import Callable, Mapping

from torch import fx

from autopar.ops.mean import mean
from autopar.rules.describe import (
    all_float,
    argument,
    dim_name,
    grads_of,
    normalized_dims,
    numel,
    result_values,
    shapes_of,
)
from autopar.rules.rule import Call, Dims, Factor, Local, Rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]


def reduction_rule(
    node: fx.Node,
    dims: tuple[int, ...],
    *,
    keepdim: bool,
    summed: bool = False,
    saves: tuple[int, ...] = (),
    saves_results: tuple[int, ...] = (),
    even: bool = False,
) -> Rule:
    """The rule of a reduction over `dims` of operand 0; its factors are named after the operand's dims."""
    sources = operands(node)
    x = shapes_of(sources)[0]
    summed = summed and all_float(node, sources[:1])
    names: Dims = tuple(dim_name(d) if size > 1 and (summed or d not in dims) else None for d, size in enumerate(x))
    factors = {
        n: Factor(size=x[d], summed=d in dims, even=even or d in dims) for d, n in enumerate(names) if n is not None
    }
    kept: Dims = tuple(None if d in dims else n for d, n in enumerate(names) if keepdim or d not in dims)
    graded = any(grads_of(sources))
    return Rule(
        factors=factors,
        operands=(names,),
        results=(kept,) * len(result_values(node)),
        linear=(frozenset({0}),) if summed else (),
        saves=saves if graded else (),
        saves_results=saves_results if graded else (),
        flops=float(numel(x)),
        backward_flops=float(numel(x)) if graded else 0.0,
    )


def _reduced(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    """Reduced dims and `keepdim` of an op called as (x, dims, keepdim)."""
    rank = len(shapes_of(operands(node))[0])
    return normalized_dims(argument(node, 1, "dim"), rank), bool(argument(node, 2, "keepdim", False))


def _all_dims(node: fx.Node) -> tuple[int, ...]:
    return tuple(range(len(shapes_of(operands(node))[0])))


def _sum(node: fx.Node) -> Rule:
    dims, keepdim = _reduced(node)
    return reduction_rule(node, dims, keepdim=keepdim, summed=True)


def _sum_all(node: fx.Node) -> Rule:
    return reduction_rule(node, _all_dims(node), keepdim=False, summed=True)


def _mean(node: fx.Node) -> Rule:
    dims, keepdim = _reduced(node)
    return _mean_rule(node, dims, keepdim)


def _mean_all(node: fx.Node) -> Rule:
    return _mean_rule(node, _all_dims(node), False)


def _mean_rule(node: fx.Node, dims: tuple[int, ...], keepdim: bool) -> Rule:
    rule = reduction_rule(node, dims, keepdim=keepdim, summed=True)
    x = shapes_of(operands(node))[0]
    split = tuple(n for n, factor in rule.factors.items() if factor.summed)
    count = numel(tuple(x[d] for d in dims))

    def localize(local: Local) -> Call:
        if not local.axes(*split):
            return node.target, node.args, dict(node.kwargs)  # type: ignore[return-value]
        dtype = node.kwargs.get("dtype")
        return mean, (node.args[0], dims), {"keepdim": keepdim, "count": count, "dtype": dtype}

    return Rule(
        factors=rule.factors,
        operands=rule.operands,
        results=rule.results,
        linear=rule.linear,
        flops=rule.flops,
        backward_flops=rule.backward_flops,
        localize=localize,
    )


def _over_dims(*, saves: tuple[int, ...] = (), saves_results: tuple[int, ...] = (), even: bool = False) -> Maker:
    def rule(node: fx.Node) -> Rule:
        dims, keepdim = _reduced(node)
        return reduction_rule(node, dims, keepdim=keepdim, saves=saves, saves_results=saves_results, even=even)

    return rule


def _over_all(*, saves: tuple[int, ...] = (), saves_results: tuple[int, ...] = ()) -> Maker:
    def rule(node: fx.Node) -> Rule:
        return reduction_rule(node, _all_dims(node), keepdim=False, saves=saves, saves_results=saves_results)

    return rule


def _spread(node: fx.Node) -> Rule:
    """var, std: dims come first, `correction` and `keepdim` by keyword."""
    rank = len(shapes_of(operands(node))[0])
    dims = normalized_dims(argument(node, 1, "dim"), rank)
    std = "std" in str(node.target)
    keepdim = bool(node.kwargs.get("keepdim", False))
    return reduction_rule(node, dims, keepdim=keepdim, saves=(0,), saves_results=(0,) if std else (), even=std)


def _ordered(position: int) -> Maker:
    """sort, topk: one dim whole, its size may change; backward reads the indices."""

    def rule(node: fx.Node) -> Rule:
        rank = len(shapes_of(operands(node))[0])
        dims = normalized_dims(argument(node, position, "dim", -1), rank)
        return reduction_rule(node, dims, keepdim=True, saves_results=(1,))

    return rule


RULES: Mapping[str, Maker] = {
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum_all,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean_all,
    "aten.amax.default": _over_dims(saves=(0,), saves_results=(0,)),
    "aten.amin.default": _over_dims(saves=(0,), saves_results=(0,)),
    "aten.logsumexp.default": _over_dims(saves=(0,), saves_results=(0,)),
    "aten.max.dim": _over_dims(saves_results=(1,)),
    "aten.min.dim": _over_dims(saves_results=(1,)),
    "aten.max.default": _over_all(saves=(0,), saves_results=(0,)),
    "aten.min.default": _over_all(saves=(0,), saves_results=(0,)),
    "aten.any.dim": _over_dims(),
    "aten.all.dim": _over_dims(),
    "aten.any.default": _over_all(),
    "aten.all.default": _over_all(),
    "aten.argmax.default": _over_dims(),
    "aten.argmin.default": _over_dims(),
    "aten.var.correction": _spread,
    "aten.std.correction": _spread,
    "aten.sort.default": _ordered(1),
    "aten.topk.default": _ordered(2),
}
