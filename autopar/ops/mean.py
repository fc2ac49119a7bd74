"""The mean over a dim that is split: local sum / global count, a summand of the whole mean."""

import torch
from torch import Tensor


def mean(x: Tensor, dims: tuple[int, ...], *, keepdim: bool, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Sum of the local `x` over `dims`, divided by `count`, the number of elements that the whole mean runs over."""
    return x.sum(dims, keepdim=keepdim, dtype=dtype) / count
