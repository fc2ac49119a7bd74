"""Which training steps are every device's yardstick, and how long does a cluster file say that they take?

Of two blocks of a decoder with fused AdamW, small enough that what stands between its matrix products counts, with few
samples launches, with more of them bytes; on a GPU, in bf16, large enough that the device and not its host is what the
step waits for. All ranks take them at once, each the whole of it, and nothing is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.cluster import load_cluster
from autopar.device import Device
from autopar.graph import CapturedModel
from autopar.mesh import make_mesh
from autopar.plan import Plan, TrainConfig
from autopar.precision import PRECISIONS
from autopar.search.costs.evaluate import evaluate
from autopar.search.planner import make_plan


@dataclass(frozen=True, slots=True)
class Size:
    """Of a decoder of two blocks, and of its samples."""

    hidden: int
    heads: int
    words: int
    seq: int
    precision: str


SIZES = {
    "small": Size(hidden=160, heads=5, words=256, seq=40, precision="fp32"),
    "large": Size(hidden=2048, heads=16, words=32768, seq=2048, precision="bf16"),
}
STEPS = {"cpu": (("small", 1), ("small", 8)), "cuda": (("large", 2), ("large", 8))}
"""Kind of device -> sizes, and samples of a step."""

LAYERS = 2


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, self.heads = size.hidden, size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (way(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for way in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        inner: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + inner


class Decoder(nn.Module):
    """Gives its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch_of_words(batch: int, size: str = "small", device: torch.device | str = "cpu") -> dict[str, Tensor]:
    words, seq = SIZES[size].words, SIZES[size].seq
    ids = torch.arange(batch * seq, device=device).reshape(batch, seq) * 7 % words
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def training_step(batch: int, size: str, device: torch.device) -> Callable[[], None]:
    """One step of a new model with so many samples, as a user writes it."""
    with device:
        model, words = Decoder(SIZES[size]).to(_dtype(size)), batch_of_words(batch, size, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss: Tensor = model(**words)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def predicted_step(device: Device, batch: int, size: str = "small") -> float:
    """Seconds of it on one such device, as a plan prices them."""
    captured, plan = _planned(batch, size)
    return evaluate(plan, captured, replace(load_cluster("1xcpu"), device=device)).step_seconds


@cache
def _planned(batch: int, size: str) -> tuple[CapturedModel, Plan]:
    """The graph, and what there is to plan on one device: nothing."""
    with torch.device("meta"):
        model, words = Decoder(SIZES[size]).to(_dtype(size)), batch_of_words(batch, size, "meta")
    captured = capture(model, (), words)
    config = TrainConfig(optimizer="adamw-fused", precision=SIZES[size].precision, memory_nbytes=1e15)
    return captured, make_plan(captured, load_cluster("1xh100"), make_mesh((1,)), config, with_baselines=False)


def _dtype(size: str) -> torch.dtype:
    return PRECISIONS[SIZES[size].precision].compute
