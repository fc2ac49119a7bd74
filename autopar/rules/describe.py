"""What does a rule ask of its node? Shapes, dtypes, gradients and arguments, and the factors of aligned dims."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from autopar.rules.rule import Dims, Factor, Local

Shape = tuple[int, ...]
Factors = Mapping[str, Factor]


@lru_cache(maxsize=256)
def dim_name(dim: int) -> str:
    return f"dim{dim}"


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of the node's call, given by position or by keyword."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def shapes_of(nodes: tuple[fx.Node, ...]) -> tuple[Shape, ...]:
    return tuple(tuple(n.meta["val"].shape) for n in nodes)


def grads_of(nodes: tuple[fx.Node, ...]) -> tuple[bool, ...]:
    return tuple(bool(n.meta.get("requires_grad", False)) for n in nodes)


def result_values(node: fx.Node) -> tuple[Tensor, ...]:
    """The node's results on the meta device: one tensor, or those of a tuple."""
    value = node.meta["val"]
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def all_float(node: fx.Node, nodes: tuple[fx.Node, ...]) -> bool:
    """Whether `nodes` and all results of `node` are floating: only those may be summands."""
    return all(map(is_float, nodes)) and all(v.dtype.is_floating_point for v in result_values(node))


def together(node: fx.Node, nodes: tuple[fx.Node, ...], *indices: int) -> tuple[frozenset[int], ...]:
    """One set of operands in which the op is linear together, if all are floating."""
    return (frozenset(indices),) if all_float(node, tuple(nodes[i] for i in indices)) else ()


def numel(shape: Shape) -> int:
    return math.prod(shape)


def statistics_size(dtype: torch.dtype) -> int:
    """Bytes of one statistic (mean, logsumexp) of a tensor of `dtype`: kernels keep them in float32 at least."""
    return max(4, dtype.itemsize)


def normalized_dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def normalized_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims of a reduction as a sorted tuple, all of them where none is named."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted(normalized_dim(d, rank) for d in dims))


@lru_cache(maxsize=1 << 16)
def aligned(
    shapes: tuple[Shape, ...], result: Shape, unsafe: frozenset[int] = frozenset()
) -> tuple[Factors, tuple[Dims, ...], Dims]:
    """Factors of a broadcasting op: one a result dim; (factors, dims of operands, dims of the result).

    A dim is padded in use unless an operand of `unsafe` runs over it: one whose garbage can become NaN or infinity.
    """
    names: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(result))
    operands = tuple(
        tuple(names[d] if size == result[d] else None for d, size in enumerate(shape, start=len(result) - len(shape)))
        for shape in shapes
    )
    factors = {
        name: Factor(size=result[d], even=any(name in operands[i] for i in unsafe))
        for d, name in enumerate(names)
        if name is not None
    }
    return factors, operands, names


@lru_cache(maxsize=1 << 14)
def free_dims(shape: Shape, fixed: frozenset[int] = frozenset(), even: bool = False) -> tuple[Factors, Dims]:
    """One factor a dim, none for dims of size 1 and for `fixed` dims."""
    names: Dims = tuple(dim_name(d) if size > 1 and d not in fixed else None for d, size in enumerate(shape))
    return {n: Factor(size=shape[d], even=even) for d, n in enumerate(names) if n is not None}, names


def names_along(local: Local, layout_dims: tuple[int, ...]) -> tuple[str, ...]:
    """Names of mesh axes, given by index."""
    return tuple(local.mesh.names[a] for a in layout_dims)
