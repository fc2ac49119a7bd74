"""Attention whose mask says who sees whom: documents packed in a row, biases, windows, FlexAttention."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]
BATCH, LENGTH, HEADS, WIDTH = 8, 16, 4, 32


class Masked(nn.Module):
    """Two layers of attention under what `mask` makes of the inputs; the loss is squared error."""

    def __init__(self, mask: Callable[["Masked", dict[str, Tensor]], Tensor | None], **parameters: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor, y: Tensor, **inputs: Tensor) -> Tensor:
        mask = self.mask(self, {"x": x, **inputs})
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (split_heads(t) for t in qkv(x).chunk(3, -1))
            x = x + out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return F.mse_loss(x, y)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def pair() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, LENGTH, WIDTH), "y": torch.randn(BATCH, LENGTH, WIDTH)}


def document_ids() -> Tensor:
    """Of every row, which of three documents a place belongs to; places of a document are neighbours."""
    return torch.randint(0, 3, (BATCH, LENGTH)).sort(-1).values


def _documents() -> Built:
    def mask(_: Masked, given: dict[str, Tensor]) -> Tensor:
        ids = given["document"]
        alike = ids[:, :, None] == ids[:, None, :]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).tril()
        return (alike & causal)[:, None]

    return Masked(mask), pair() | {"document": document_ids()}


class Packed(nn.Module):
    """Rows of several documents in one sequence without a batch; `cu_seqlens` says where each ends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, cu_seqlens: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        ids = torch.searchsorted(cu_seqlens, places, right=True)
        mask = ids[:, None] == ids[None, :]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return F.mse_loss(x + self.out(made.transpose(0, 1).flatten(1)), y)


def _packed() -> Built:
    x, y = torch.randn(LENGTH * 4, WIDTH), torch.randn(LENGTH * 4, WIDTH)
    return Packed(), {"x": x, "y": y, "cu_seqlens": torch.tensor([0, 10, 33, 50, 64])}


def _alibi() -> Built:
    def mask(_: Masked, given: dict[str, Tensor]) -> Tensor:
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)], dtype=given["x"].dtype)
        places = torch.arange(LENGTH)
        away = (places[None, :] - places[:, None]).to(given["x"].dtype)
        causal = torch.full((LENGTH, LENGTH), -math.inf, dtype=given["x"].dtype).triu(1)
        return slopes[:, None, None] * away + causal

    return Masked(mask), pair()


def _t5() -> Built:
    """Relative places in buckets, whose biases are looked up (T5)."""

    def mask(model: Masked, _: dict[str, Tensor]) -> Tensor:
        places = torch.arange(LENGTH)
        away = (places[None, :] - places[:, None]).clamp(-7, 7) + 7
        return F.embedding(away, model.table).permute(2, 0, 1)[None]

    return Masked(mask, table=torch.randn(15, HEADS)), pair()


def _swin() -> Built:
    """Biases of relative places in a window, read by a buffer of indices (Swin), and a mask of shifted windows."""

    def mask(model: Masked, given: dict[str, Tensor]) -> Tensor:
        index = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :] + LENGTH - 1
        table: Any = model.table
        bias = table[index.view(-1)].view(LENGTH, LENGTH, HEADS).permute(2, 0, 1)
        return bias[None] + given["window"][:, None]

    window = torch.where(torch.rand(BATCH, LENGTH, LENGTH) < 0.3, -100.0, 0.0)
    return Masked(mask, table=torch.randn(2 * LENGTH - 1, HEADS)), pair() | {"window": window}


def _sliding() -> Built:
    def mask(_: Masked, __: dict[str, Tensor]) -> Tensor:
        places = torch.arange(LENGTH)
        away = places[:, None] - places[None, :]
        return (away >= 0) & (away < 4)

    return Masked(mask), pair()


def _padded() -> Built:
    """Causal, and places past a row's length are not seen."""

    def mask(_: Masked, given: dict[str, Tensor]) -> Tensor:
        seen = given["attention_mask"].bool()[:, None, None, :]
        return seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]

    lengths = torch.arange(BATCH) % 5 + LENGTH - 5
    return Masked(mask), pair() | {"attention_mask": (torch.arange(LENGTH)[None] < lengths[:, None]).long()}


class Written(nn.Module):
    """Attention written out with einsum, a bias a pair of rows and a dropped diagonal (AlphaFold's pair bias)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        scores = scores + self.bias(pairs).permute(0, 3, 1, 2)
        scores = scores.masked_fill(torch.eye(LENGTH, dtype=torch.bool, device=x.device), -1e9)
        made = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return F.mse_loss(x + self.out(made.flatten(2)), y)


def _written() -> Built:
    return Written(), pair() | {"pairs": torch.randn(BATCH, LENGTH, LENGTH, WIDTH)}


class Cross(nn.Module):
    """A decoder's row looks at an encoder's of another length, under a mask of its padding, with fewer key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        q = split_heads(self.q(x))
        k, v = (t.unflatten(-1, (HEADS // 2, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], enable_gqa=True)
        return F.mse_loss(x + self.out(join_heads(made)), y)


def _cross() -> Built:
    seen = torch.arange(12)[None] < (torch.arange(BATCH) % 4 + 8)[:, None]
    return Cross(), pair() | {"memory": torch.randn(BATCH, 12, WIDTH), "seen": seen}


class Layers(nn.Module):
    """torch's own encoder layer with a padding mask and a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        return F.mse_loss(self.layer(x, src_mask=causal, src_key_padding_mask=padding), y)


def _layers() -> Built:
    padding = torch.arange(LENGTH)[None] >= (torch.arange(BATCH) % 5 + LENGTH - 5)[:, None]
    return Layers(), pair() | {"padding": padding}


class Flex(nn.Module):
    """FlexAttention: a score function and a block mask of documents."""

    def __init__(self, scored: bool, blocked: bool) -> None:
        super().__init__()
        self.scored, self.blocked = scored, blocked
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, y: Tensor, document: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.bias[h] * (q - k)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (document[b, q] == document[b, k]) & (q >= k)

        mask = create_block_mask(seen, BATCH, None, LENGTH, LENGTH, device=str(x.device)) if self.blocked else None
        q, k, v = (split_heads(t) for t in self.qkv(x).chunk(3, -1))
        made = flex_attention(q, k, v, score_mod=score if self.scored else None, block_mask=mask)
        return F.mse_loss(x + self.out(join_heads(made)), y)


def _flex(scored: bool, blocked: bool) -> Callable[[], Built]:
    return lambda: (Flex(scored, blocked), pair() | {"document": document_ids()})


MASKED: dict[str, Callable[[], Built]] = {
    "documents": _documents,
    "packed": _packed,
    "bias": lambda: (Masked(lambda m, _: m.bias, bias=torch.randn(1, HEADS, LENGTH, LENGTH)), pair()),
    "alibi": _alibi,
    "t5 bias": _t5,
    "swin bias": _swin,
    "sliding window": _sliding,
    "padded causal": _padded,
    "written out": _written,
    "cross": _cross,
    "encoder layer": _layers,
    "flex score": _flex(True, False),
    "flex mask": _flex(False, True),
    "flex both": _flex(True, True),
}
