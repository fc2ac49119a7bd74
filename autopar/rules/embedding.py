"""Look-ups: `embedding: weight[vocabulary hidden], ids[..] -> [.. hidden]`, a sum over the vocabulary of one-hot rows.

Split over the vocabulary each rank looks up the ids it holds: a body, whose result is Partial. Positions of other
look-ups (index, index_select, gather) may be split, what they look into stays whole along that dim; so does what a
number is scattered into.
"""

from collections.abc import Callable

from torch import fx

from autopar.ops.embedding import embedding
from autopar.rules.describe import (
    aligned,
    all_float,
    argument,
    dim_name,
    free_dims,
    grads_of,
    normalized_dim,
    numel,
    shapes_of,
)
from autopar.rules.rule import Call, Dims, Factor, Local, Rule, Shapes, replicated_rule
from autopar.values.graph import operands

Maker = Callable[[fx.Node], Rule]


def _again(operand_shapes: Shapes, _: Shapes) -> tuple[int, int]:
    """Backward adds to zeros of the operand's size, and what it adds to is another tensor."""
    return 0, numel(operand_shapes[0])


def _embedding(node: fx.Node) -> Rule:
    weight, ids = shapes_of(operands(node))
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        return replicated_rule((len(weight), len(ids)), (len(ids) + 1,))  # counts of ids are not local
    names: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(ids))
    factors = {n: Factor(size=ids[d], even=False) for d, n in enumerate(names) if n}
    factors["hidden"] = Factor(size=weight[1], even=False)
    factors["vocabulary"] = Factor(size=weight[0], summed=True, even=False)
    rows, hidden = ("vocabulary" if weight[0] > 1 else None), ("hidden" if weight[1] > 1 else None)

    def localize(local: Local) -> Call:
        if not local.axes("vocabulary"):
            return node.target, node.args, dict(node.kwargs)  # type: ignore[return-value]
        axes = tuple(local.mesh.names[a] for a in local.operands[0].axes_of(0))
        padding = argument(node, 2, "padding_idx", -1)
        return embedding, node.args[:2], {"padding_idx": padding, "vocabulary": axes, "size": weight[0]}

    return Rule(
        factors={n: f for n, f in factors.items() if f.size > 1},
        operands=((rows, hidden), names),
        results=((*names, hidden),),
        linear=(frozenset({0}),) if all_float(node, operands(node)[:1]) else (),
        saves=(1,) if grads_of(operands(node))[0] else (),
        looked_up=frozenset({0}),
        localize=localize,
    )


def _index(node: fx.Node) -> Rule:
    """`x[:, i, j]` with neighbouring integer indices, which broadcast to the dims that stand in their place."""
    sources = operands(node)
    shapes = shapes_of(sources)
    x, indices = shapes[0], argument(node, 1, "indices")
    places = [d for d, index in enumerate(indices) if index is not None]
    result = tuple(node.meta["val"].shape)
    boolean = any(indices[d].meta["val"].dtype.itemsize == 1 for d in places)  # bool and uint8 select by mask
    if boolean or places != list(range(places[0], places[0] + len(places))):
        return replicated_rule(tuple(map(len, shapes)), (len(result),))
    before, after = places[0], places[-1] + 1
    num_index_dims = len(result) - (len(x) - len(places))
    names: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(result))
    index_shape = result[before : before + num_index_dims]
    _, index_dims, _ = aligned(shapes[1:], index_shape)
    shifted = {dim_name(d): names[before + d] for d in range(num_index_dims)}
    indexed = {n for n in names[before : before + num_index_dims] if n}
    factors = {n: Factor(size=result[d], even=n in indexed) for d, n in enumerate(names) if n}
    return (
        Rule(
            factors=factors,
            operands=(
                (*names[:before], *(None,) * len(places), *names[before + num_index_dims :]),
                *(tuple(shifted[n] if n else None for n in dims) for dims in index_dims),
            ),
            results=(names,),
            linear=(frozenset({0}),) if all_float(node, sources[:1]) else (),
            saves=tuple(range(1, len(sources))) if grads_of(sources)[0] else (),
            looked_up=frozenset({0}),
            spare=_again,
        )
        if after <= len(x)
        else replicated_rule(tuple(map(len, shapes)), (len(result),))
    )


def _index_select(node: fx.Node) -> Rule:
    x, index = shapes_of(operands(node))
    dim = normalized_dim(argument(node, 1, "dim"), len(x))
    result = tuple(node.meta["val"].shape)
    factors, names = free_dims(result)
    chosen = names[dim]
    if chosen is not None:
        factors = {**factors, chosen: Factor(size=index[0])}
    return Rule(
        factors=factors,
        operands=((*names[:dim], None, *names[dim + 1 :]), (chosen,) * len(index)),
        results=(names,),
        linear=(frozenset({0}),) if all_float(node, operands(node)[:1]) else (),
        saves=(1,) if grads_of(operands(node))[0] else (),
        looked_up=frozenset({0}),
        spare=_again,
    )


def _gather(node: fx.Node) -> Rule:
    """gather: positions along `dim` may be split; a dim where index and source agree may be split in both."""
    x, index = shapes_of(operands(node))
    if len(x) != len(index):
        return replicated_rule((len(x), len(index)), (len(index),))
    dim = normalized_dim(argument(node, 1, "dim"), len(x))
    cut = frozenset(d for d in range(len(x)) if d != dim and x[d] != index[d])
    factors, names = free_dims(index, cut, even=True)
    return Rule(
        factors=factors,
        operands=((*names[:dim], None, *names[dim + 1 :]), names),
        results=(names,),
        linear=(frozenset({0}),) if all_float(node, operands(node)[:1]) else (),
        saves=(0, 1) if grads_of(operands(node))[0] else (),
        flops=float(numel(index)),
        looked_up=frozenset({0}),
        spare=_again,
    )


def _scatter_value(node: fx.Node) -> Rule:
    """A number written at positions along `dim`, which stays whole; a dim where index and result agree may be split."""
    x, index = shapes_of(operands(node))
    if len(x) != len(index):
        return replicated_rule((len(x), len(index)), (len(x),))
    dim = normalized_dim(argument(node, 1, "dim"), len(x))
    cut = frozenset(d for d in range(len(x)) if d == dim or x[d] != index[d])
    factors, names = free_dims(x, cut, even=True)
    return Rule(
        factors=factors,
        operands=(names, names),
        results=(names,),
        saves=(1,) if grads_of(operands(node))[0] else (),
    )


RULES: dict[str, Maker] = {
    "aten.embedding.default": _embedding,
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.scatter.value": _scatter_value,
}
