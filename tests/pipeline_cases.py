"""Pipelines small enough to train on a few ranks in a test: random plans with stages, and what one process computes.

A case is made once, in the test's process, and travels to the ranks as a file.
"""

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.lower.messages import sent_by_rank
from autopar.ops.random import Draws, use_draws
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.promote_casts import promote_casts
from autopar.passes.split_stages import split_stages
from autopar.runtime import PipelinedModule, count_messages
from autopar.runtime.pipeline import staged_model
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.placement import local_ranges
from autopar.values.plan import Plan
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import dump, load
from tests.zoo import zoo
from tests.zoo_graphs import zoo_graph

ROWS = 4
"""Samples of a micro-batch."""


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Made when first asked for: ranks import this file too, and those that are stopped remove nothing."""
    return tempfile.TemporaryDirectory(prefix="autopar-pipeline-")


@cache
def case(family: str, microbatches: int, dropout: float = 0.0) -> tuple[CapturedModel, str]:
    """The graph of one micro-batch, and a file with what ranks need: model, batch, what one process makes of them."""
    model, batch = zoo(family, dtype=torch.float64, batch=ROWS * microbatches, seq=8, dropout=dropout)
    sizes: dict[str, Any] = {"dtype": torch.float64, "batch": ROWS * microbatches, "seq": 8, "dropout": dropout}
    whole = promote_casts(zoo_graph(family, ROWS, **sizes))
    captured = accumulate_gradients(whole, microbatches, lambda: promote_casts(zoo_graph(family, **sizes)))
    file = Path(_folder().name) / f"{family}-{microbatches}-{dropout}.pt"
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    values = {name: value.detach() for name, value in values.items()}
    inputs = {spec.placeholder: batch[spec.path] for spec in captured.inputs}
    loss, gradients, buffers = one_process(captured, values, inputs)
    contents = {"values": values, "inputs": inputs, "loss": loss, "gradients": gradients, "buffers": buffers}
    torch.save({**contents, "captured": dump(captured)}, file)
    return captured, str(file)


@cache
def contents(file: str) -> dict[str, Any]:
    """What `case` wrote, on a rank."""
    read = torch.load(file, weights_only=False)
    return {**read, "captured": load(read["captured"])}


def one_process(
    captured: CapturedModel, values: dict[str, Tensor], inputs: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and new buffers (by placeholder): one micro-batch after the other, then the sum of gradients."""
    parameters = {p.placeholder: values[p.placeholder].clone().requires_grad_(p.trainable) for p in captured.parameters}
    buffers = {b.placeholder: values[b.placeholder].clone() for b in captured.buffers}
    losses, counts = [], []
    accumulation = captured.accumulation
    for i in range(captured.microbatches):
        part = {name: value.chunk(captured.microbatches)[i] for name, value in inputs.items()}
        with use_draws(Draws(seed=1, step=i, exact=True)):
            loss, results = run_captured(captured, parameters, buffers, part)
        losses.append(loss * (accumulation.weight if accumulation else 1.0))
        if accumulation is not None and accumulation.count is not None:
            counts.append(results.pop(accumulation.count))
        buffers.update(results)
    total = torch.stack(losses).sum()
    total = total * (accumulation.rows / torch.stack(counts).sum()) if accumulation and counts else total
    total.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items() if p.requires_grad}
    return float(total.detach()), gradients, {name: value.detach() for name, value in buffers.items()}


def random_plans(
    captured: CapturedModel,
    schedule: str,
    mesh: tuple[int, ...],
    pipeline: int,
    num_stages: int,
    *,
    seeds: range = range(1),
    recompute: float = 0.0,
) -> list[str]:
    """As JSON: random cuts and a random plan for each stage, one for each seed."""
    plans = []
    for seed in seeds:
        rng = random.Random(f"{captured.name} {schedule} {num_stages} {captured.microbatches} {seed}")
        cuts = random_cuts(captured, num_stages, rng)
        plan = random_staged_plan(
            captured, make_mesh(mesh), schedule, pipeline, cuts, rng, recompute=recompute, buckets=0.5
        )
        plans.append(plan.to_json())
    return plans


def pipelined(file: str, plan: Plan, **keywords: Any) -> PipelinedModule:
    captured = contents(file)["captured"]
    model = staged_model(captured, plan, exact_random=True)
    return PipelinedModule(model, contents(file)["values"], seed=1, sync=False, **keywords)


def compared(file: str, texts: list[str]) -> list[tuple[float, float, str]]:
    """On a rank: for each plan the error of the loss, the largest of a gradient, and whose; asserts bytes, buffers."""
    found = contents(file)
    out = []
    for text in texts:
        plan = plan_from_json(text)
        module = pipelined(file, plan)
        with count_messages(module) as sent:
            loss = float(module.step(found["inputs"]))
        own = [stage.number for stage in module.stages]
        stages = split_stages(found["captured"], plan.cuts)
        predicted = sent_by_rank(stages, plan, own, module.groups.rank, on_host=True)
        assert sent == predicted
        for stage in module.stages:
            for buffer in stage.changed:
                torch.testing.assert_close(module.get_buffer(buffer.names[0]), found["buffers"][buffer.placeholder])
        out.append((abs(loss - found["loss"]) / abs(found["loss"]), *gradient_error(module, found["gradients"])))
    return out


def gradient_error(module: PipelinedModule, gradients: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of any gradient on this rank, and its parameter."""
    floor = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    worst, name = 0.0, ""
    for state in module.states:
        for spec in state.specs.values():
            if spec.trainable:
                whole = gradients[spec.placeholder]
                ranges = local_ranges(spec.shape, state.layout(spec.placeholder), state.mesh, state.coordinate)
                part = whole[tuple(slice(start, start + n) for start, n in ranges)]
                got = module.local_gradient(spec.placeholder)
                got = torch.zeros_like(part) if got is None else got
                error = float((got - part).abs().max()) / max(float(whole.abs().max()), floor) if part.numel() else 0.0
                if not error <= worst:
                    worst, name = error, spec.names[0]
    return worst, name
