"""Random ops: every element, or every row, is drawn alone, under numbers of its shard; others run whole on every rank.

Dropout is linear; it keeps one bool an element of its mask for backward, or what it multiplies by.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ops.drawn import ROW_DIMS, drawn
from autopar.ops.dropout import alpha_dropout, dropout, rrelu
from autopar.ops.noise import PERMUTATION, noise
from autopar.ops.random import Shards
from autopar.rules.describe import free_dims, numel, result_values, shapes_of
from autopar.rules.elementwise import elementwise_rule
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Call, Dims, Local, Rule, replicated_rule
from autopar.values.graph import operands
from autopar.values.placement import Layout


def _dropout(node: fx.Node) -> Rule:
    value = node.meta["val"]
    shape, along = tuple(value.shape), node.kwargs.get("along")
    mask = numel(tuple(n for dim, n in enumerate(shape) if along is None or dim in along))  # type: ignore[operator]
    linear = () if node.target is alpha_dropout else (frozenset({0}),)
    kept = mask if node.target is dropout else mask * value.element_size()
    if node.target is rrelu:
        linear = ()
    return replace(elementwise_rule(node, linear=linear, saves_nbytes=kept), localize=_placed(node))


def _noise(node: fx.Node) -> Rule:
    """The shard of a new tensor; probabilities, if they are a tensor, are read element by element."""
    if PERMUTATION in node.args:
        return Rule(factors={}, operands=((),), results=((None,),))
    placed = _placed(node)

    def localize(local: Local) -> Call:
        target, args, kwargs = placed(local)
        return target, args, {**kwargs, "size": local.result_shapes[0]}

    return replace(elementwise_rule(node), localize=localize)


def _drawn(node: fx.Node) -> Rule:
    """A sample of each element or row; any other op of ATen whole on every rank, with the same numbers."""
    sources = operands(node)
    op: Any = node.args[0]
    if op not in ROW_DIMS:
        whole = replicated_rule(tuple(map(len, shapes_of(sources))), tuple(v.dim() for v in result_values(node)))
        saves, saves_results, nbytes = kept_by_autograd(node)
        return replace(whole, saves=saves, saves_results=saves_results, saves_nbytes=nbytes)
    shape = shapes_of(sources)[0]
    rows = ROW_DIMS[op]
    fixed = frozenset(range(len(shape) - rows, len(shape)))
    factors, names = free_dims(shape, fixed, even=True)
    (result,) = result_values(node)
    given: Dims = (*names[: len(shape) - rows], *(None,) * rows)
    graded = result.dtype.is_floating_point and any(source.meta["requires_grad"] for source in sources)
    return Rule(
        factors=factors,
        operands=(given,) * len(sources),
        results=(given,),
        saves=(0,) if graded else (),
        saves_results=(0,) if graded else (),
        flops=float(numel(shape)),
        localize=_placed(node, operand=0),
    )


def _placed(node: fx.Node, operand: int | None = None) -> Callable[[Local], Call]:
    """The call with `shape` and `shards` of its (first) result, or of an operand, where that is split."""
    target: Any = node.target

    def localize(local: Local) -> Call:
        layout = local.results[0] if operand is None else local.operands[operand]
        whole = result_values(node)[0] if operand is None else operands(node)[operand].meta["val"]
        shards = shards_of(layout, local.mesh.names)
        placed = {"shape": tuple(whole.shape), "shards": shards} if shards else {}
        return target, node.args, {**node.kwargs, **placed}

    return localize


def shards_of(layout: Layout, names: tuple[str, ...]) -> Shards:
    """Axis and dim of each split of a layout, outermost first."""
    return tuple((names[axis], dim) for dim in layout.sharded_dims() for axis in layout.axes_of(dim))


RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    dropout: _dropout,
    alpha_dropout: _dropout,
    rrelu: _dropout,
    noise: _noise,
    drawn: _drawn,
}
