"""A Llama in plain torch, small enough to race: RMSNorm, rotary embedding, causal attention, SwiGLU, and its loss.

Modules are named as tensor-parallel plans name them, and every view infers the number of heads from what is there, so
that the same model trains whole, under autopar, and under torch's `parallelize_module`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """Of a model and of its global batch."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    seq: int

    @property
    def inner(self) -> int:
        return self.hidden * 5 // 2


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head = size.hidden // size.heads
        self.wq = nn.Linear(size.hidden, size.hidden, bias=False)
        self.wk = nn.Linear(size.hidden, size.hidden, bias=False)
        self.wv = nn.Linear(size.hidden, size.hidden, bias=False)
        self.wo = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q, k, v = (w(x).view(batch, seq, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        y: Tensor = self.wo(out.transpose(1, 2).reshape(batch, seq, -1))
        return y


class FeedForward(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.hidden, size.inner, bias=False)
        self.w2 = nn.Linear(size.inner, size.hidden, bias=False)
        self.w3 = nn.Linear(size.hidden, size.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(size.hidden), Norm(size.hidden)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return y


class Llama(nn.Module):
    """The loss of next tokens is the mean over all positions; `targets` are given, shifted already."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = Norm(size.hidden)
        self.output = nn.Linear(size.hidden, size.vocabulary, bias=False)
        angles = rotary_angles(size.seq, size.hidden // size.heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


def rotary_angles(seq: int, head: int) -> Tensor:
    """(sequence, head) angles, both halves of a head alike."""
    half = torch.outer(torch.arange(seq).float(), 10000.0 ** (-torch.arange(0, head, 2).float() / head))
    return torch.cat([half, half], -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, sequence, head)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def make_llama(size: LlamaSize) -> tuple[Llama, dict[str, Tensor]]:
    """The model with seeded weights, and the keywords of one call with the global batch."""
    torch.manual_seed(0)
    model = Llama(size).train()
    tokens = torch.randint(size.vocabulary, (size.batch, size.seq + 1))
    return model, {"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
