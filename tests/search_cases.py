"""Machines and captured models for tests of the search: links fast enough that splitting pays on tiny models."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

from autopar.capture import capture
from autopar.lower.program import Program, make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.promote_casts import promote_casts
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.shared_graphs import shared_graph
from tests.zoo_graphs import zoo_graph


@lru_cache
def machine(count: int = 4, bandwidth: float = 5e9) -> Cluster:
    """CPUs with hardly any latency, so that bytes and flops decide."""
    cluster = load_cluster(f"{count}xcpu")
    levels = tuple(replace(level, alpha=1e-7, bandwidth=bandwidth) for level in cluster.levels)
    return replace(cluster, levels=levels, device=replace(cluster.device, launch_seconds=1e-8))


class Squares(nn.Module):
    """Two equal blocks, captured at once, for what does not depend on the model. The loss is a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def squares() -> tuple[nn.Module, Tensor]:
    """A model and a batch of four."""
    return Squares(), torch.linspace(-1, 1, 4 * 32).reshape(4, 32)


@lru_cache
def squares_graph(rows: int) -> CapturedModel:
    """Of so many of them."""
    model, inputs = squares()
    return capture(model, (inputs[:rows],))


@lru_cache
def captured_of(family: str) -> CapturedModel:
    return zoo_graph(family)


@lru_cache
def exact_of(family: str, dropout: float = 0.0) -> CapturedModel:
    """The graph of `zoo(family, dtype=torch.float64, dropout=dropout)`, captured once for all tests of a process."""
    return promote_casts(zoo_graph(family, dtype=torch.float64, dropout=dropout))


@lru_cache
def program_of(family: str) -> Program:
    return make_program(captured_of(family))


def pricer_of(mesh: tuple[int, ...], *, bandwidth: float = 5e9, config: TrainConfig | None = None) -> Pricer:
    return make_pricer(mesh=make_mesh(mesh), cluster=machine(bandwidth=bandwidth), config=config or TrainConfig())


@lru_cache
def small_llama(layers: int, seq: int, microbatches: int = 1) -> CapturedModel:
    """A Llama of so many equal layers, one of its micro-batches of two samples."""
    return accumulate_gradients(
        _llama_batch(layers, seq, 2), microbatches, lambda: _llama_batch(layers, seq, 2 * microbatches)
    )


@lru_cache
def _llama_batch(layers: int, seq: int, batch: int) -> CapturedModel:
    def traced() -> CapturedModel:
        config = hf.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
        ids = torch.from_numpy(np.random.default_rng(0).integers(3, 64, (batch, seq)))
        return capture(hf.LlamaForCausalLM(config).train(), (), {"input_ids": ids, "labels": ids, "use_cache": False})

    return shared_graph(f"small-llama-{layers}-{seq}-{batch}", traced)
