"""Master weights: stored and trained wide, computed on and sent narrow; loss, gradients and bytes as on one process.

Most cases compute in float32 on float64 weights, so that what is equal is equal to many digits.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of, sent_by_rank
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.runtime import DistributedModule, PipelinedModule, count_messages
from autopar.runtime.data import local_samples
from autopar.runtime.pipeline import staged_model
from autopar.search.costs.evaluate import evaluate
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_cuts, random_plan, random_staged_plan
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from autopar.values.placement import local_shape
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.precision import PRECISIONS, computed_twin, with_storage
from autopar.values.serialize import dump, load
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from autopar.verification import reference_gradients
from tests.process_group import ranks
from tests.runtime_cases import whole as whole_of
from tests.search_cases import machine, squares
from tests.test_peak_memory import measured
from tests.zoo import zoo
from tests.zoo_graphs import zoo_graph

MIXED = "fp32-mixed"


@cache
def case(family: str, microbatches: int = 1) -> tuple[CapturedModel, dict[str, Tensor], dict[str, Tensor]]:
    """Graph, values (of trained parameters no float32) and the inputs of a step, by placeholder."""
    model, kwargs = zoo(family)
    captured = accumulate_gradients(zoo_graph(family), microbatches, lambda: case(family)[0])
    captured = with_storage(captured, PRECISIONS[MIXED])
    inputs = {n: torch.cat([v] * microbatches) for n, v in bind_inputs(captured.inputs, (), kwargs).items()}
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    stored = {p.placeholder: p.storage for p in captured.parameters}
    generator = torch.Generator().manual_seed(0)
    for name, dtype in stored.items():
        wide = values[name].detach().to(dtype)
        values[name] = wide * (1 + 1e-8 * torch.randn(wide.shape, generator=generator, dtype=wide.dtype))
    return captured, {name: value.detach() for name, value in values.items()}, inputs


def some_plan(name: str, captured: CapturedModel) -> StagePlan:
    """A lifetime of fully sharded storage, ddp, or a random plan; on 2 ranks."""
    mesh = make_mesh((2,))
    if name.startswith("random"):
        return random_plan(captured, mesh, random.Random(name))
    if name == "ddp":
        return make_baseline("ddp", captured, machine(2), mesh, TrainConfig())
    plan = make_baseline("fsdp", captured, machine(2), mesh, TrainConfig())
    return replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, name))


def step_errors(
    plan: StagePlan, graph: bytes, values: Any, inputs: Any, gradients: Mapping[str, Tensor]
) -> dict[str, Any]:
    """On a rank: the loss, the worst relative error of a gradient, and whether bytes are as predicted."""
    captured = load(graph)
    module = DistributedModule(emit(captured, plan), values, exact_random=True)
    with count_messages(module) as sent:
        own = {s.placeholder: local_samples(module, s, inputs[s.placeholder]) for s in captured.inputs}
        loss = module.step(own, is_local=True)
    floor = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    worst = 0.0
    for spec in captured.parameters:
        parameter = module.get_parameter(spec.names[0])
        gradient = parameter.grad
        assert gradient is not None and gradient.dtype == parameter.dtype == torch.float64
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements
        whole = gradients[spec.placeholder]
        error = float((whole_of(gradient) - whole).abs().max()) / max(float(whole.abs().max()), floor)
        worst = max(worst, error)
    return {"loss": float(loss), "error": worst, "sent": dict(sent)}


@pytest.mark.parametrize(("name", "microbatches"), [
    ("ddp", 1), ("use", 1), ("random1", 1), ("ddp", 2), ("step", 2), ("microbatch", 2), ("use", 2), ("random1", 2),
])  # fmt: skip
def test_gradients_are_those_of_one_process_and_narrow_bytes_are_sent(name: str, microbatches: int) -> None:
    captured, values, inputs = case("gpt2", microbatches)
    plan = some_plan(name, captured)
    loss, gradients, _ = reference_gradients(captured, values, inputs)
    assert {g.dtype for g in gradients.values()} == {torch.float64}
    plain = replace(captured, parameters=tuple(replace(p, stored=None) for p in captured.parameters))
    sent = messages_of(plain, replace(plan, fingerprint=plain.fingerprint), on_host=True)
    for found in ranks(2).run(step_errors, plan, dump(captured), values, inputs, gradients):
        assert found["loss"] == pytest.approx(float(loss), rel=1e-6)
        assert found["error"] < 1e-5
        assert found["sent"] == sent


def training(plan: StagePlan, graph: bytes, values: Any, batches: list[Any]) -> dict[str, Tensor]:
    """On a rank: whole parameters after AdamW's steps."""
    captured = load(graph)
    module = DistributedModule(emit(captured, plan), values)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for batch in batches:
        module.step(batch)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, state in optimizer.state.items():
        assert {state[k].dtype for k in ("exp_avg", "exp_avg_sq")} == {parameter.dtype} == {torch.float64}
    return {name: value.full_tensor() for name, value in module.state_dict().items() if isinstance(value, DTensor)}


def test_weights_are_trained_wide() -> None:
    captured, values, inputs = case("llama")
    plan = some_plan("use", captured)
    trained = {n: v.clone() for n, v in values.items()}
    parameters = {p.placeholder: nn.Parameter(trained[p.placeholder]) for p in captured.parameters}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    for _ in range(3):
        _, gradients, _ = reference_gradients(captured, {**values, **parameters}, inputs)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    for state in ranks(2).run(training, plan, dump(captured), values, [inputs] * 3):
        for spec in captured.parameters:
            got, want = state[spec.names[0]], parameters[spec.placeholder].detach()
            moved = (want - values[spec.placeholder]).abs().max()
            assert float((got - want).abs().max()) < 1e-3 * float(moved)
            assert got.float().double().ne(got).any(), "no float32 holds it"


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def summed(plan: StagePlan, graph: bytes, x: Tensor) -> Tensor:
    captured = load(graph)
    (spec,), (given,) = captured.parameters, captured.inputs
    module = DistributedModule(emit(captured, plan), {spec.placeholder: torch.ones(4)})
    module.step({given.placeholder: x})
    gradient = module.get_parameter("weight").grad
    assert gradient is not None
    return whole_of(gradient)


@pytest.mark.parametrize(
    ("lifetime", "expected"), [("use", 2 + 6 / 512), ("microbatch", 2 + 6 / 512), ("step", 2.015625)]
)
def test_gradients_of_micro_batches_add_up_wide(lifetime: str, expected: float) -> None:
    """1, then three times 2**-9 on each of two ranks: bfloat16 would lose the small ones. What is kept for a step is
    rounded once, when it is reduced."""
    x = torch.ones(8, 4, dtype=torch.bfloat16)
    x[2:] = 2.0**-9
    model = Sum().bfloat16()
    captured = accumulate_gradients(capture(model, (x[:2],), {}), 4, lambda: capture(model, (x,), {}))
    captured = with_storage(captured, PRECISIONS["bf16-mixed"])
    plan = some_plan(lifetime, captured)
    for gradient in ranks(2).run(summed, plan, dump(captured), x):
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [expected] * 4


@pytest.mark.parametrize(
    ("name", "microbatches"), [("microbatch", 1), ("use", 1), ("random0", 1), ("ddp", 2), ("step", 2)]
)
def test_peak_memory_is_the_predicted(name: str, microbatches: int) -> None:
    captured, values, inputs = case("gpt2", microbatches)
    plan = some_plan(name, captured)
    predicted = evaluate(plan, captured, machine(2)).peak_nbytes
    plain = replace(captured, parameters=tuple(replace(p, stored=None) for p in captured.parameters))
    assert predicted > 1.1 * evaluate(plan, plain, machine(2)).peak_nbytes
    assert max(ranks(2).run(measured, plan, dump(captured), values, inputs)) == pytest.approx(predicted, rel=0.05)


def test_a_plan_counts_stored_bytes() -> None:
    """Parameters, gradients and AdamW's two states are float32; what is proved is below what is found."""
    model, inputs = squares()
    options: dict[str, Any] = {"cluster": "2xcpu", "mesh": "2", "with_baselines": False}
    plan = autopar.plan(model, inputs, precision="bf16-mixed", **options)
    captured = plan.captured
    assert captured is not None
    assert {(p.dtype, p.storage) for p in captured.parameters} == {(torch.bfloat16, torch.float32)}
    for spec in captured.parameters:
        assert torch.equal(plan.values[spec.placeholder], model.get_parameter(spec.names[0]))
    stage = plan.single
    numel = sum(math.prod(local_shape(p.shape, stage.layouts[p.placeholder], plan.mesh)) for p in captured.parameters)
    estimate = evaluate(stage, captured, machine(2))
    assert (estimate.memory["parameters"], estimate.memory["optimizer"]) == (4 * numel, 8 * numel)
    assert 0 < plan.estimate.bound <= plan.estimate.step_seconds
    narrow = autopar.plan(model, inputs, precision="bf16", **options)
    with pytest.raises(PlanMismatchError, match="or precision"):
        narrow.check(captured)
    quick = autopar.plan(model, inputs, precision="bf16-mixed", solver="double-recursive", **options)
    assert quick.estimate.step_seconds >= plan.estimate.bound


def from_folder(folder: str, graph: bytes, values: Any, inputs: Any) -> tuple[float, float]:
    """On a rank: the loss of the exported folder, and its worst error to the module; same gradients, dtypes, bytes."""
    import importlib.util
    import sys

    from autopar.runtime import load_exported
    from autopar.values.plan_file import load_plan

    spec = importlib.util.spec_from_file_location("exported_mixed", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    code = sys.modules["exported_mixed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    captured = load(graph)
    named = {p.names[0]: values[p.placeholder] for p in captured.parameters}
    own = load_exported(folder, [code.forward], lambda name, shape, dtype: named[name].to(dtype))
    module = DistributedModule(emit(captured, load_plan(Path(folder) / "plan.json").single), values)
    loss, expected = own.step(inputs), module.step(inputs)
    for parameter in captured.parameters:
        got, want = own.get_parameter(parameter.names[0]), module.get_parameter(parameter.names[0])
        assert got.dtype == torch.float64 and isinstance(got.grad, DTensor) and isinstance(want.grad, DTensor)
        torch.testing.assert_close(got.grad.full_tensor(), want.grad.full_tensor())
    return float(loss), float(expected)


def test_an_exported_folder_trains_wide(tmp_path: Path) -> None:
    from autopar.export.folder import export_folder

    captured, values, inputs = case("llama", 2)
    plan = some_plan("step", captured)
    export_folder(tmp_path, captured, [emit(captured, plan)], one_stage(plan), values)
    for loss, expected in ranks(2).run(from_folder, str(tmp_path), dump(captured), values, inputs):
        assert loss == pytest.approx(expected, rel=1e-6)


def staged_errors(text: str, graph: bytes, values: Any, inputs: Any, gradients: Mapping[str, Tensor]) -> list[float]:
    """On a rank: relative errors of the gradients of its stages; asserts dtypes and what is sent."""
    captured, plan = load(graph), plan_from_json(text)
    stages = split_stages(captured, plan.cuts)
    module = PipelinedModule(staged_model(captured, plan, exact_random=True), values, seed=1)
    with count_messages(module) as sent:
        module.step(inputs)
    own = [stage.number for stage in module.stages]
    assert sent == sent_by_rank(stages, plan, own, module.groups.rank, on_host=True)
    errors = []
    for state in module.states:
        for name, parameter in state.parameters.items():
            whole, gradient = gradients[name], parameter.grad
            assert gradient is not None and parameter.dtype == gradient.dtype == torch.float64
            errors.append(float((whole_of(gradient) - whole).abs().max() / whole.abs().max().clamp_min(1e-6)))
    return errors


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("zbv", 4)])
def test_stages_train_wide(schedule: str, num_stages: int) -> None:
    """The embedding, which the head shares, is summed over stages as it is stored."""
    captured, values, inputs = case("gpt2", 4)
    rng = random.Random(0)
    cuts = random_cuts(captured, num_stages, rng)
    plan = random_staged_plan(captured, make_mesh((1,)), schedule, 2, cuts, rng)
    _, gradients, _ = reference_gradients(captured, values, inputs)
    for errors in ranks(2).run(staged_errors, plan.to_json(), dump(captured), values, inputs, gradients):
        assert max(errors) < 1e-4


def test_statistics_of_batch_norm_are_as_its_weights_and_other_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.ones(4))
    twin = computed_twin(model, PRECISIONS["bf16-mixed"])
    assert {p.dtype for p in twin.parameters()} == {twin.get_buffer("1.running_mean").dtype} == {torch.bfloat16}
    assert twin.get_buffer("table").dtype == model.get_buffer("1.running_mean").dtype == torch.float32
