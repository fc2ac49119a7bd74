"""The module of a plan with stages to its user: training, evaluation, state dicts, checkpoints, and what it refuses."""

import importlib.util
import os
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import runtime_cases as cases
import torch
from process_group import ranks
from torch import Tensor, nn
from torch.distributed import pipelining

import autopar
from autopar.api import captured_model
from autopar.calls import Call
from autopar.errors import ArgumentError, BatchError, MeshError, PlanMismatchError, RankError
from autopar.graph import CapturedModel
from autopar.mesh import make_mesh
from autopar.model_plan import load_plan
from autopar.passes.split_stages import owners, split_stages
from autopar.placement import INVARIANT, Layout
from autopar.plan import TrainConfig
from autopar.reference import buffers_of, parameters_of
from autopar.runtime import (
    PipelinedModule,
    count_messages,
    load,
    load_exported_stages,
    reset_parameters,
    save,
)
from autopar.search.random_plan import random_staged_plan
from autopar.staged_model_plan import StagedModelPlan, staged_model_plan
from autopar.staged_plan import StagedPlan, staged_plan_from_json

STEPS, MICROBATCHES = 2, 4


def plan_of(
    schedule: str = "1f1b",
    stage_mesh: tuple[int, ...] = (2,),
    pipeline: int = 2,
    *,
    seed: int = 0,
    dropout: float = 0.0,
) -> StagedPlan:
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


def pipelined(plan: StagedPlan, dropout: float = 0.0, model: nn.Module | None = None, **more: Any) -> PipelinedModule:
    captured = cases.captured(dropout, plan.microbatches)
    model = model or cases.words(dropout)
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    return PipelinedModule(captured, split_stages(captured, plan.cuts), plan, values, **more)


def batch(step: int) -> dict[str, Tensor]:
    """A global batch whose labels are ignored unevenly."""
    data = cases.batch(step, MICROBATCHES * cases.BATCH)
    for row in range(len(data["labels"])):
        data["labels"][row, : row * 3 // len(data["labels"])] = -100
    return data


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@cache
def one_process(clip: float | None = None) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, the state, and the norm of the last step's gradients: each micro-batch's mean weighs its labels."""
    model = cases.words()
    optimizer = adamw(model)
    losses, norm = [], 0.0
    for step in range(STEPS):
        data, loss = batch(step), 0.0
        total = int((data["labels"] != -100).sum())
        for ids, labels in zip(data["ids"].chunk(MICROBATCHES), data["labels"].chunk(MICROBATCHES), strict=True):
            part = model(ids, labels)["loss"] * int((labels != -100).sum()) / total
            part.backward()
            loss += float(part.detach())
        losses.append(loss)
        if clip is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, norm


def trained(text: str, clip: float | None = None) -> tuple[list[float], dict[str, Tensor], float]:
    module = pipelined(staged_plan_from_json(text))
    optimizer = adamw(module)
    losses, norm = [], 0.0
    for step in range(STEPS):
        losses.append(float(module.train_step(batch(step))))
        if clip is not None:
            norm = float(module.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    return losses, cases.whole_state(module), norm


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_steps_of_an_optimizer_equal_one_process(schedule: str, clip: float | None) -> None:
    losses, state, norm = one_process(clip)
    answers = ranks(4).run(trained, plan_of(schedule).to_json(), clip)
    assert {name for _, own, _ in answers for name in own} == set(state)
    for got_losses, own, got_norm in answers:
        assert got_losses == pytest.approx(losses, rel=1e-10)
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for name, value in own.items():
            torch.testing.assert_close(value, state[name], rtol=1e-8, atol=1e-9, msg=name)


def evaluated(text: str) -> None:
    """Gradients add without zero_grad; evaluation between steps has the loss of the model in eval mode."""
    module = pipelined(staged_plan_from_json(text))
    module.train_step(batch(0))
    names = [spec.placeholder for state in module.states for spec in state.specs.values() if spec.trainable]
    once = {n: g.clone() for n in names if (g := module.local_gradient(n)) is not None}
    assert once
    model = cases.words()
    for ids, labels in zip(batch(0)["ids"].chunk(MICROBATCHES), batch(0)["labels"].chunk(MICROBATCHES), strict=True):
        model(ids, labels)
    model.eval()
    module.eval()
    with torch.no_grad():
        want = float(model(**batch(1))["loss"])
        assert module(**batch(1)).item() == pytest.approx(want, rel=1e-12)
    with pytest.raises(ArgumentError, match=r"stages, each with a backward pass of its own; call module\.train_step"):
        module(**batch(1))
    module.train()
    module.train_step(batch(0))
    for name, gradient in once.items():
        torch.testing.assert_close(module.local_gradient(name), 2 * gradient, rtol=1e-10, atol=1e-12)
    for data in (cases.batch(0, 30), cases.batch(0, 8)):
        with pytest.raises(
            BatchError, match=r"takes the global batch \(32, 4\) on every rank, 4 micro-batches of \(8, 4"
        ):
            module.train_step(data)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zbv"])
def test_gradients_add_up_and_evaluation_runs_forward_alone(schedule: str) -> None:
    ranks(4).run(evaluated, plan_of(schedule).to_json())


def masked(text: str) -> tuple[float, float]:
    """Dropout: a step's loss under two ways to cut and run the model."""
    first, second = (
        pipelined(plan, 0.3, seed=5, exact_random=True) for plan in map(staged_plan_from_json, text.split("|"))
    )
    return float(first.train_step(batch(0))), float(second.train_step(batch(0)))


def test_dropout_does_not_depend_on_the_stages() -> None:
    texts = [plan_of("gpipe", dropout=0.3).to_json(), plan_of("zbv", (1,), 4, dropout=0.3).to_json()]
    plain = ranks(4).run(trained, plan_of("gpipe").to_json())[0][0][0]
    for one, other in ranks(4).run(masked, "|".join(texts)):
        assert one == pytest.approx(other, rel=1e-12)
        assert one != pytest.approx(plain, rel=1e-6)


def initialized(text: str) -> None:
    """Values come from rank 0, from a state dict of the original model, or module by module."""
    plan = staged_plan_from_json(text)
    own = cases.words()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(int(os.environ["RANK"]))
    want = cases.words().state_dict()
    for name, value in cases.whole_state(pipelined(plan, model=own)).items():
        assert torch.equal(value, want[name]), name
    with torch.device("meta"):
        empty = cases.Words().double()
    module = pipelined(plan, model=empty)
    with pytest.raises(ArgumentError, match=r"have no value.*reset_parameters"):
        module.train_step(batch(0))
    reset_parameters(module, empty, init=lambda part: [nn.init.normal_(p) for p in part.parameters(recurse=False)])
    assert all(torch.isfinite(p).all() for p in cases.whole_state(module).values())
    module.load_state_dict(want)
    for name, value in cases.whole_state(module).items():
        assert torch.equal(value, want[name]), name
    module.train_step(batch(0))


def test_values_come_from_rank_0_a_state_dict_or_initialization() -> None:
    ranks(4).run(initialized, plan_of("zbv").to_json())


def saved(text: str, other: str, folder: str) -> None:
    """Saved under one plan, loaded under another: the next step is the same."""
    module = pipelined(staged_plan_from_json(text), sync=False)
    optimizer = adamw(module)
    module.train_step(batch(0))
    optimizer.step()
    optimizer.zero_grad()
    save(module, optimizer, folder)
    expected = float(module.train_step(batch(1)))
    module = pipelined(staged_plan_from_json(other), sync=False)
    optimizer = adamw(module)
    load(module, optimizer, folder)
    assert module.num_calls == MICROBATCHES
    assert float(module.train_step(batch(1))) == pytest.approx(expected, rel=1e-12)
    optimizer.step()


def test_a_checkpoint_goes_on_under_other_stages(tmp_path: Path) -> None:
    ranks(4).run(saved, plan_of("1f1b").to_json(), plan_of("zbv", (1,), 4).to_json(), str(tmp_path))


class Plain(nn.Module):
    """Two linear layers; in between, operations without any parameter."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sin().cos()
        return self.last(y * (y > 0.5)).square().mean()


def plain(frozen: bool, schedule: str) -> tuple[Plain, CapturedModel, StagedPlan, Tensor]:
    """The middle stages have no parameter; with `frozen` the first has none that is trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Plain(frozen).double(), torch.randn(8, 4, dtype=torch.float64)
    captured, _ = captured_model(model, Call(kwargs={"x": x}), "fp64", microbatches=4)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    cuts = tuple(next(n for n in names if n.startswith(word)) for word in ("sin", "cos", "linear_1"))
    pipeline = 2 if schedule == "zbv" else 4
    plan = random_staged_plan(captured, make_mesh((4 // pipeline,)), schedule, pipeline, cuts, random.Random(1))
    return model, captured, plan, x


def trains_without_parameters(frozen: bool, schedule: str) -> None:
    model, captured, plan, x = plain(frozen, schedule)
    values = parameters_of(captured, model)
    module = PipelinedModule(captured, split_stages(captured, plan.cuts), plan, values)
    loss = module.train_step({"x": x})
    want = model(x)
    want.backward()
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
    for name, parameter in module.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(cases.whole(parameter.grad), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_without_parameters_or_gradients(schedule: str) -> None:
    for frozen in (False, True):
        ranks(4).run(trains_without_parameters, frozen, schedule)


def refusals(texts: list[str]) -> list[str]:
    """What each rank is told if ranks have different plans, if torch lacks the schedule, and of other world sizes."""
    messages = []
    plans = [staged_plan_from_json(text) for text in texts]
    with pytest.raises(RankError) as caught:
        pipelined(plans[int(os.environ["RANK"]) == 3])
    messages.append(str(caught.value))
    with mock.patch.object(pipelining, "ScheduleZBVZeroBubble", create=False):
        del pipelining.ScheduleZBVZeroBubble
        with pytest.raises(ArgumentError) as lacking:
            pipelined(plans[2])
        pipelining.ScheduleZBVZeroBubble = None
    messages.append(str(lacking.value))
    with pytest.raises(MeshError) as world:
        autopar.distribute(cases.words(), plans[3])
    messages.append(str(world.value))
    return messages


def test_what_ranks_are_refused() -> None:
    plans = [plan_of("1f1b"), plan_of("1f1b", seed=1), plan_of("zbv"), plan_of("1f1b", (2,), 3)]
    for differ, lacking, world in ranks(4).run(refusals, [plan.to_json() for plan in plans]):
        assert "ranks differ in plan" in differ and "on ranks [3]" in differ
        assert "zbv needs torch.distributed.pipelining.ScheduleZBVZeroBubble" in lacking
        assert "plan with one of gpipe, 1f1b, interleaved-1f1b" in lacking
        assert "3 stages on 3 pipeline ranks of mesh 2 (data), 6 ranks in all, but 4 processes were started" in world


def failed(text: str) -> list[str]:
    """What a step raises if a rank is gone, if a pass fails with an error of ours, and with any other."""
    module = pipelined(staged_plan_from_json(text))
    messages = []
    for cause in (None, BatchError("too many rows"), ZeroDivisionError("by zero")):
        error = RuntimeError("connection closed")
        error.__cause__ = cause
        with mock.patch.object(module._schedule._schedule, "step", side_effect=error):
            try:
                module.train_step(batch(0))
            except RuntimeError as caught:
                messages.append(f"{type(caught).__name__}: {caught}")
            except BatchError as caught:
                messages.append(str(caught))
    return messages


def test_errors_of_a_pass_are_raised_as_they_are_and_lost_ranks_are_named() -> None:
    for rank, (lost, ours, other) in enumerate(ranks(4).run(failed, plan_of("1f1b").to_json())):
        assert lost.startswith(f"RankError: rank {rank}: sending or receiving between stages failed: connection closed")
        assert (ours, other) == ("too many rows", "RuntimeError: connection closed")


def test_a_shared_weight_stored_in_two_ways_is_refused() -> None:
    from autopar.runtime.pipeline import check_shared

    plan = plan_of("1f1b")
    captured = cases.captured(0.0, MICROBATCHES)
    tied = next(name for name, stages in owners(split_stages(captured, plan.cuts)).items() if len(stages) > 1)
    other = Layout((INVARIANT,)) if plan.stages[0].layouts[tied] != Layout((INVARIANT,)) else Layout((cases.Shard(0),))
    last = replace(plan.stages[1], layouts={**plan.stages[1].layouts, tied: other})
    bad = replace(plan, stages=(plan.stages[0], last))
    with pytest.raises(
        PlanMismatchError, match=r"stages share embedding\.weight, which the plan stores as .* in stage 0"
    ):
        check_shared(captured, bad, owners(split_stages(captured, plan.cuts)))


def distributed(file: str) -> float:
    plan = load_plan(file)
    assert isinstance(plan, StagedModelPlan)
    module = autopar.distribute(cases.words(), plan)
    loss = module.train_step(batch(0))
    assert isinstance(loss, Tensor)
    return float(loss)


def test_a_saved_plan_with_stages_distributes_a_model(tmp_path: Path) -> None:
    model = cases.words()
    data = batch(0)
    captured, call = captured_model(model, Call(kwargs=data), "fp64", microbatches=MICROBATCHES)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    plan = random_staged_plan(captured, make_mesh((2,)), "1f1b", 2, (names[len(names) // 2],), random.Random(0))
    plan = replace(plan, config=TrainConfig(precision="fp64"))
    file = tmp_path / "plan.json"
    bound = staged_model_plan(plan, captured=captured, call=call)
    bound.save(file)
    loaded = load_plan(file)
    assert loaded == bound and loaded.captured is None and "2 stages on 2 of mesh 2 (data)" in repr(loaded)
    with pytest.raises(PlanMismatchError, match="has no graph of Words"):
        assert loaded.parts
    assert loaded.bind(model).parts[1].received == bound.parts[1].received
    for loss in ranks(4).run(distributed, str(file)):
        assert loss == pytest.approx(one_process()[0][0], rel=1e-10)


def exported(folder: str, text: str) -> None:
    """The exported code against the graphs of the plan, from equal values: loss, gradients, evaluation, bytes."""
    code = []
    for number in range(staged_plan_from_json(text).num_stages):
        name = f"exported_stage_{number}_{abs(hash(folder))}"
        spec = importlib.util.spec_from_file_location(name, Path(folder) / f"stage_{number}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        code.append(module.forward)
    model = cases.words()
    own = load_exported_stages(folder, code, lambda name, shape, dtype: model.get_parameter(name).detach())
    module = pipelined(staged_plan_from_json(text), sync=False)
    with count_messages(own) as sent, count_messages(module) as expected:
        loss, want = own.train_step(batch(0)), module.train_step(batch(0))
    assert torch.equal(loss, want) and sent == expected
    for state in module.states:
        for name in state.specs:
            got, gradient = own.local_gradient(name), module.local_gradient(name)
            assert (got is None and gradient is None) or torch.equal(got, gradient)
    own.eval()
    module.eval()
    with torch.no_grad():
        assert own(**batch(1)).item() == module(**batch(1)).item()
    with pytest.raises(PlanMismatchError, match="1 forwards were given"):
        load_exported_stages(folder, code[:1], lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_each_stage_is_exported_as_its_own_file(schedule: str, tmp_path: Path) -> None:
    plan, captured = plan_of(schedule), cases.captured(0.0, MICROBATCHES)
    values = {**parameters_of(captured, cases.words()), **buffers_of(captured, cases.words())}
    staged_model_plan(plan, captured=captured, values=values).export(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {f"stage_{n}.py" for n in range(4)} | {"plan.json", "train.py"}
    script = (tmp_path / "train.py").read_text()
    compile(script, "train.py", "exec")
    assert "load_exported_stages(HERE, [stage_0.forward, " in script and "train_step(batch)" in script
    assert "--nproc-per-node 4" in script and str((MICROBATCHES * cases.BATCH, cases.LENGTH)) in script
    ranks(4).run(exported, str(tmp_path), plan.to_json())
