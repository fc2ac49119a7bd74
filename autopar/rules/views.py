"""Ops that only move elements: which dim of the result is which dim of the operand?

A reshape groups sizes: the smallest runs of dims on both sides with equal products hold the same elements. In a group
the leftmost dim other than 1 on each side may be split together, if both divide (splitting and merging heads, repeating
key/value heads); a group of one dim a side is that dim itself and may be padded in use. A dim that is cut, joined or
indexed cannot be split. All are linear and save nothing; size arguments are rewritten to local sizes.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, fx

from autopar.rules.describe import (
    Factors,
    Shape,
    all_float,
    argument,
    dim_name,
    free_dims,
    normalized_dim,
    normalized_dims,
    result_values,
    shapes_of,
)
from autopar.rules.rule import Call, Dims, Factor, Local, Rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]
Map = tuple[int | None, ...]
"""For each dim of a result, the dim of the operand that it is, None where it is cut, joined or new."""

aten = torch.ops.aten

RESHAPING = ("view", "reshape", "_unsafe_view")
"""Calls that copy where strides do not allow a view."""

PERMUTING = ("permute", "transpose", "t")
"""Calls whose result lies with its dims in another order."""


@lru_cache(maxsize=1 << 14)
def reshape_dims(source: Shape, target: Shape) -> tuple[Factors, Dims, Dims]:
    """Factors of a reshape, named after the result's dims; (factors, dims of the operand, dims of the result)."""
    before: list[str | None] = [None] * len(source)
    after: list[str | None] = [None] * len(target)
    factors: dict[str, Factor] = {}
    left = [(d, size) for d, size in enumerate(source) if size != 1]
    right = [(d, size) for d, size in enumerate(target) if size != 1]
    if any(size == 0 for _, size in left):
        return {}, tuple(before), tuple(after)
    while left:
        (dim, size), (other, other_size) = left.pop(0), right.pop(0)
        product, other_product, count = size, other_size, 2
        while product != other_product:
            count += 1
            if product < other_product:
                product *= left.pop(0)[1]
            else:
                other_product *= right.pop(0)[1]
        common = math.gcd(size, other_size)
        if common > 1:
            name = dim_name(other)
            before[dim], after[other] = name, name
            factors[name] = Factor(size=common, even=count > 2)
    return factors, tuple(before), tuple(after)


def _linear(node: fx.Node) -> tuple[frozenset[int], ...]:
    sources = operands(node)
    return (frozenset(range(len(sources))),) if all_float(node, sources) else ()


def _reshape(node: fx.Node) -> Rule:
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    factors, before, after = reshape_dims(source, target)
    return Rule(
        factors=factors,
        operands=(before,),
        results=(after,),
        linear=_linear(node),
        alias=0 if is_view(operands(node)[0].meta["val"], target) else None,
        localize=_local_reshape,
    )


def is_view(source: Tensor, target: Shape) -> bool:
    """Whether a tensor of these strides takes the shape without a copy."""
    try:
        source.view(target)
    except RuntimeError:
        return False
    return True


def expanded_gradient(total: fx.Node) -> Tensor:
    """How the gradient that a sum gives its operand lies: the result's, expanded."""
    source = shapes_of(operands(total))[0]
    summed = normalized_dims(argument(total, 1, "dim"), len(source))
    kept = torch.empty([1 if d in summed else size for d, size in enumerate(source)], device="meta")
    return kept.expand(source)


def permuted_gradient(moved: fx.Node, gradient: Tensor) -> Tensor:
    """How the gradient that a permutation gives its operand lies, for how that of its result does."""
    if moved.target is aten.permute.default:
        dims = [normalized_dim(d, gradient.dim()) for d in argument(moved, 1, "dims")]
        return gradient.permute([dims.index(d) for d in range(gradient.dim())])
    first, second = (argument(moved, at, name) for at, name in ((1, "dim0"), (2, "dim1")))
    return gradient.mT if first is None and gradient.dim() > 1 else gradient.transpose(first or 0, second or 0)


def _local_reshape(local: Local) -> Call:
    # reshape, not view: a shard may have other strides than the whole had
    return aten.reshape.default, (local.node.args[0], list(local.result_shapes[0])), {}


def _expand(node: fx.Node) -> Rule:
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    factors, after = free_dims(target)
    offset = len(target) - len(source)
    before = tuple(after[offset + d] if size == target[offset + d] else None for d, size in enumerate(source))
    return Rule(
        factors=factors,
        operands=(before,),
        results=(after,),
        linear=_linear(node),
        alias=0,
        localize=lambda local: (aten.expand.default, (local.node.args[0], list(local.result_shapes[0])), {}),
    )


def _repeat(node: fx.Node) -> Rule:
    """A dim repeated once is itself; one of size 1 or new is made on each rank; others cannot be split."""
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    offset = len(target) - len(source)
    padded = (1,) * offset + source
    fixed = frozenset(d for d, size in enumerate(padded) if size not in (1, target[d]))
    factors, after = free_dims(target, fixed)
    before = tuple(after[offset + d] if size == target[offset + d] else None for d, size in enumerate(source))

    def localize(local: Local) -> Call:
        shape = (1,) * offset + local.operand_shapes[0]
        repeats = [r // s if s else 1 for r, s in zip(local.result_shapes[0], shape, strict=True)]
        return aten.repeat.default, (local.node.args[0], repeats), {}

    return Rule(factors=factors, operands=(before,), results=(after,), linear=_linear(node), localize=localize)


def mapped_rule(node: fx.Node, where: Map, *, alias: int | None = 0) -> Rule:
    """The rule of an op whose results' dim i is dim `where[i]` of its operand."""
    source = shapes_of(operands(node))[0]
    factors, before, after = _mapped_dims(source, where)
    return Rule(
        factors=factors,
        operands=(before,),
        results=(after,) * len(result_values(node)),
        linear=_linear(node),
        alias=alias,
    )


@lru_cache(maxsize=1 << 14)
def _mapped_dims(source: Shape, where: Map) -> tuple[Factors, Dims, Dims]:
    after: Dims = tuple(dim_name(d) if o is not None and source[o] > 1 else None for d, o in enumerate(where))
    names = {o: after[d] for d, o in enumerate(where) if o is not None}
    factors = {n: Factor(size=source[o], even=False) for o, n in names.items() if n is not None}
    return factors, tuple(names.get(o) for o in range(len(source))), after


def _rank(node: fx.Node) -> int:
    rank: int = operands(node)[0].meta["val"].dim()
    return rank


def _permute(node: fx.Node) -> Rule:
    rank = _rank(node)
    return mapped_rule(node, tuple(normalized_dim(d, rank) for d in argument(node, 1, "dims")))


def _transpose(node: fx.Node) -> Rule:
    rank = _rank(node)
    where = list(range(rank))
    if rank >= 2:
        first = normalized_dim(argument(node, 1, "dim0", 0), rank)
        second = normalized_dim(argument(node, 2, "dim1", 1), rank)
        where[first], where[second] = second, first
    return mapped_rule(node, tuple(where))


def _matrix_transpose(node: fx.Node) -> Rule:
    rank = _rank(node)
    return mapped_rule(node, (*range(rank - 2), rank - 1, rank - 2))


def _unsqueeze(node: fx.Node) -> Rule:
    rank = _rank(node)
    dim = normalized_dim(argument(node, 1, "dim"), rank + 1)
    return mapped_rule(node, (*range(dim), None, *range(dim, rank)))


def _select(node: fx.Node) -> Rule:
    rank = _rank(node)
    dim = normalized_dim(argument(node, 1, "dim", 0), rank)
    return mapped_rule(node, tuple(d for d in range(rank) if d != dim))


def _unbind(node: fx.Node) -> Rule:
    rank = _rank(node)
    dim = normalized_dim(argument(node, 1, "dim", 0), rank)
    return mapped_rule(node, tuple(d for d in range(rank) if d != dim))


def _same_dims(node: fx.Node, *, cut: tuple[int, ...], alias: int | None) -> Rule:
    return mapped_rule(node, tuple(None if d in cut else d for d in range(_rank(node))), alias=alias)


def _slice(node: fx.Node) -> Rule:
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    dim = normalized_dim(argument(node, 1, "dim", 0), len(source))
    return _same_dims(node, cut=() if source == target else (dim,), alias=0)


def _split(node: fx.Node) -> Rule:
    return _same_dims(node, cut=(normalized_dim(argument(node, 2, "dim", 0), _rank(node)),), alias=0)


def _flip(node: fx.Node) -> Rule:
    rank = _rank(node)
    return _same_dims(node, cut=tuple(normalized_dim(d, rank) for d in argument(node, 1, "dims")), alias=None)


def _triangle(node: fx.Node) -> Rule:
    rank = _rank(node)
    return _same_dims(node, cut=(rank - 2, rank - 1), alias=None)


def _along(node: fx.Node) -> Rule:
    """cumsum: linear, one dim whole."""
    return _same_dims(node, cut=(normalized_dim(argument(node, 1, "dim"), _rank(node)),), alias=None)


def _pad(node: fx.Node) -> Rule:
    source, target = shapes_of(operands(node))[0], tuple(node.meta["val"].shape)
    pads = argument(node, 1, "pad")
    rank = len(source)
    cut = tuple(rank - 1 - i // 2 for i, amount in enumerate(pads) if amount)
    rule = mapped_rule(node, tuple(None if d in cut else d for d in range(len(target))), alias=None)
    zero = not argument(node, 2, "value", 0) if "constant" in str(node.target) else not argument(node, 3, "value", 0)
    return rule if zero else Rule(factors=rule.factors, operands=rule.operands, results=rule.results)


def _join(node: fx.Node, dim: int, shape: Shape) -> Rule:
    """cat: all dims but the joined one; operands of another rank (legacy empty ones) stay whole."""
    factors, names = free_dims(shape, frozenset({dim}))
    sources = shapes_of(operands(node))
    dims = tuple(names if len(s) == len(shape) else (None,) * len(s) for s in sources)
    return Rule(factors=factors, operands=dims, results=(names,), linear=_linear(node))


def _cat(node: fx.Node) -> Rule:
    shape = tuple(node.meta["val"].shape)
    return _join(node, normalized_dim(argument(node, 1, "dim", 0), len(shape)), shape)


def _stack(node: fx.Node) -> Rule:
    shape = tuple(node.meta["val"].shape)
    dim = normalized_dim(argument(node, 1, "dim", 0), len(shape))
    factors, names = free_dims(shape, frozenset({dim}))
    parts = names[:dim] + names[dim + 1 :]
    return Rule(factors=factors, operands=(parts,) * len(operands(node)), results=(names,), linear=_linear(node))


def _scatter(node: fx.Node) -> Rule:
    """slice_scatter, select_scatter: `source` written over part of `x`, along one dim."""
    x, source = shapes_of(operands(node))
    dim = normalized_dim(argument(node, 2, "dim", 0), len(x))
    factors, names = free_dims(x, frozenset({dim}))
    written = names if len(source) == len(x) else names[:dim] + names[dim + 1 :]
    return Rule(factors=factors, operands=(names, written), results=(names,), linear=_linear(node))


RULES: dict[str, Maker] = {
    "aten.view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.mT.default": _matrix_transpose,
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.flip.default": _flip,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.cumsum.default": _along,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.stack.default": _stack,
    "aten.slice_scatter.default": _scatter,
    "aten.select_scatter.default": _scatter,
}
