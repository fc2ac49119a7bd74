"""Matrix products: `linear: x[.. rows], w[columns rows], bias[columns] -> y[.. columns]`, rows summed.

Rows are input features and columns output features, whichever way a weight is stored. A product is linear in either
operand; a bias is added once to the sum over split rows.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import fx

from autopar.rules.describe import aligned, all_float, dim_name, grads_of, numel, shapes_of
from autopar.rules.rule import Dims, Factor, Product, Rule, Shapes, replicated_rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]
Sizes = Callable[[Shapes, Shapes], tuple[int, int, int, int]]


def _linear_sizes(operand_shapes: Shapes, _: Shapes) -> tuple[int, int, int, int]:
    x, weight = operand_shapes[:2]
    return 1, numel(x[:-1]), weight[0], x[-1]


def _matmul_sizes(operand_shapes: Shapes, result_shapes: Shapes) -> tuple[int, int, int, int]:
    """A batch beside a single matrix is rows of one product, as torch folds it."""
    a, b = operand_shapes[-2:]
    if len(b) == 2:
        return 1, numel(a[:-1]), b[-1], a[-1]
    return numel(result_shapes[0][:-2]), a[-2], b[-1], a[-1]


class ProductDims(NamedTuple):
    """Dims of `left x right + bias`; bias_first: it is the first operand."""

    left: Dims
    right: Dims
    bias: Dims | None
    result: Dims
    bias_first: bool = False


def product_rule(
    node: fx.Node,
    dims: ProductDims,
    factors: dict[str, Factor],
    *,
    flops: float,
    copied: tuple[int, int] = (0, 0),
    sizes: Sizes = _matmul_sizes,
) -> Rule:
    """The rule of `left x right + bias`; each factor of the product is saved for the gradient of the other.

    `copied`: bytes of the broadcast copy that is kept in place of the left and right operand, 0 where none is made.
    """
    sources, (left, right, bias, result, bias_first) = operands(node), dims
    first = 1 if bias_first else 0
    second = first + 1
    added = frozenset() if bias is None else frozenset({0 if bias_first else 2})
    placed = (left, right) if bias is None else (bias, left, right) if bias_first else (left, right, bias)
    grads = grads_of(sources)
    kept = [nbytes if grads[other] else None for nbytes, other in zip(copied, (second, first), strict=True)]
    linear = tuple(added | {i} for i in (first, second))
    return Rule(
        factors={n: f for n, f in factors.items() if f.size > 1},
        operands=placed,
        results=(result,),
        added=added,
        linear=linear if all_float(node, sources) and sources[first] is not sources[second] else (),
        saves=tuple(i for i, nbytes in zip((first, second), kept, strict=True) if nbytes == 0),
        saves_nbytes=sum(filter(None, kept)),
        flops=flops,
        backward_flops=flops * (grads[first] + grads[second]),
        product=Product(left=first, right=second, sizes=sizes, in_rows=True),
    )


def _dim(name: str, size: int) -> str | None:
    """A factor's name, None for a dim of size 1."""
    return name if size > 1 else None


def _linear(node: fx.Node) -> Rule:
    shapes = shapes_of(operands(node))
    x, weight = shapes[0], shapes[1]
    if len(weight) != 2:
        return replicated_rule(tuple(map(len, shapes)), (node.meta["val"].dim(),))
    batch: Dims = tuple(_dim(dim_name(d), size) for d, size in enumerate(x[:-1]))
    rows, columns = _dim("rows", weight[1]), _dim("columns", weight[0])
    factors = {
        **{n: Factor(size=x[d], even=False) for d, n in enumerate(batch) if n},
        "columns": Factor(size=weight[0], even=False),
        "rows": Factor(size=weight[1], summed=True),
    }
    return product_rule(
        node,
        ProductDims((*batch, rows), (columns, rows), (columns,) if len(shapes) == 3 else None, (*batch, columns)),
        factors,
        flops=2.0 * numel(x) * weight[0],
        sizes=_linear_sizes,
    )


def _matmul(node: fx.Node) -> Rule:
    """matmul, mm, bmm: batch dims broadcast."""
    a, b = shapes_of(operands(node))
    if len(a) < 2 or len(b) < 2:
        return replicated_rule((len(a), len(b)), (node.meta["val"].dim(),))
    return _batched(node, a, b, None)


def _addmm(node: fx.Node) -> Rule:
    """addmm, baddbmm: operands (bias, a, b); the bias broadcasts."""
    bias, a, b = shapes_of(operands(node))
    return _batched(node, a, b, bias)


def _batched(node: fx.Node, a: tuple[int, ...], b: tuple[int, ...], bias: tuple[int, ...] | None) -> Rule:
    result = tuple(node.meta["val"].shape)
    factors, (left, right), batch = aligned((a[:-2], b[:-2]), result[:-2])
    row_dim = dim_name(len(result) - 2)
    row, rows, columns = _dim(row_dim, a[-2]), _dim("rows", a[-1]), _dim("columns", b[-1])
    out = (*batch, row, columns)
    added: Dims | None = None
    if bias is not None:
        offset = len(result) - len(bias)
        added = tuple(out[offset + d] if size == result[offset + d] else None for d, size in enumerate(bias))
    return product_rule(
        node,
        ProductDims((*left, row, rows), (*right, rows, columns), added, out, bias_first=bias is not None),
        {
            **factors,
            row_dim: Factor(size=a[-2], even=False),
            "columns": Factor(size=b[-1], even=False),
            "rows": Factor(size=a[-1], summed=True),
        },
        flops=2.0 * numel(result) * a[-1],
        copied=_copies(node, a, b, result),
    )


def _copies(node: fx.Node, a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of an operand's copy where its batch dims are broadcast; a matrix beside a batch is folded instead."""
    if len(a) == 2 or len(b) == 2:
        return 0, 0
    element_size = node.meta["val"].dtype.itemsize
    left, right = (
        0 if side[:-2] == result[:-2] else numel(result[:-2]) * numel(side[-2:]) * element_size for side in (a, b)
    )
    return left, right


RULES: dict[str, Maker] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
}
