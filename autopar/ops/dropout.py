"""Dropout whose mask is a function of (step, site, shard): same on replicas, different on shards."""

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.random import Shards, active_draws, keep_mask


def dropout(x: Tensor, p: float, *, site: int, shape: tuple[int, ...] | None = None, shards: Shards = ()) -> Tensor:
    """`x` with elements zeroed with probability `p`, the rest scaled by 1 / (1 - p); `site` names the call.

    `x` is one shard of a tensor of `shape`, split over `shards`. On summands of a Partial tensor every rank draws the
    same mask, since their axis is not among the shards.
    """
    draws = active_draws()
    if draws is None:
        return F.dropout(x, p, training=True)
    keep = keep_mask(draws, x, p, site, shape, shards)
    return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)
