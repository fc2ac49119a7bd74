"""Cross entropy over the last dim of the logits, whole or split over mesh axes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autopar.ops.collectives import all_reduce, all_reduce_maximum, start_sum
from autopar.ops.groups import Axis, active_groups
from autopar.ops.shards import in_mesh_order, own_range


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    count: float | None = None,
    row_axes: Axis = (),
    class_axes: Axis = (),
    num_classes: int | None = None,
    counted: Callable[[], Tensor] | None = None,
) -> Tensor:
    """`logits[..., C]`, `target[...]` (class indices) -> scalar (mean, sum) or `[...]` (none).

    `count` is what a mean divides by, if not the number of labels that are not ignored.
    `row_axes` split the rows of a mean: the result is this rank's summand of the mean over all rows. `class_axes`
    (outermost split first) split `num_classes`: the result is the whole loss of these rows, on every rank. `counted`
    gives the number of labels over `row_axes` that are not ignored, if that was begun before (`start_count`).
    """
    if counted is None and row_axes and reduction == "mean" and count is None:  # while the rows are computed
        counted = start_count(target, ignore_index=ignore_index, row_axes=row_axes)
    if class_axes:
        assert num_classes is not None
        rows = _split_rows(logits, target, ignore_index, label_smoothing, class_axes, num_classes)
    elif row_axes or reduction == "none" or (reduction == "mean" and count is not None):
        rows = _rows(logits, target, ignore_index, label_smoothing)
    else:
        flat = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(
            flat,
            target.reshape(-1),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    if count is not None:
        return rows.sum() / count
    return rows.sum() / ((target != ignore_index).sum() if counted is None else counted())


class _Sums(torch.autograd.Function):
    """Of each row: the sum of exp, the label's own value if it is here, and the sum of the first `num_summed` if any.

    Autograd would keep the values beside their exp, and hold three more such tensors at once in backward.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inside: Tensor, num_summed: int) -> Tensor:
        exp = values.exp()
        ctx.save_for_backward(exp, index, inside)
        ctx.num_summed = num_summed
        sums = [exp.sum(-1), torch.where(inside, values.gather(-1, index).squeeze(-1), 0.0)]
        return torch.stack([*sums, values[..., :num_summed].sum(-1)] if num_summed else sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exp, index, inside = ctx.saved_tensors
        of_sum, of_label, *of_all = gradients[0].unsqueeze(-1).unbind()
        gradient = exp * of_sum
        gradient.scatter_add_(-1, index, torch.where(inside.unsqueeze(-1), of_label, 0.0))
        if of_all:
            gradient[..., : ctx.num_summed] += of_all[0]
        return gradient, None, None, None


def start_count(target: Tensor, *, ignore_index: int = -100, row_axes: Axis) -> Callable[[], Tensor]:
    """Begin to count the labels of all ranks along `row_axes` that are not ignored; the call that waits for it."""
    return start_sum((target != ignore_index).sum(), axis=row_axes)


def count_labels(target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """How many labels are not ignored; a float, so that ranks may hold summands of it like of any other sum."""
    return (target != ignore_index).sum(dtype=torch.float64)


def _rows(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """The loss of every row, zero where its label is ignored."""
    flat = logits.reshape(-1, logits.shape[-1])
    loss = F.cross_entropy(
        flat, target.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    return loss.reshape(target.shape)


def _split_rows(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, class_axes: Axis, num_classes: int
) -> Tensor:
    """The loss of every row from this rank's classes. Each sum over ranks is Partial -> Invariant: no backward."""
    groups = active_groups()
    axis = in_mesh_order(class_axes, groups)
    start, length = own_range(num_classes, class_axes, groups)
    shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if length < logits.shape[-1]:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= length
        shifted = shifted.masked_fill(beyond, -math.inf)
    # the maximum only keeps exp in range: the loss does not depend on it, so it needs no gradient
    shifted = shifted - all_reduce_maximum(shifted.detach().amax(-1), axis=axis).unsqueeze(-1)
    local = target - start
    inside = (local >= 0) & (local < length) & (target != ignore_index)
    index = torch.where(inside, local, 0).unsqueeze(-1)
    sums: Tensor = _Sums.apply(shifted, index, inside, length if label_smoothing else 0)  # type: ignore[no-untyped-call]
    normaliser, *terms = all_reduce(sums, axis=axis).unbind()
    loss = normaliser.log() - terms[0]
    if label_smoothing:
        smooth = normaliser.log() - terms[1] / num_classes
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    return torch.where(target != ignore_index, loss, 0.0).to(logits.dtype)
