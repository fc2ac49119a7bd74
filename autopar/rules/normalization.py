"""Norms and softmax: what they normalise over stays whole, everything before it may be split.

Batch norm normalises over the batch: split, its body sums the statistics over all ranks, and their gradients too.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.batch_norm import batch_norm
from autopar.rules.describe import (
    argument,
    dim_name,
    free_dims,
    grads_of,
    normalized_dim,
    numel,
    shapes_of,
    statistics_size,
)
from autopar.rules.rule import Call, Choice, Dims, Factor, Local, Rule, replicated_rule
from autopar.values.graph import operands, requires_grad
from autopar.values.placement import REPLICATE, Shard
from autopar.values.redistribution import Message

Messages = tuple[tuple[Message, ...], tuple[Message, ...]]


def _layer_norm(node: fx.Node) -> Rule:
    """layer_norm and rms_norm: `x[.., normalised], weight[normalised], bias[normalised]`."""
    return _norm(node, statistics=1 if "rms" in str(node.target) else 2)


def _norm(node: fx.Node, statistics: int) -> Rule:
    sources = operands(node)
    shapes = shapes_of(sources)
    x = shapes[0]
    leading = len(x) - len(argument(node, 1, "normalized_shape"))
    factors, names = free_dims(x, frozenset(range(leading, len(x))))
    graded = any(grads_of(sources))
    rows, each = numel(x[:leading]), statistics_size(sources[0].meta["val"].dtype)
    return Rule(
        factors=factors,
        operands=(names, *((None,) * len(s) for s in shapes[1:])),
        results=(names,),
        saves=tuple(range(len(sources))) if graded else (),
        saves_nbytes=statistics * rows * each if graded else 0,
        flops=8.0 * numel(x),
    )


def _group_norm(node: fx.Node) -> Rule:
    """group_norm: only the batch may be split."""
    sources = operands(node)
    shapes = shapes_of(sources)
    x = shapes[0]
    factors, names = free_dims(x, frozenset(range(1, len(x))))
    graded = any(grads_of(sources))
    groups = argument(node, 1, "num_groups")
    return Rule(
        factors=factors,
        operands=(names, *((None,) * len(s) for s in shapes[1:])),
        results=(names,),
        saves=tuple(i for i in range(len(sources)) if i < 2) if graded else (),
        saves_nbytes=2 * x[0] * groups * statistics_size(sources[0].meta["val"].dtype) if graded else 0,
        flops=8.0 * numel(x),
    )


def _softmax(node: fx.Node) -> Rule:
    """softmax, log_softmax: the result is what backward reads."""
    source = operands(node)[0]
    x = shapes_of((source,))[0]
    factors, names = free_dims(x, frozenset({normalized_dim(argument(node, 1, "dim"), len(x))}))
    return Rule(
        factors=factors,
        operands=(names,),
        results=(names,),
        saves_results=(0,) if requires_grad(source) else (),
        flops=5.0 * numel(x),
    )


def _batch_norm(node: fx.Node) -> Rule:
    """`x[n c ..], weight[c], bias[c], mean[c], var[c] -> y[n c ..], mean[c], var[c]` (the running ones)."""
    sources = operands(node)
    shapes = shapes_of(sources)
    x = shapes[0]
    names: Dims = tuple("channels" if d == 1 else dim_name(d) if x[d] > 1 else None for d in range(len(x)))
    factors = {n: Factor(size=x[d], summed=n != "channels", even=n != "channels") for d, n in enumerate(names) if n}
    num_channel_operands = len(sources) - 1
    summed = tuple(n for n in names if n is not None and n != "channels")
    extra = tuple(
        Choice(
            name=n,
            operands=(Shard(names.index(n)), *(REPLICATE,) * num_channel_operands),
            results=(Shard(names.index(n)), REPLICATE, REPLICATE),
        )
        for n in summed
    )
    graded = any(grads_of(sources))
    count = numel(x) // x[1]
    element_size = statistics_size(sources[0].meta["val"].dtype)

    def localize(local: Local) -> Call:
        axes = local.axes(*summed)
        split = {"axis": axes, "count": count} if axes else {}
        return batch_norm, node.args, {**node.kwargs, **split}

    def messages(local: Local) -> Messages:
        axes = local.axis_indices(*summed)
        if not axes or _size(local, axes) == 1:
            return (), ()
        sent = (Message(kind="all_reduce", axes=axes, nbytes=local.operand_shapes[0][1] * element_size),) * 2
        return sent, sent if requires_grad(sources[0]) else ()

    saved = tuple(i for i, source in enumerate(sources) if source is not argument(node, 2, "bias"))
    return Rule(
        factors=factors,
        operands=(names, *(("channels",),) * num_channel_operands),
        results=(names, ("channels",), ("channels",)),
        extra=extra,
        saves=saved if graded else (),
        saves_nbytes=2 * x[1] * element_size if graded else 0,
        flops=8.0 * numel(x),
        localize=localize,
        messages=messages,
    )


def _evaluated_batch_norm(node: fx.Node) -> Rule:
    """aten.batch_norm with given statistics is elementwise over the batch; in training mode it has no rule."""
    sources = operands(node)
    shapes = shapes_of(sources)
    x = shapes[0]
    if argument(node, 5, "training"):
        return replicated_rule(tuple(map(len, shapes)), (len(x),))
    names: Dims = tuple("channels" if d == 1 else dim_name(d) if x[d] > 1 else None for d in range(len(x)))
    graded = any(grads_of(sources))
    saved = tuple(i for i, source in enumerate(sources) if source is not argument(node, 2, "bias"))
    return Rule(
        factors={n: Factor(size=x[d], even=n == "channels") for d, n in enumerate(names) if n},
        operands=(names, *(("channels",),) * (len(sources) - 1)),
        results=(names,),
        saves=saved if graded else (),
        flops=4.0 * numel(x),
    )


def _size(local: Local, axes: tuple[int, ...]) -> int:
    return numel(tuple(local.mesh.shape[a] for a in axes))


RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.log_softmax.int": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten.batch_norm.default": _evaluated_batch_norm,
    batch_norm: _batch_norm,
}
