"""Which training steps are every device's yardstick, and how long does a cluster file say that they take?

Of two blocks of a decoder with fused AdamW, small enough that what stands between its matrix products counts, with few
samples launches, with more of them bytes; on a GPU, in bf16, large enough that the device and not its host is what the
step waits for. On a host also without the optimizer, whose bytes are updated in place, with what the blocks call run
again in backward, as plans have it, and with norms and GELU in pieces, which are launches and bytes. All ranks take
them at once, each the whole of it, and nothing is sent.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.lower.events import Events, find_events
from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import Program, make_program
from autopar.lower.target import Target
from autopar.ops.recompute import again
from autopar.ops.regather import regathering
from autopar.search.costs.evaluate import charges_of
from autopar.search.costs.pricing import make_pricer
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.device import Device
from autopar.values.mesh import make_mesh
from autopar.values.precision import PRECISIONS
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a decoder of two blocks, and of its samples."""

    hidden: int
    heads: int
    words: int
    seq: int
    precision: str


SIZES = {
    "small": ModelSize(hidden=160, heads=5, words=256, seq=40, precision="fp32"),
    "large": ModelSize(hidden=2048, heads=16, words=32768, seq=2048, precision="bf16"),
}
KINDS = ("whole", "no update", "run again", "in pieces")
STEPS = {
    "cpu": tuple(("small", batch, kind) for batch in (1, 3, 8) for kind in KINDS),
    "cuda": (("large", 2, "whole"), ("large", 8, "whole")),
}
"""Kind of device -> sizes, samples of a step, and its kind."""

LAYERS = 2


Call = Callable[..., Tensor]


class Block(nn.Module):
    """Makes its calls by `call(function, *arguments)`, as a plan's module does. in_pieces: norms and GELU are made of
    elementwise calls, as some models write them."""

    def __init__(self, size: ModelSize, call: Call, in_pieces: bool) -> None:
        super().__init__()
        hidden, self.heads, self.call, self.in_pieces = size.hidden, size.heads, call, in_pieces
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self._normalized(0, x)
        ways = (self.query, self.key, self.value)
        q, k, v = (self._linear(way, y).view(*y.shape[:-1], self.heads, -1).transpose(1, 2) for way in ways)
        inner = self.call(F.scaled_dot_product_attention, q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.call(torch.add, x, self._linear(self.out, inner))
        inner = self._activated(self._linear(self.up, self._normalized(1, x)))
        return self.call(torch.add, x, self._linear(self.down, inner))

    def _activated(self, x: Tensor) -> Tensor:
        if not self.in_pieces:
            return self.call(F.gelu, x)
        cubic = torch.add(x, torch.mul(torch.pow(x, 3.0), 0.044715))
        return torch.mul(torch.mul(x, 0.5), torch.add(torch.tanh(torch.mul(cubic, math.sqrt(2 / math.pi))), 1.0))

    def _normalized(self, number: int, x: Tensor) -> Tensor:
        norm = self.norms[number]
        assert isinstance(norm, nn.LayerNorm)
        if not self.in_pieces:
            return self.call(F.layer_norm, x, x.shape[-1:], norm.weight, norm.bias)
        scale = torch.rsqrt(torch.add(torch.pow(x, 2.0).mean(-1, keepdim=True), norm.eps))
        return torch.add(torch.mul(torch.mul(x, scale), norm.weight), norm.bias)

    def _linear(self, way: nn.Linear, x: Tensor) -> Tensor:
        return self.call(F.linear, x, way.weight, way.bias)


class Decoder(nn.Module):
    """Gives its loss."""

    def __init__(self, size: ModelSize, call: Call, in_pieces: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(Block(size, call, in_pieces) for _ in range(LAYERS))
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


def training_step(batch: int, size: str, device: torch.device, kind: str = "whole") -> Callable[[], None]:
    """One step of a new model with so many samples, as a user writes it."""
    is_again = kind == "run again"
    with device:
        model = Decoder(SIZES[size], again if is_again else _plainly, kind == "in pieces").to(_dtype(size))
        words = batch_of_words(batch, size, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with regathering() if is_again else nullcontext():
            loss: Tensor = model(**words)
        loss.backward()  # type: ignore[no-untyped-call]
        if kind != "no update":
            optimizer.step()
        optimizer.zero_grad()

    return step


def predicted_step(device: Device, batch: int, size: str = "small", kind: str = "whole") -> float:
    """Seconds of it on one such device, as a plan prices them."""
    _, plan = planned(batch, size, kind == "in pieces")
    cluster = replace(_one_device(), device=device)
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    lowered, events = _lowered(batch, size, kind, pricer.target.on_host)
    charges = charges_of(lowered, pricer, events=events)
    return sum(charge.seconds for charge in charges if kind != "no update" or charge.kind != "optimizer")


@cache
def _lowered(batch: int, size: str, kind: str, on_host: bool) -> tuple[LoweredStep, Events]:
    """What a step does, whatever such device it is priced for: a fit asks for many."""
    program, plan = planned(batch, size, kind == "in pieces")
    if kind == "run again":
        plan = replace(plan, recompute=run_again(program))
    lowered = lower(plan, program, Target(mesh=plan.mesh, config=plan.config, on_host=on_host))
    return lowered, find_events(lowered)


@cache
def _one_device() -> Cluster:
    return load_cluster("1xcpu")


def run_again(program: Program) -> frozenset[str]:
    """The calls of its blocks."""
    return frozenset(op.name for op in program.ops if op.module.startswith("blocks.") and op.rule.alias is None)


def _plainly(function: Call, *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)


@cache
def planned(batch: int, size: str, in_pieces: bool = False) -> tuple[Program, StagePlan]:
    """What there is to compute, and what there is to plan on one device: nothing."""
    with torch.device("meta"):
        model = Decoder(SIZES[size], _plainly, in_pieces).to(_dtype(size))
        words = batch_of_words(batch, size, "meta")
    captured = capture(model, (), words)
    config = TrainConfig(optimizer="adamw-fused", precision=SIZES[size].precision, memory_nbytes=1e15)
    plan = make_plan(captured, load_cluster("1xh100"), make_mesh((1,)), config, SearchOptions(with_baselines=False))
    return make_program(captured), plan


def _dtype(size: str) -> torch.dtype:
    return PRECISIONS[SIZES[size].precision].compute
