"""Two micro-batches woven into one graph are the step that they are one after the other: loss, gradients, bytes."""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.errors import BatchError
from autopar.export.folder import export_folder
from autopar.lower.emit import emit
from autopar.lower.interleaved import running
from autopar.lower.program import make_program
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime import DistributedModule
from autopar.runtime.exported import load_exported
from autopar.search.costs.evaluate import evaluate
from autopar.search.costs.folding import fold_program
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_recompute
from autopar.search.woven import best_woven
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of
from tests.process_group import ranks
from tests.runtime_cases import BATCH, batch, captured, distributed, some_plan, words
from tests.search_cases import machine
from tests.test_accumulate_gradients import microbatch, whole


def test_a_woven_program_has_classes_of_its_own() -> None:
    """Whatever was found of the one it is made of: it has more ops."""
    captured = microbatch("gpt2", 2)
    program, plan = make_program(captured), make_baseline("ddp", captured, machine(), make_mesh((4,)), TrainConfig())
    fold_program(program)
    _, woven = running(replace(plan, copies=2), program)
    assert len(fold_program(woven).class_of) == len(woven.ops) > len(program.ops)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_plans_woven_equal_one_process(family: str) -> None:
    """Every lifetime, buckets, recompute; two micro-batches are one batch of their own, four are two steps of two."""
    rng = random.Random(family)
    for number, (count, mesh) in enumerate([(2, (2, 2)), (4, (2,)), (2, (2,))]):
        captured = microbatch(family, count)
        plan = random_plan(captured, make_mesh(mesh), rng)
        plan = random_buckets(plan, captured, rng) if number != 1 else plan
        plan = random_recompute(plan, captured, rng, share=0.3) if number == 2 else plan
        plan = plan_from_json(one_stage(replace(plan, copies=2)).to_json()).single
        loss_error, gradient_error, parameter = errors_of(whole(family), plan, captured)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {parameter} off by {gradient_error}"


def test_what_is_no_pair_is_refused() -> None:
    captured = microbatch("vit", 2)
    plan = random_plan(captured, make_mesh((2,)), random.Random(0))
    with pytest.raises(BatchError, match="woven of pairs"):
        emit(captured, replace(plan, copies=3))


def test_the_search_weaves_where_that_is_faster_and_fits() -> None:
    """Of what it prices the fastest within the limit; tensor parallelism over a slow link is woven."""
    captured, cluster = microbatch("llama", 2), machine(2, bandwidth=2e8)
    plan = make_baseline("megatron", captured, cluster, make_mesh((2,)), TrainConfig(precision="fp64"))
    both = evaluate(replace(plan, copies=2), captured, cluster)
    assert both.step_seconds < plan.estimate.step_seconds and both.peak_nbytes > plan.estimate.peak_nbytes
    found, _ = best_woven(plan, captured, cluster, lambda _: plan)
    assert found.copies == 2 and found.estimate.step_seconds == both.step_seconds
    assert set(found.estimate.search.copies.values()) == {both.step_seconds, plan.estimate.step_seconds}
    tight = replace(plan, config=replace(plan.config, memory_nbytes=both.peak_nbytes - 1))
    assert best_woven(tight, captured, cluster, lambda _: tight)[0] is tight
    fast = machine(2, bandwidth=1e15)
    quick = plan.with_estimate(evaluate(plan, captured, fast))
    found, _ = best_woven(quick, captured, fast, lambda _: plan)
    assert found.estimate.step_seconds == min(found.estimate.search.copies.values())


def test_more_micro_batches_are_searched_only_where_there_is_something_to_hide() -> None:
    captured, asked = whole("llama").captured, list[int]()

    def capture(count: int) -> CapturedModel:
        asked.append(count)
        return microbatch("llama", count)

    def search(graph: CapturedModel) -> StagePlan:
        return make_baseline(name, graph, cluster, make_mesh((2,)), TrainConfig(precision="fp64"))

    cluster = machine(2, bandwidth=2e8)
    for kind, more in (("fsdp", 0), ("megatron", 1)):
        name = kind
        plan = search(captured)
        found, graph = best_woven(plan, captured, cluster, search, capture)
        assert len(asked) == more and found.microbatches == graph.microbatches
        assert found.estimate.step_seconds <= plan.estimate.step_seconds
    assert found.copies == 2


def _at_once(folder: str, count: int) -> list[list[float]]:
    """On one of two ranks, of steps with dropout: losses, and sums of gradients and buffers; one
    micro-batch at a time, two at once, and so exported."""
    import importlib.util

    local = emit(captured(0.2, count), replace(some_plan((2,), 1, 0.2, count), copies=2))
    named = {name: value.detach() for name, value in words(0.2).named_parameters()}
    modules = [distributed(replace(local.plan, copies=n), 0.2, seed=5) for n in (1, 2)]
    own = Path(folder) / f"own{os.environ['RANK']}"
    model = words(0.2, count)
    values = {**parameters_of(local.captured, model), **buffers_of(local.captured, model)}
    export_folder(own, local.captured, [local], one_stage(local.plan), values)
    spec = importlib.util.spec_from_file_location(f"woven{count}", own / "model.py")
    assert spec is not None and spec.loader is not None
    code = sys.modules[f"woven{count}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    modules.append(load_exported(own, [code.forward], lambda name, shape, dtype: named[name], seed=5))
    out = []
    for module in modules:
        module.train()
        losses = [float(module.step(module_inputs(module, step, count))) for step in range(2)]
        gradients = [module.local_gradient(p.placeholder) for p in local.captured.parameters]
        sums = [float(g.square().sum()) for g in gradients if g is not None]
        buffers = [float(b.double().sum()) for b in module.buffers()]
        module.eval()
        with torch.no_grad():
            losses.append(float(module.run(module_inputs(module, 0, count))))
        out.append([*losses, *sums, *buffers])
    return out


def module_inputs(module: DistributedModule, step: int, count: int) -> dict[str, Tensor]:
    return bind_inputs(module.inputs, (), batch(step, BATCH * count))


@pytest.mark.parametrize("count", [2, 4])
def test_two_at_once_draw_and_count_as_one_at_a_time_exported_too(tmp_path: Path, count: int) -> None:
    for first, *others in ranks(2).run(_at_once, str(tmp_path), count):
        for other in others:
            assert other == pytest.approx(first, rel=1e-9)
