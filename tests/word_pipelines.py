"""The model of `runtime_cases` (tied weight, frozen weight, batch norm) in stages: random plans, modules, batches."""

import random
from typing import Any

from torch import Tensor, nn

import tests.runtime_cases as cases
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.split_stages import split_stages
from autopar.runtime import PipelinedModule
from autopar.runtime.pipeline import staged_model
from autopar.search.known.random_plan import random_staged_plan
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan

MICROBATCHES = 4


def plan_of(
    schedule: str = "1f1b",
    stage_mesh: tuple[int, ...] = (2,),
    pipeline: int = 2,
    *,
    seed: int = 0,
    dropout: float = 0.0,
) -> Plan:
    """A random plan for the model of `runtime_cases`: tied weight, frozen weight, batch norm. All ranks train some."""
    captured = cases.captured(dropout, MICROBATCHES)
    rng = random.Random(f"{schedule} {seed}")
    num_stages = pipeline * {"zbv": 2, "interleaved-1f1b": 2}.get(schedule, 1)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    names = names[1 : names.index(captured.loss)]
    while True:
        cuts = tuple(names[i] for i in sorted(rng.sample(range(len(names)), num_stages - 1)))
        plan = random_staged_plan(captured, make_mesh(stage_mesh), schedule, pipeline, cuts, rng)
        trained_by = {
            plan.stage_rank(s)
            for s, part in enumerate(split_stages(captured, cuts))
            for p in part.parameters
            if p.trainable
        }
        if len(trained_by) == pipeline:
            return plan


def pipelined(
    plan: Plan,
    dropout: float = 0.0,
    model: nn.Module | None = None,
    *,
    exact_random: bool = False,
    **more: Any,
) -> PipelinedModule:
    captured = cases.captured(dropout, plan.microbatches)
    model = model or cases.words(dropout, plan.microbatches)
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    return PipelinedModule(staged_model(captured, plan, exact_random=exact_random), values, **more)


def batch(step: int) -> dict[str, Tensor]:
    """A global batch whose labels are ignored unevenly."""
    data = cases.batch(step, MICROBATCHES * cases.BATCH)
    for row in range(len(data["labels"])):
        data["labels"][row, : row * 3 // len(data["labels"])] = -100
    return data
