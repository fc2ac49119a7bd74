"""Batch norm in training mode, functional: new running statistics are results, not side effects."""

import torch
from torch import Tensor


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`x[n, c, ...]` -> (`y[n, c, ...]`, new `running_mean[c]`, new `running_var[c]`)."""
    y, _, _, mean, var = torch.ops.aten._native_batch_norm_legit_functional.default(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return y, mean, var
