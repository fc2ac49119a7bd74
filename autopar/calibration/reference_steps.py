"""Which training steps are every device's yardstick, and how long does a cluster file say that they take?

Of two blocks of a decoder, fp32, fused AdamW, small enough that what stands between its matrix products counts: with
few samples that is launches, with more of them bytes. All ranks take them at once, each the whole of it, and nothing is
sent.
"""

from collections.abc import Callable
from dataclasses import replace
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
from autopar.search.costs.evaluate import evaluate
from autopar.search.planner import make_plan

HIDDEN, HEADS, LAYERS, WORDS, SEQ = 160, 5, 2, 256, 40
BATCHES = (1, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (way(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for way in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        inner: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + inner


class Decoder(nn.Module):
    """Gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch_of_words(batch: int) -> dict[str, Tensor]:
    ids = torch.arange(batch * SEQ).reshape(batch, SEQ) * 7 % WORDS
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def training_step(batch: int) -> Callable[[], None]:
    """One step of a new model with so many samples, as a user writes it."""
    model, words = Decoder(), batch_of_words(batch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss: Tensor = model(**words)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def predicted_step(device: Device, batch: int) -> float:
    """Seconds of it on one such device, as a plan prices them."""
    captured, plan = _planned(batch)
    return evaluate(plan, captured, replace(load_cluster("1xcpu"), device=device)).step_seconds


@cache
def _planned(batch: int) -> tuple[CapturedModel, Plan]:
    """The graph, and what there is to plan on one device: nothing."""
    captured = capture(Decoder(), (), batch_of_words(batch))
    config = TrainConfig(optimizer="adamw-fused", precision="fp32")
    return captured, make_plan(captured, load_cluster("1xcpu"), make_mesh((1,)), config, with_baselines=False)
