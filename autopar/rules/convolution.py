"""Convolutions and pooling: `x[batch rows ..], w[columns rows ..], bias[columns] -> y[batch columns ..]`, rows summed.

As in a matrix product rows are input channels and columns output channels; with groups, a group of both. Spatial dims
stay whole (halos).
"""

from collections.abc import Callable

from torch import fx

from autopar.rules.describe import all_float, argument, grads_of, numel, result_values, shapes_of
from autopar.rules.rule import Call, Dims, Factor, Local, Product, Rule, Shapes, replicated_rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]


def _convolution(groups_position: int) -> Maker:
    def rule(node: fx.Node) -> Rule:
        return _convolution_rule(node, groups_position)

    return rule


def _convolution_rule(node: fx.Node, groups_position: int) -> Rule:
    sources = operands(node)
    shapes = shapes_of(sources)
    x, weight = shapes[:2]
    result = tuple(node.meta["val"].shape)
    transposed = "transpose" in str(node.target) or bool(groups_position == 8 and node.args[6])
    if len(x) != len(weight):
        return replicated_rule(tuple(map(len, shapes)), (len(result),))
    groups = argument(node, groups_position, "groups", 1)
    spatial: Dims = (None,) * (len(x) - 2)
    factors = {"batch": Factor(size=x[0], even=False)}
    if groups == 1:
        rows, columns = "rows", "columns"
        factors |= {"columns": Factor(size=result[1], even=False), "rows": Factor(size=x[1], summed=True)}
        filters = (rows, columns) if transposed else (columns, rows)
        dims: list[Dims] = [("batch", rows, *spatial), (*filters, *spatial)]
    else:
        columns = "groups"
        factors["groups"] = Factor(size=groups)
        dims = [("batch", "groups", *spatial), ("groups", None, *spatial)]
    if len(sources) == 3:
        dims.append((columns,))
    factors = {n: f for n, f in factors.items() if f.size > 1}
    grads = grads_of(sources)
    flops = 2.0 * numel(x if transposed else result) * numel(weight[1:])
    bias = frozenset(range(2, len(sources)))

    def localize(local: Local) -> Call:
        parts = numel(tuple(local.mesh.shape[a] for a in local.axis_indices("groups")))
        if parts == 1:
            return node.target, node.args, dict(node.kwargs)  # type: ignore[return-value]
        args = (*node.args[:groups_position], groups // parts, *node.args[groups_position + 1 :])
        return node.target, args, dict(node.kwargs)  # type: ignore[return-value]

    return Rule(
        factors=factors,
        operands=tuple(tuple(n if n in factors else None for n in d) for d in dims),
        results=(tuple(n if n in factors else None for n in ("batch", columns, *spatial)),),
        added=bias,
        linear=(bias | {0},) if all_float(node, sources) else (),
        saves=(0, 1) if any(grads) else (),
        flops=flops,
        backward_flops=flops * (grads[0] + grads[1]),
        localize=localize if groups > 1 else None,
        product=Product(left=0, right=1, sizes=_transposed_sizes if transposed else _sizes),
    )


def _transposed_sizes(operand_shapes: Shapes, _: Shapes) -> tuple[int, int, int, int]:
    """A place of the operand is multiplied with the filters; what overlaps is added."""
    x, weight = operand_shapes[:2]
    return 1, x[0] * numel(x[2:]), numel(weight[1:]), x[1]


def _sizes(operand_shapes: Shapes, result_shapes: Shapes) -> tuple[int, int, int, int]:
    """A group is a product of its windows, batch times places, with its filters."""
    x, weight = operand_shapes[:2]
    result = result_shapes[0]
    groups = max(1, x[1] // weight[1])
    return groups, result[0] * numel(result[2:]), weight[0] // groups, numel(weight[1:])


def _pooling(saves: str) -> Maker:
    """Windows over the last dims; batch and channels are free. `saves`: operand, indices as well, or nothing."""

    def rule(node: fx.Node) -> Rule:
        sources = operands(node)
        x = shapes_of(sources)[0]
        result = tuple(result_values(node)[0].shape)
        window = argument(node, 1, "output_size" if "adaptive" in str(node.target) else "kernel_size")
        num_spatial = 1 if "1d" in str(node.target) else 2
        leading = ("batch", "channels") if len(x) == num_spatial + 2 else ("channels",)
        names: Dims = tuple(n if size > 1 else None for n, size in zip(leading, x, strict=False))
        dims = (*names, *(None,) * num_spatial)
        graded = any(grads_of(sources))
        mean_of_all = saves == "operand" and "adaptive" in str(node.target) and numel(tuple(window)) == 1
        return Rule(
            factors={n: Factor(size=x[d], even=False) for d, n in enumerate(names) if n},
            operands=(dims,),
            results=(dims,) * len(result_values(node)),
            linear=(frozenset({0}),) if "avg" in str(node.target) and all_float(node, sources) else (),
            saves=(0,) if graded and not mean_of_all else (),
            saves_nbytes=8 * numel(result) if graded and saves == "indices" else 0,
            flops=float(numel(x)),
            backward_flops=float(numel(x)) if graded else 0.0,
        )

    return rule


RULES: dict[str, Maker] = {
    "aten.conv1d.default": _convolution(6),
    "aten.conv2d.default": _convolution(6),
    "aten.conv3d.default": _convolution(6),
    "aten.convolution.default": _convolution(8),
    "aten.conv_transpose1d.default": _convolution(6),
    "aten.conv_transpose2d.input": _convolution(6),
    "aten.conv_transpose3d.input": _convolution(6),
    "aten.max_pool2d.default": _pooling("indices"),
    "aten.avg_pool2d.default": _pooling("operand"),
    "aten.adaptive_avg_pool2d.default": _pooling("operand"),
}
