"""Sums, means or maxima of bags of a table's rows: whole, or over a part of the table or of the ids."""

import torch
from torch import Tensor

from autopar.ops.groups import Axis, active_groups
from autopar.ops.shards import own_range

MODES = ("sum", "mean", "max")
"""By ATen's `mode`."""


def bags(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    *,
    mode: str,
    padding_idx: int = -1,
    include_last_offset: bool = False,
    vocabulary: Axis = (),
    size: int = 0,
    places: Axis = (),
    num_places: int = 0,
) -> Tensor:
    """`table[v, h]`, `ids[.., k]` -> `[.., h]`; or `ids[n]` with the `offsets[bags]` at which bags begin.

    Rows of `padding_idx` do not count; `weights` are as `ids`. `vocabulary` (outermost split first) splits the table's
    `size` rows: each id is looked up on one rank, and the result is Partial. `places` split the last dim of the ids, of
    `num_places`: so is the result then. Of a mean neither may be split if there is padding.
    """
    divisor: Tensor | int | None = None
    if mode == "mean" and (vocabulary or places):
        mode, total = "sum", num_places or ids.shape[-1]
        divisor = total if offsets is None else _sizes(offsets, total, include_last_offset)
    if places and offsets is not None:
        start, length = own_range(num_places, places, active_groups())
        offsets = (offsets - start).clamp(0, length)
    if vocabulary:
        start, length = own_range(size, vocabulary, active_groups())
        local = ids - start
        inside = (local >= 0) & (local < length)
        ids = torch.where(inside, local, 0)
        counted = inside.to(table.dtype)
        if start <= padding_idx < start + length:
            counted = counted * (local != padding_idx - start)
        weights, padding_idx = counted if weights is None else weights * counted, -1
    shape = (*ids.shape[:-1], table.shape[-1])
    if offsets is None:
        offsets = torch.arange(0, ids.numel(), ids.shape[-1], device=ids.device)
        ids, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1)
    padding = padding_idx if padding_idx >= 0 else None  # torch counts others from the end
    made: Tensor = torch.ops.aten.embedding_bag.padding_idx(
        table, ids, offsets, False, MODES.index(mode), False, weights, include_last_offset, padding
    )[0]
    if len(shape) > 1:
        made = made.reshape(shape)
    return made if divisor is None else made / divisor


def _sizes(offsets: Tensor, num_places: int, include_last_offset: bool) -> Tensor:
    """Ids in each bag, as a column; at least 1."""
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), num_places)])
    return offsets.diff().clamp(min=1).unsqueeze(-1)
