"""Scaled dot product attention beyond aten's: with dropout on the attention weights, or with a part of the query."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.dropout import keep_mask
from autopar.ops.groups import Axis, active_groups
from autopar.ops.random import Draws, Shards, active_draws, seeded_default_generator, shard_index
from autopar.ops.shards import own_range


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    site: int,
    query_axes: Axis = (),
    query_size: int | None = None,
    shape: tuple[int, ...] | None = None,
    shards: Shards = (),
) -> Tensor:
    """`query[b, h, q, d]`, `key[b, g, k, d]`, `value[b, g, k, e]` -> `[b, h, q, e]`; `site` names the call site.

    `query_axes` (outermost split first) split a query of `query_size`, so that causality counts from this rank's first
    row. `shape` and `shards` are those of the whole attention weights `[b, h, q, k]`, for dropout.
    """
    if query_axes and is_causal:
        assert query_size is not None
        start, _ = own_range(query_size, query_axes, active_groups())
        mask, is_causal = causal_mask(query.shape[-2], key.shape[-2], start, query.device), False
    draws = active_draws() if dropout_p > 0 else None
    if draws is not None and draws.exact:
        keep = _keep(draws, query, key, dropout_p, site, shape, shards)
        return explicit_attention(query, key, value, mask, keep, dropout_p, is_causal, scale)
    if draws is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    with seeded_default_generator(draws.seed_of(site, shard_index(shards)), query.device):
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


def causal_mask(rows: int, columns: int, start: int, device: torch.device) -> Tensor:
    """Bool `[rows, columns]`: which keys the query rows from `start` on may see, counted from the top left."""
    row = torch.arange(start, start + rows, device=device)
    return row.unsqueeze(-1) >= torch.arange(columns, device=device)


def _keep(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    site: int,
    shape: tuple[int, ...] | None,
    shards: Shards,
) -> Tensor:
    weights = query.new_empty((*query.shape[:-1], key.shape[-2]), device=query.device)
    return keep_mask(draws, weights, dropout_p, site, shape, shards)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention written out, so that its dropout mask can be given: `keep[b, h, q, k]`."""
    if query.dim() == 4 and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        causal = causal_mask(query.shape[-2], key.shape[-2], 0, query.device)
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return torch.where(keep, weights / (1 - dropout_p), 0.0) @ value
