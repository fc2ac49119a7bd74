"""Gradients that ranks sum in a wider dtype than they are computed in: values, bytes sent, bytes held."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import ArgumentError
from autopar.export.folder import export_folder
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.runtime import DistributedModule, count_messages
from autopar.search.costs.evaluate import evaluate
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_cuts, random_plan, random_staged_plan
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.precision import PRECISIONS, with_storage
from autopar.values.serialize import dump, load
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from autopar.verification import reference_gradients
from tests.process_group import ranks
from tests.search_cases import machine
from tests.test_mixed_precision import MIXED, Sum, case, from_folder, some_plan, staged_errors, step_errors, summed
from tests.test_peak_memory import measured

WIDE = TrainConfig(precision=MIXED, reduce_dtype="fp64")
CASES = [("use", 1), ("bucketed", 1), ("bucketed", 2), ("random0", 2)]


def wide_plan(name: str, captured: Any) -> tuple[StagePlan, StagePlan]:
    """A plan, and the same with its gradients summed in float64."""
    if name == "bucketed":
        plan = random_plan(captured, make_mesh((2,)), random.Random(name))
        plan = random_buckets(plan, captured, random.Random(name))
    else:
        plan = some_plan(name, captured)
    return plan, replace(plan, config=WIDE)


@pytest.mark.parametrize(("name", "microbatches"), CASES)
def test_wide_sums_are_right_and_sent_and_held_as_said(name: str, microbatches: int) -> None:
    captured, values, inputs = case("gpt2", microbatches)
    plain, plan = wide_plan(name, captured)
    loss, gradients, _ = reference_gradients(captured, values, inputs)
    narrow = messages_of(captured, plain, on_host=True)
    wide = messages_of(captured, plan, on_host=True)
    assert {kind: calls for kind, (calls, _) in wide.items()} == {kind: calls for kind, (calls, _) in narrow.items()}
    assert sum(nbytes for _, nbytes in wide.values()) > sum(nbytes for _, nbytes in narrow.values())
    sent = messages_of(captured, plan, on_host=True)
    for found in ranks(2).run(step_errors, plan, dump(captured), values, inputs, gradients):
        assert found["loss"] == pytest.approx(float(loss), rel=1e-6)
        assert found["error"] < 1e-5
        assert found["sent"] == sent
    predicted = evaluate(plan, captured, machine(2)).peak_nbytes
    assert max(ranks(2).run(measured, plan, dump(captured), values, inputs)) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(
    ("name", "buckets", "expected"),
    [("ddp", True, 1 + 3 * 2.0**-9), ("fsdp", False, 1 + 2.0**-7), ("ddp", False, 1 + 2.0**-7)],
)
def test_small_summands_are_kept(name: str, buckets: bool, expected: float) -> None:
    """Of 1 and three times 2**-9 on four ranks bfloat16 keeps 1. Sums in a bucket reach their masters unrounded, those
    of a collective of their own are rounded once."""
    x = torch.full((4, 4), 2.0**-9, dtype=torch.bfloat16)
    x[0] = 1.0
    captured = with_storage(capture(Sum().bfloat16(), (x,), {}), PRECISIONS["bf16-mixed"])
    config = TrainConfig(precision="bf16-mixed", reduce_dtype="fp32")
    plan = make_baseline(name, captured, machine(4), make_mesh((4,)), config)
    plan = replace(plan, buckets=((captured.parameters[0].placeholder,),) if buckets else ())
    for gradient in ranks(4).run(summed, plan, dump(captured), x):
        assert gradient.tolist() == [expected] * 4
    narrow = replace(plan, config=replace(config, reduce_dtype=None))
    for gradient in ranks(4).run(summed, narrow, dump(captured), x):
        assert gradient.min() == 1, "the order of a ring keeps some, not all"


def test_stages_sum_wide() -> None:
    captured, values, inputs = case("gpt2", 4)
    rng = random.Random(0)
    plan = random_staged_plan(captured, make_mesh((2,)), "1f1b", 2, random_cuts(captured, 2, rng), rng)
    plan = replace(plan, config=WIDE, stages=tuple(replace(stage, config=WIDE) for stage in plan.stages))
    _, gradients, _ = reference_gradients(captured, values, inputs)
    for errors in ranks(4).run(staged_errors, plan.to_json(), dump(captured), values, inputs, gradients):
        assert max(errors, default=0.0) < 1e-4


def compiled_errors(plan: StagePlan, graph: bytes, values: Any, inputs: Any) -> float:
    """On a rank: the worst relative difference between gradients of the eager and the compiled module."""
    local = emit(load(graph), plan)
    eager, compiled = DistributedModule(local, values), DistributedModule(local, values)
    compiled.compile(backend="aot_eager")
    for module in (eager, compiled):
        with count_messages(module) as sent:
            module.step(inputs)
        assert sent == messages_of(local.captured, local.plan, on_host=True)
    return max(
        float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        for spec in local.captured.parameters
        if (found := compiled.local_gradient(spec.placeholder)) is not None
        and (wanted := eager.local_gradient(spec.placeholder)) is not None
    )


def test_compiled_and_exported_code_sums_wide(tmp_path: Path) -> None:
    captured, values, inputs = case("llama")
    _, plan = wide_plan("bucketed", captured)
    plan = replace(plan, fingerprint=captured.fingerprint)
    assert max(ranks(2).run(compiled_errors, plan, dump(captured), values, inputs)) < 1e-4
    export_folder(tmp_path, captured, [emit(captured, plan)], one_stage(plan), values)
    assert "bits=64" in (tmp_path / "model.py").read_text()
    for loss, expected in ranks(2).run(from_folder, str(tmp_path), dump(captured), values, inputs):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_a_plan_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    options: dict[str, Any] = {"cluster": "2xcpu", "mesh": "2", "with_baselines": False, "precision": "bf16-mixed"}
    options |= {"loss_fn": lambda output: output.sum()}
    plan = autopar.plan(model, torch.randn(4, 8), reduce_dtype="fp32", **options)
    assert "bf16-mixed, gradients summed in fp32" in str(plan)
    with pytest.raises(ArgumentError, match="reduce_dtype 'fp16'"):
        autopar.plan(model, torch.randn(4, 8), reduce_dtype="fp16", **options)
