"""Sums into places: `index_add: x[nodes ..], index[edges], source[edges ..] -> [nodes ..]`, edges summed.

What is added to (`x`) is added once, so that it is a summand where edges are split. Into which node an edge goes is
known only when the model runs: nodes stay whole, and so do edges of what is no sum (a maximum, a mean, a product).
"""

from collections.abc import Callable

import torch
from torch import fx

from autopar.rules.describe import aligned, all_float, argument, dim_name, normalized_dim, numel, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Dims, Factor, Rule, Shapes, replicated_rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]


def _of_maximum(shapes: Shapes, _: Shapes) -> tuple[int, int]:
    """Backward compares every element with its place's maximum, and counts those that are equal."""
    return 0, 3 * numel(shapes[2]) + 3 * numel(shapes[0])


def _of_product(shapes: Shapes, _: Shapes) -> tuple[int, int]:
    """Backward divides products, and looks for zeros."""
    return 0, 6 * numel(shapes[2]) + 6 * numel(shapes[0])


SPARE = {"amax": _of_maximum, "amin": _of_maximum, "prod": _of_product}


def _rule(node: fx.Node, dims: tuple[Dims, ...], sizes: dict[str, int], summed: frozenset[str]) -> Rule:
    """The rule of a call on (x, indices.., source) whose result has the dims of `x`.

    sizes: of the factors; those of `summed` are edges. Only dims that no index has may be padded.
    """
    last = len(dims) - 1
    indexed = {n for row in dims[1:last] for n in row}
    saves, saves_results, nbytes = kept_by_autograd(node)
    count = float(numel(shapes_of(operands(node))[last]))
    return Rule(
        factors={n: Factor(size=size, summed=n in summed, even=n in indexed) for n, size in sizes.items()},
        operands=dims,
        results=(dims[0],),
        added=frozenset({0}),
        linear=(frozenset({0, last}),) if summed else (),
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=count,
        backward_flops=count if node.meta["requires_grad"] else 0.0,
        spare=SPARE.get(argument(node, 4, "reduce")) if "reduce" in str(node.target) else None,
    )


def _sums(node: fx.Node) -> bool:
    """Whether what goes to one place is added to what is there."""
    if "index_put" in str(node.target):
        return bool(argument(node, 3, "accumulate", False))
    return "add" in str(node.target)


def _whole(node: fx.Node) -> Rule:
    return replicated_rule(tuple(map(len, shapes_of(operands(node)))), (node.meta["val"].dim(),))


def _index_add(node: fx.Node) -> Rule:
    """Rows of `source` are added to those of `x` that `index` names; all other dims are free."""
    sources = operands(node)
    x, index, source = shapes_of(sources)
    if len(x) != len(source) or not x:
        return _whole(node)
    dim = normalized_dim(argument(node, 1, "dim"), len(x))
    names: Dims = tuple(dim_name(d) if d != dim and size > 1 else None for d, size in enumerate(x))
    sizes = {n: x[d] for d, n in enumerate(names) if n}
    edges = dim_name(dim) if all_float(node, (sources[0], sources[-1])) and source[dim] > 1 else None
    if edges:
        sizes[edges] = source[dim]
    rows: Dims = (*names[:dim], edges, *names[dim + 1 :])
    return _rule(node, (names, (edges,) * len(index), rows), sizes, frozenset({edges} if edges else ()))


def _scatter(node: fx.Node) -> Rule:
    """Elements of `source` go to places along a dim; other dims are free where all three tensors are of one size."""
    sources = operands(node)
    x, index, source = shapes_of(sources)
    if not len(x) == len(index) == len(source) or not x:
        return _whole(node)
    dim = normalized_dim(argument(node, 1, "dim"), len(x))
    names: Dims = tuple(dim_name(d) if d != dim and 1 < x[d] == index[d] == source[d] else None for d in range(len(x)))
    sizes = {n: x[d] for d, n in enumerate(names) if n}
    summed = _sums(node) and all_float(node, (sources[0], sources[-1])) and 1 < index[dim] == source[dim]
    edges = dim_name(dim) if summed else None
    if edges:
        sizes[edges] = source[dim]
    rows: Dims = (*names[:dim], edges, *names[dim + 1 :])
    return _rule(node, (names, rows, rows), sizes, frozenset({edges} if edges else ()))


def _index_put(node: fx.Node) -> Rule:
    """`x[:, i, j] = values` with neighbouring integer indices, or added to what stands there."""
    sources = operands(node)
    shapes = shapes_of(sources)
    x, values, indices = shapes[0], shapes[-1], argument(node, 1, "indices")
    places = [d for d, index in enumerate(indices) if index is not None]
    by_mask = any(indices[d].meta["val"].dtype.itemsize == 1 for d in places)
    if by_mask or not places or places != list(range(places[0], places[0] + len(places))):
        return _whole(node)
    before, after = places[0], places[-1] + 1
    shape = tuple(torch.broadcast_shapes(*shapes[1:-1]))  # type: ignore[no-untyped-call]
    addressed = (*x[:before], *shape, *x[after:])
    _, index_dims, _ = aligned(shapes[1:-1], shape)
    _, (value_dims,), names = aligned((values,), addressed)
    edges = {n for n in names[before : before + len(shape)] if n}
    summed = _sums(node) and all_float(node, (sources[0], sources[-1]))
    free = {n for n in names if n and (summed or n not in edges)}
    shifted = {dim_name(d): names[before + d] for d in range(len(shape))}
    rows = [*(tuple(shifted[n] if n else None for n in row) for row in index_dims), value_dims]
    kept = [tuple(n if n in free else None for n in row) for row in rows]
    whole: Dims = (*names[:before], *(None,) * len(places), *names[before + len(shape) :])
    sizes = {n: addressed[d] for d, n in enumerate(names) if n in free}
    return _rule(node, (whole, *kept), sizes, frozenset(edges & free))


RULES: dict[str, Maker] = {
    "aten.index_add.default": _index_add,
    "aten.index_put.default": _index_put,
    "aten.scatter_add.default": _scatter,
    "aten.scatter_reduce.two": _scatter,
}
