"""The module of a plan with stages to its user: training, evaluation, state dicts, checkpoints, and what it refuses."""

import importlib.util
import os
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
import tests.runtime_cases as cases
from autopar.api.captures import captured_model
from autopar.api.model_plan import load_plan, model_plan
from autopar.errors import ArgumentError, BatchError, PlanMismatchError
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime import PipelinedModule, count_messages, load, load_exported, reset_parameters, save
from autopar.runtime.pipeline import staged_model
from autopar.search.known.random_plan import random_staged_plan
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan
from autopar.values.plan_file import plan_from_json
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.word_pipelines import MICROBATCHES, batch, pipelined, plan_of

STEPS = 2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@cache
def one_process(clip: float | None = None) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, the state, and the norm of the last step's gradients: each micro-batch's mean weighs its labels."""
    model = cases.words(microbatches=MICROBATCHES)
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
    module = pipelined(plan_from_json(text))
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
    module = pipelined(plan_from_json(text))
    module.train_step(batch(0))
    names = [spec.placeholder for state in module.states for spec in state.specs.values() if spec.trainable]
    once = {n: g.clone() for n in names if (g := module.local_gradient(n)) is not None}
    assert once
    model = cases.words(microbatches=MICROBATCHES)
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
    first, second = (pipelined(plan, 0.3, seed=5, exact_random=True) for plan in map(plan_from_json, text.split("|")))
    return float(first.train_step(batch(0))), float(second.train_step(batch(0)))


def test_dropout_does_not_depend_on_the_stages() -> None:
    texts = [plan_of("gpipe", dropout=0.3).to_json(), plan_of("zbv", (1,), 4, dropout=0.3).to_json()]
    plain = ranks(4).run(trained, plan_of("gpipe").to_json())[0][0][0]
    for one, other in ranks(4).run(masked, "|".join(texts)):
        assert one == pytest.approx(other, rel=1e-12)
        assert one != pytest.approx(plain, rel=1e-6)


def initialized(text: str) -> None:
    """Values come from rank 0, from a state dict of the original model, or module by module."""
    plan = plan_from_json(text)
    own = cases.words(microbatches=MICROBATCHES)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(int(os.environ["RANK"]))
    want = cases.words(microbatches=MICROBATCHES).state_dict()
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
    module = pipelined(plan_from_json(text), sync=False)
    optimizer = adamw(module)
    module.train_step(batch(0))
    optimizer.step()
    optimizer.zero_grad()
    save(module, optimizer, folder, step=1)
    expected = float(module.train_step(batch(1)))
    module = pipelined(plan_from_json(other), sync=False)
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


def plain(frozen: bool, schedule: str) -> tuple[Plain, CapturedModel, Plan, Tensor]:
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
    module = PipelinedModule(staged_model(captured, plan), values)
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


def distributed(file: str) -> float:
    plan = load_plan(file)
    module = autopar.distribute(cases.words(microbatches=MICROBATCHES), plan)
    loss = module.train_step(batch(0))
    assert isinstance(loss, Tensor)
    return float(loss)


def test_a_saved_plan_with_stages_distributes_a_model(tmp_path: Path) -> None:
    model = cases.words(microbatches=MICROBATCHES)
    data = batch(0)
    captured, call = captured_model(model, Call(kwargs=data), "fp64", microbatches=MICROBATCHES)
    names = [n.name for n in captured.graph.nodes if n.op == "call_function"]
    plan = random_staged_plan(captured, make_mesh((2,)), "1f1b", 2, (names[len(names) // 2],), random.Random(0))
    plan = replace(plan, config=TrainConfig(precision="fp64"))
    file = tmp_path / "plan.json"
    bound = model_plan(plan, captured=captured, call=call)
    bound.save(file)
    loaded = load_plan(file)
    assert (
        loaded == bound and loaded.captured is None and "2 stages on 2 pipeline ranks of mesh 2 (data)" in repr(loaded)
    )
    with pytest.raises(PlanMismatchError, match="has no graph of Words"):
        assert loaded.parts
    assert loaded.bind(model).parts[1].received == bound.parts[1].received
    for loss in ranks(4).run(distributed, str(file)):
        assert loss == pytest.approx(one_process()[0][0], rel=1e-10)


def exported(folder: str, text: str) -> None:
    """The exported code against the graphs of the plan, from equal values: loss, gradients, evaluation, bytes."""
    code = []
    for number in range(plan_from_json(text).num_stages):
        name = f"exported_stage_{number}_{abs(hash(folder))}"
        spec = importlib.util.spec_from_file_location(name, Path(folder) / f"stage_{number}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        code.append(module.forward)
    model = cases.words(microbatches=MICROBATCHES)
    own = load_exported(folder, code, lambda name, shape, dtype: model.get_parameter(name).detach())
    module = pipelined(plan_from_json(text), sync=False)
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
        load_exported(folder, code[:1], lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_each_stage_is_exported_as_its_own_file(schedule: str, tmp_path: Path) -> None:
    plan, captured = plan_of(schedule), cases.captured(0.0, MICROBATCHES)
    model = cases.words(microbatches=MICROBATCHES)
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    model_plan(plan, captured=captured, values=values).export(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {f"stage_{n}.py" for n in range(4)} | {"plan.json", "train.py"}
    script = (tmp_path / "train.py").read_text()
    compile(script, "train.py", "exec")
    assert "load_exported(HERE, [stage_0.forward, " in script and "train_step(batch)" in script
    assert "--nproc-per-node 4" in script and str((MICROBATCHES * cases.BATCH, cases.LENGTH)) in script
    ranks(4).run(exported, str(tmp_path), plan.to_json())
