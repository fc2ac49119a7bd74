"""Embedding over a vocabulary that is split: each rank looks up the ids that it holds, the rest are zeros."""

import torch
from torch import Tensor

from autopar.ops.groups import Axis, active_groups
from autopar.ops.shards import own_range


def embedding(weight: Tensor, ids: Tensor, *, padding_idx: int, vocabulary: Axis, size: int) -> Tensor:
    """`weight[v, h]` (this rank's rows of `size`), `ids[...]` of the whole vocabulary -> `[..., h]`, Partial.

    Each id is looked up on exactly one rank along `vocabulary` (outermost split first). The row `padding_idx` gets no
    gradient, as in torch; negative means none.
    """
    start, length = own_range(size, vocabulary, active_groups())
    local = ids - start
    inside = (local >= 0) & (local < length)
    padding = padding_idx - start if start <= padding_idx < start + length else -1
    rows = torch.ops.aten.embedding.default(weight, torch.where(inside, local, 0), padding)
    result: Tensor = torch.where(inside.unsqueeze(-1), rows, 0.0)
    return result
