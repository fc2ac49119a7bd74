"""Scaled dot-product attention with dropout on the attention weights (without dropout aten's own op is used)."""

from torch import Tensor
from torch.nn import functional as F


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
) -> Tensor:
    """`query[b, h, q, d]`, `key[b, g, k, d]`, `value[b, g, k, e]` -> `[b, h, q, e]`; `site` names the call site."""
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
