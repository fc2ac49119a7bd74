"""Batch norm in training mode, functional: new running statistics are results, not side effects."""

import torch
from torch import Tensor

from autopar.ops.collectives import all_reduce
from autopar.ops.groups import Axis, active_groups


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    eps: float,
    axis: Axis = (),
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`x[n, c, ...]` -> (`y[n, c, ...]`, new `running_mean[c]`, new `running_var[c]`).

    Where batch or spatial dims are split over `axis`, mean and variance are those of the whole batch, `count` elements
    a channel: sums over all ranks, whose gradients are summed too.
    """
    if axis and active_groups().size(axis) > 1:
        assert count is not None
        return _split_batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, axis, count)
    if torch.compiler.is_compiling() and x.dim() == 3:
        x = x.contiguous()  # for a transposed x torch's shape function and its kernel disagree about strides
    y, _, _, mean, var = torch.ops.aten._native_batch_norm_legit_functional.default(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return y, mean, var


def _split_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    axis: Axis,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    dtype = torch.promote_types(x.dtype, torch.float32)  # statistics of bfloat16 need more digits than it has
    mean = all_reduce(x.sum(dims, dtype=dtype), axis=axis, backward="all_reduce") / count
    centred = x - mean.view(shape)
    # two passes over x, since the mean of squares less the square of the mean cancels
    var = all_reduce(centred.square().sum(dims), axis=axis, backward="all_reduce") / count
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    y = centred * scale.view(shape)  # one product, so that backward keeps one tensor of the size of x
    if bias is not None:
        y = y + bias.view(shape)
    with torch.no_grad():
        new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        unbiased = var * (count / max(count - 1, 1))
        new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return y.to(x.dtype), new_mean, new_var
