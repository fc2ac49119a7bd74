"""Batch norm in training mode, functional: new running statistics are results, not side effects.

Split, its gradients are written here, so that autograd keeps what the kernel of one rank keeps: `x`, and a few values a
channel. Composed of torch's operations it would keep `x - mean`, a tensor of its own as large as `x`: beside `x` where
others keep that too, and in its place where a plan has `x` made again, which then saves nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    dtype = torch.promote_types(x.dtype, torch.float32)  # statistics of bfloat16 need more digits than it has
    mean = all_reduce(x.sum(_dims(x), dtype=dtype), axis=axis, backward="all_reduce") / count
    # two passes over x, since the mean of squares less the square of the mean cancels
    squares: Tensor = _Squares.apply(x, mean)  # type: ignore[no-untyped-call]
    var = all_reduce(squares, axis=axis, backward="all_reduce") / count
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    y: Tensor = _Scaled.apply(x, mean, scale, bias)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        unbiased = var * (count / max(count - 1, 1))
        new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return y.to(x.dtype), new_mean, new_var


class _Squares(torch.autograd.Function):
    """Of each channel the sum of `(x - mean)^2` on this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean)
        return _centred(x, mean).square_().sum(_dims(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        gradient = _centred(x, mean).mul_(_spread(2 * gradients[0], x))
        return gradient.to(x.dtype), -gradient.sum(_dims(x))


class _Scaled(torch.autograd.Function):
    """`(x - mean) * scale + bias`, each of the latter by channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, mean, scale)
        y = _centred(x, mean).mul_(_spread(scale, x))
        return y if bias is None else y.add_(_spread(bias, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        (given,), (to_x, _, to_scale, to_bias) = gradients, ctx.needs_input_grad
        of_scale = _centred(x, mean).mul_(given).sum(_dims(x)) if to_scale else None
        of_bias = given.sum(_dims(x)) if to_bias else None
        if not to_x:
            return None, None, of_scale, of_bias
        gradient = given * _spread(scale, x)
        return gradient.to(x.dtype), -gradient.sum(_dims(x)), of_scale, of_bias


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    return x - _spread(mean, x)


def _spread(channels: Tensor, x: Tensor) -> Tensor:
    """A value a channel, to be broadcast over `x`."""
    return channels.view([-1 if d == 1 else 1 for d in range(x.dim())])


def _dims(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [d for d in range(x.dim()) if d != 1]
