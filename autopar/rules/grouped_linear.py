"""A mixture's layer: `grouped_linear: x[tokens.. k rows], ids[tokens.. k], w[experts rows columns] -> [.. k columns]`.

Rows (input features) are summed. So are experts, in that every row meets each expert and counts for one: split, a rank
holds matrices of some experts and runs the rows that name them, a body whose result is Partial.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.grouped_linear import grouped_linear
from autopar.rules.describe import all_float, dim_name, grads_of, numel, shapes_of
from autopar.rules.rule import Call, Dims, Factor, Local, Product, Rule, Shapes
from autopar.values.graph import operands

ORDER_NBYTES = 8
"""Of one row's place in the order of the experts: an int64, kept for backward."""
END_NBYTES = 4
"""Of where one expert's rows end: an int32."""


def _sizes(operand_shapes: Shapes, _: Shapes) -> tuple[int, int, int, int]:
    """As one product whose rows are those of all experts: each row meets one matrix."""
    ids, weight = operand_shapes[1:]
    return 1, numel(ids), weight[2], weight[1]


def _spare(operand_shapes: Shapes, of_x: bool) -> tuple[int, int]:
    """Rows in the order of the experts: of x and of the result, and of their gradients beside those handed over."""
    x, ids, weight = operand_shapes
    taken, made = numel(ids) * weight[1], numel(ids) * weight[2]
    if not of_x:
        return max(taken, made), taken + made
    last = taken if x[-2] == ids[-1] else 2 * taken - numel(x)  # a row that went to several experts is summed over them
    return max(taken, made), max(taken + made - numel(x), last)


def _grouped_linear(node: fx.Node) -> Rule:
    sources = operands(node)
    ids, weight = shapes_of(sources)[1:]
    tokens: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(ids[:-1]))
    rows, columns = ("rows" if weight[1] > 1 else None), ("columns" if weight[2] > 1 else None)
    factors = {
        **{n: Factor(size=ids[d]) for d, n in enumerate(tokens) if n},
        "columns": Factor(size=weight[2], even=False),
        "rows": Factor(size=weight[1], summed=True),
        "experts": Factor(size=weight[0], summed=True),
    }
    grads = grads_of(sources)
    flops = 2.0 * numel(ids) * weight[1] * weight[2]

    def localize(local: Local) -> Call:
        if not local.axes("experts"):
            return grouped_linear, node.args, dict(node.kwargs)
        axes = tuple(local.mesh.names[a] for a in local.operands[2].axes_of(0))
        return grouped_linear, node.args, {"experts": axes, "num_experts": weight[0]}

    return Rule(
        factors={n: f for n, f in factors.items() if f.size > 1},
        operands=((*tokens, None, rows), (*tokens, None), ("experts" if weight[0] > 1 else None, rows, columns)),
        results=((*tokens, None, columns),),
        linear=(frozenset({0}), frozenset({2})) if all_float(node, (sources[0], sources[2])) else (),
        saves=tuple(i for i, needed in ((0, grads[2]), (2, grads[0])) if needed),
        saves_nbytes=ORDER_NBYTES * numel(ids) + END_NBYTES * weight[0] if any(grads) else 0,
        flops=flops,
        backward_flops=flops * (grads[0] + grads[2]),
        localize=localize,
        product=Product(left=0, right=2, sizes=_sizes),
        spare=lambda shapes, _: _spare(shapes, grads[0]),
    )


RULES: dict[Any, Callable[[fx.Node], Rule]] = {grouped_linear: _grouped_linear}
