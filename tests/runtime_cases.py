"""Models small enough to train on several ranks in a test, and their distributed modules under plans of every kind."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.lower.emit import emit
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.runtime import DistributedModule
from autopar.search.costs.storages import is_storable
from autopar.search.known.random_plan import random_plan, random_recompute
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard
from autopar.values.stage_plan import StagePlan
from tests.shared_graphs import shared_graph

WORDS, WIDTH, BATCH, LENGTH = 11, 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Words(nn.Module):
    """Tied embedding whose words divide by nothing, a frozen weight, a buffer, batch norm with its statistics."""

    frozen: Tensor
    table: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.dropout = dropout
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids) * self.frozen + self.table
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        x = F.dropout(x, self.dropout, self.training)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def words(dropout: float = 0.0, microbatches: int = 1) -> Words:
    """The model in float64, the same in every process; in micro-batches it is given the statistics of its batch norm,
    as those of a batch are of no micro-batch."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Words(dropout).double()
    model.batch_norm.train(microbatches == 1)
    return model


def batch(seed: int, rows: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (2, rows, LENGTH), generator=generator)
    return {"ids": ids[0], "labels": ids[1]}


@cache
def captured(dropout: float = 0.0, microbatches: int = 1) -> CapturedModel:
    """The graph of a (micro-)batch of `BATCH` samples."""
    split = microbatches > 1
    graph = shared_graph(f"words-{dropout}-{split}", lambda: capture(words(dropout, microbatches), (), batch(0)))
    return accumulate_gradients(graph, microbatches, lambda: graph)


def some_plan(mesh_shape: tuple[int, ...], seed: int, dropout: float = 0.0, microbatches: int = 1) -> StagePlan:
    """A random plan."""
    return random_plan(captured(dropout, microbatches), make_mesh(mesh_shape), random.Random(seed))


def recomputed(plan: StagePlan, share: float) -> StagePlan:
    """The plan with that share of its ops and copies made again in backward."""
    return random_recompute(plan, captured(microbatches=plan.microbatches), random.Random(share), share=share)


def data_parallel(
    mesh_shape: tuple[int, ...], stored: str = "split", lifetime: str = "use", microbatches: int = 1
) -> StagePlan:
    """Batch split over all axes; parameters split over all axes too (ZeRO-3) where they can be, or whole (DDP)."""
    plan = some_plan(mesh_shape, 0, microbatches=microbatches)
    axes = range(len(mesh_shape))
    layouts = dict(plan.layouts)
    choices = {}
    for spec in captured().parameters:
        whole = INVARIANT if spec.trainable else REPLICATE
        layout = Layout(tuple(Shard(0) for _ in axes))
        good = stored == "split" and is_storable(spec.shape, layout, plan.mesh)
        layouts[spec.placeholder] = layout if good else Layout(tuple(whole for _ in axes))
    for spec in captured().inputs:
        layouts[spec.placeholder] = Layout(tuple(Shard(0) for _ in axes))
    for name in plan.choices:
        choices[name] = tuple(batch_choice(name, microbatches) for _ in axes)
    lifetimes = {name: lifetime if isinstance(layouts[name].axes[0], Shard) else "always" for name in plan.lifetimes}
    return replace(plan, choices=choices, layouts=layouts, lifetimes=lifetimes)


@cache
def batch_choice(name: str, microbatches: int = 1) -> str:
    """The choice of a node that splits its batch factor: the one under which a result has fewer rows."""
    from autopar.rules.registry import rule_of
    from autopar.rules.rule import choices

    node = captured(microbatches=microbatches).nodes[name]
    rule = rule_of(node)
    for choice in choices(rule):
        factor = rule.factors.get(choice.name)
        if factor is not None and factor.size in (BATCH, BATCH * LENGTH) and Shard(0) in choice.operands:
            return choice.name
    return "replicate"


def distributed(plan: StagePlan, dropout: float = 0.0, **keywords: Any) -> DistributedModule:
    model = words(dropout, plan.microbatches)
    graph = captured(dropout, plan.microbatches)
    values = {**parameters_of(graph, model), **buffers_of(graph, model)}
    return DistributedModule(emit(graph, plan), values, **keywords)


def whole_state(module: DistributedModule) -> dict[str, Tensor]:
    """The state dict with whole tensors."""
    return {name: whole(value) for name, value in module.state_dict().items()}


def whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().clone()
