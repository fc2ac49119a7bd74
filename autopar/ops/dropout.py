"""Dropout whose mask is a function of (step, site, shard): same on replicas, different on shards.

Of elements, of features (`along`: the dims along which the mask varies, the others are dropped together), and the one
that keeps mean and variance of a SELU; and rrelu, whose slope is drawn in the same way.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.noise import bound
from autopar.ops.random import Draws, Shards, active_draws

ALPHA = 1.7580993408473766
"""What alpha dropout sets an element to, negated: the limit of a SELU (Klambauer et al. 2017, section 4)."""

Dims = tuple[int, ...] | None


def dropout(
    x: Tensor,
    p: float,
    *,
    site: int,
    along: Dims = None,
    shape: tuple[int, ...] | None = None,
    shards: Shards = (),
) -> Tensor:
    """`x` with elements zeroed with probability `p`, the rest scaled by 1 / (1 - p); `site` names the call.

    `x` is one shard of a tensor of `shape`, split over `shards`. On summands of a Partial tensor every rank draws the
    same mask, since their axis is not among the shards.
    """
    draws = active_draws()
    if draws is not None:
        keep = keep_mask(draws, x, p, site, shape, shards, along)
        return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)
    if along is None:
        return F.dropout(x, p, training=True)
    return x * x.new_empty(_varying(x.shape, along)).bernoulli_(1 - p).div_(1 - p)


def alpha_dropout(
    x: Tensor,
    p: float,
    *,
    site: int,
    along: Dims = None,
    shape: tuple[int, ...] | None = None,
    shards: Shards = (),
) -> Tensor:
    """`x` with elements set to `-ALPHA` with probability `p`, then scaled and shifted to keep mean and variance."""
    draws = active_draws()
    if draws is None:
        return (torch.alpha_dropout if along is None else torch.feature_alpha_dropout)(x, p, True)
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    keep = keep_mask(draws, x, p, site, shape, shards, along).to(x.dtype)
    scaled = keep * scale
    return (x * scaled).add_(keep.sub_(1).mul_(ALPHA * scale).add_(ALPHA * scale * p))


def rrelu(
    x: Tensor,
    lower: float,
    upper: float,
    *,
    site: int,
    shape: tuple[int, ...] | None = None,
    shards: Shards = (),
) -> Tensor:
    """`x` where it is positive, else `x` times a slope drawn between `lower` and `upper`."""
    draws = active_draws()
    if draws is None:
        return F.rrelu(x, lower, upper, training=True)
    slope = bound(
        draws, "uniform_", lower, upper, size=x.shape, shape=shape, shards=shards, site=site, dtype=x.dtype,
        device=x.device,
    )  # fmt: skip
    return x * torch.where(x.detach() <= 0, slope, 1.0)


def keep_mask(
    draws: Draws,
    x: Tensor,
    p: float,
    site: int,
    shape: tuple[int, ...] | None,
    shards: Shards,
    along: Dims = None,
) -> Tensor:
    """Bool like `x` (its shard), False with probability `p`; of size 1 in dims not in `along`."""
    drawn = bound(
        draws,
        "uniform_",
        0.0,
        1.0,
        size=_varying(x.shape, along),
        shape=_varying(x.shape if shape is None else shape, along),
        shards=shards if along is None else tuple((axis, dim) for axis, dim in shards if dim in along),
        site=site,
        dtype=torch.float32,
        device=x.device,
    )
    return drawn >= p


def _varying(shape: tuple[int, ...], along: Dims) -> tuple[int, ...]:
    return tuple(n if along is None or dim in along else 1 for dim, n in enumerate(shape))
