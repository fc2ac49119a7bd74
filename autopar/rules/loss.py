"""Cross entropy: `logits[rows.. classes], target[rows..]`, rows summed (mean, sum) or kept (none).

Split rows: local sum over the global count of labels that are not ignored, a summand. Split classes: normaliser and
target logit are summed over ranks, so that every rank has the whole loss and needs nothing for its own gradient:
Invariant.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.checked import checked
from autopar.ops.cross_entropy import count_labels, cross_entropy
from autopar.rules.describe import dim_name, numel, statistics_size
from autopar.rules.rule import Call, Choice, Dims, Factor, Local, Rule
from autopar.values.graph import operands, requires_grad
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Shard
from autopar.values.redistribution import Message

Messages = tuple[tuple[Message, ...], tuple[Message, ...]]
COUNT_NBYTES = 8  # an int64


def _cross_entropy(node: fx.Node) -> Rule:
    logits = operands(node)[0]
    value = logits.meta["val"]
    shape = tuple(value.shape)
    num_classes = shape[-1]
    reduction = node.kwargs.get("reduction", "mean")
    smoothing = node.kwargs.get("label_smoothing", 0.0)
    counts = reduction == "mean" and node.kwargs.get("count") is None
    rows: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(shape[:-1]))
    summed = reduction != "none"
    factors = {n: Factor(size=shape[d], summed=summed, even=summed) for d, n in enumerate(rows) if n}
    factors["classes"] = Factor(size=num_classes, summed=True, even=False)
    row_names = tuple(factors)[:-1]
    graded = requires_grad(logits)
    statistics = statistics_size(value.dtype)
    split_classes = Choice(name="classes", operands=(Shard(len(shape) - 1), REPLICATE), results=(INVARIANT,))

    def localize(local: Local) -> Call:
        split: dict[str, Any] = {}
        if counts and (axes := local.axes(*row_names)):
            split["row_axes"] = axes
        if local.axes("classes"):
            order = local.operands[0].axes_of(len(shape) - 1)
            split |= {"class_axes": tuple(local.mesh.names[a] for a in order), "num_classes": num_classes}
        return cross_entropy, node.args, {**node.kwargs, **split}

    def messages(local: Local) -> Messages:
        sent: list[Message] = []
        axes = local.axis_indices("classes")
        if _ranks(local, axes) > 1:
            num_rows = numel(local.operand_shapes[0][:-1])
            sums = 3 if smoothing else 2
            sent.append(Message(kind="all_reduce", axes=axes, nbytes=num_rows * statistics))
            sent.append(Message(kind="all_reduce", axes=axes, nbytes=sums * num_rows * statistics))
        axes = local.axis_indices(*row_names)
        if counts and _ranks(local, axes) > 1:
            sent.append(Message(kind="all_reduce", axes=axes, nbytes=COUNT_NBYTES, early=True))
        return tuple(sent), ()

    return Rule(
        factors={n: f for n, f in factors.items() if f.size > 1},
        operands=((*rows, "classes" if num_classes > 1 else None), rows),
        results=(() if summed else rows,),
        extra=(split_classes,) if num_classes > 1 else (),
        saves=(1,) if graded else (),
        saves_nbytes=_kept_nbytes(shape, value.dtype.itemsize, bool(smoothing)) if graded else 0,
        flops=5.0 * numel(shape),
        backward_flops=2.0 * numel(shape),
        localize=localize,
        messages=messages,
        reads=3,
    )


def _kept_nbytes(shape: tuple[int, ...], element_size: int, smoothing: bool) -> int:
    """The log-softmax, and with smoothing a bool a row."""
    return numel(shape) * element_size + (numel(shape[:-1]) if smoothing else 0)


def _ranks(local: Local, axes: tuple[int, ...]) -> int:
    return numel(tuple(local.mesh.shape[a] for a in axes))


def _count_labels(node: fx.Node) -> Rule:
    """Labels are summed dims; a rank counts those of its rows."""
    shape = tuple(operands(node)[0].meta["val"].shape)
    names: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(shape))
    return Rule(
        factors={n: Factor(size=shape[d], summed=True, even=True) for d, n in enumerate(names) if n},
        operands=(names,),
        results=((),),
    )


def _checked(node: fx.Node) -> Rule:
    """The loss passes as it is; of failures each rank looks at its own summand."""
    whole = [
        Choice(name=f"{name}_counted", operands=(placement, PARTIAL), results=(placement,))
        for name, placement in (("replicate", REPLICATE), ("invariant", INVARIANT))
    ]
    summands = Choice(name="replicate_summands", operands=(PARTIAL, PARTIAL), results=(PARTIAL,))
    return Rule(
        factors={},
        operands=((), ()),
        results=((),),
        linear=(frozenset({0}),),
        extra=(*whole, summands),
        alias=0,
    )


RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    checked: _checked,
    cross_entropy: _cross_entropy,
    count_labels: _count_labels,
}
