"""Losses and inputs of models that bring none: every output is pulled towards numbers of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.values.inputs import leaves_of

BATCH = 4


def far(output: Any) -> Tensor:
    """Mean squares of all floating outputs from a wave: no symmetry of a model makes its gradient vanish."""
    tensors = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([_distance(tensor) for tensor in tensors]).sum()


def _distance(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wave = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape).to(tensor.dtype).cos()
    return (tensor - wave).square().mean()


def classified(output: Any) -> Tensor:
    """Cross-entropy of scores (samples, classes) with the labels 0, 1, 2, ..."""
    scores = next(leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor))
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device) % scores.shape[1])


def images(*shape: int, batch: int = BATCH) -> Callable[[], tuple[Tensor]]:
    """Normal numbers of a shape, a batch of them."""
    return lambda: (torch.randn(batch, *shape),)


def words(length: int, count: int, batch: int = BATCH) -> Callable[[], tuple[Tensor]]:
    """Numbers of words."""
    return lambda: (torch.randint(count, (batch, length)),)
