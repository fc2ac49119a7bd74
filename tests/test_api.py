"""`autopar.plan`, `load_plan`, `distribute` and the decorator, in an ordinary process and on ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    ArgumentError,
    BatchError,
    InfeasibleError,
    MeshError,
    NoLossError,
    OptimizerError,
    PlanMismatchError,
    RankError,
)
from autopar.runtime.optimizers import MARK
from autopar.runtime.private_torch import local_tensor
from autopar.search.asked_mesh import mesh_for
from autopar.values.calls import Call, call_from_json, call_of
from autopar.values.cluster import load_cluster, resized
from tests.process_group import ranks


class Net(nn.Module):
    """A model that returns its loss itself."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(block(x).relu())
        return x.square().mean()


class Classifier(nn.Module):
    """A model without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def inputs(batch: int = 8, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, batch * width).view(batch, width)}


def make(seed: int = 0, **arguments: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**arguments)


def quick(model: nn.Module, example: Any, **arguments: Any) -> autopar.ModelPlan:
    return autopar.plan(model, example, **{"cluster": "2xcpu", "with_baselines": False, **arguments})


def test_import_is_quick() -> None:
    """`import autopar` loads no torch, and `plan` is there when it is asked for."""
    code = "import autopar, sys; assert 'torch' not in sys.modules; assert callable(autopar.plan)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_line_is_there_before_torch() -> None:
    """A second for a word of help, four with all that planning takes."""
    heavy = "torch", "scipy.optimize", "ortools", "transformers"
    code = f"import autopar.cli, sys; assert not sys.modules.keys() & {set(heavy)!r}, sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_plan_prints_saves_loads_and_binds(tmp_path: Path) -> None:
    model = make()
    plan = quick(model, inputs(), baseline="ddp")
    assert "Net on 2xcpu, mesh 2 (data), global batch 8" in str(plan) and "blocks.0-1" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.captured is None
    assert "plan.bind(model)" in str(loaded) and "blocks.0-1" not in str(loaded)
    with pytest.raises(PlanMismatchError, match=r"call plan.bind\(model\) first"):
        loaded.export(tmp_path / "out")
    assert str(loaded.bind(model)) == str(plan)
    assert json.loads((tmp_path / "plan.json").read_text())["call"]["bare"] is True


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "not a plan that autopar saved"),
        ('{"schema": 99}', "schema version 99"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, body: str | None, message: str) -> None:
    if body is not None:
        (tmp_path / "plan.json").write_text(body)
    with pytest.raises(PlanMismatchError, match=message):
        autopar.load_plan(tmp_path / "plan.json")


def test_a_plan_for_another_torch_is_refused(tmp_path: Path) -> None:
    plan = quick(make(), inputs(), baseline="ddp")
    body = json.loads(plan.to_json()) | {"torch": ["1.0", "1.5"]}
    (tmp_path / "plan.json").write_text(json.dumps(body))
    with pytest.raises(PlanMismatchError, match=r"for torch >= 1.0, < 1.5"):
        autopar.load_plan(tmp_path / "plan.json")


def test_a_plan_of_another_model_is_refused() -> None:
    loaded = autopar.ModelPlan.bind
    plan = quick(make(), inputs(), baseline="ddp")
    text = plan.to_json()
    from autopar.api.model_plan import plan_from_text

    with pytest.raises(PlanMismatchError, match="the model at hand does not run so"):
        loaded(plan_from_text(text), make(width=32))
    with pytest.raises(PlanMismatchError, match="plan again for this model"):
        loaded(plan_from_text(text), make(dropout=0.5))


def test_precision_is_the_models_unless_said() -> None:
    model = make().to(torch.bfloat16)
    example = {"x": inputs()["x"].bfloat16()}
    assert quick(model, example, baseline="ddp").config.precision == "bf16"
    plan = quick(model, example, baseline="ddp", precision="fp64")
    assert plan.captured is not None
    assert {p.dtype for p in plan.captured.parameters} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "the user's model is not changed"
    assert {v.dtype for v in plan.values.values()} == {torch.float64}
    with pytest.raises(ArgumentError, match="parameters are float16; give precision="):
        quick(make().half(), inputs(), baseline="ddp")


def test_a_loss_function_makes_a_model_trainable() -> None:
    example = {"x": torch.randn(8, 4), "y": torch.zeros(8, dtype=torch.int64)}
    plan = quick(
        Classifier(),
        example,
        loss_fn=lambda out, batch: nn.functional.cross_entropy(out, batch["y"]),
        baseline="ddp",
    )
    assert plan.captured is not None and [spec.path for spec in plan.captured.inputs] == ["x", "y"]
    with pytest.raises(NoLossError, match="give loss_fn"):
        quick(Classifier(), {"x": example["x"]}, baseline="ddp")


def test_global_batch_replaces_the_examples_own() -> None:
    plan = quick(make(), inputs(2), global_batch=64, baseline="ddp")
    assert plan.captured is not None and plan.captured.inputs[0].shape == (64, 16)
    with pytest.raises(BatchError, match=r"dim 0 differs \(a \(4, 2\), b \(3,\)\)"):
        Call(kwargs={"a": torch.zeros(4, 2), "b": torch.zeros(3)}).with_batch(8)
    with pytest.raises(ArgumentError, match="global_batch 0 is not a whole number from 1"):
        quick(make(), inputs(), global_batch=0)


def test_calls_survive_json() -> None:
    call = Call(
        args=(torch.zeros(2, 3),), kwargs={"a": {"b": [torch.zeros(2, dtype=torch.int64), None]}, "c": (1, False)}
    )
    again = call_from_json(json.loads(json.dumps(call.to_json())))
    assert {p: (t.shape, t.dtype) for p, t in again.tensors().items()} == {
        p: (t.shape, t.dtype) for p, t in call.tensors().items()
    }
    assert again.kwargs["c"] == (1, False) and again.kwargs["a"]["b"][1] is None
    assert Call(kwargs={"f": object()}).to_json() is None
    assert call_of(inputs()["x"]).args[0] is not None
    with pytest.raises(ArgumentError, match="not both"):
        call_of(inputs(), args=(1,))
    with pytest.raises(ArgumentError, match="needs the inputs of one call"):
        call_of(None)


def test_meshes_fit_their_cluster() -> None:
    cluster = load_cluster("2x8xh100")
    assert mesh_for(cluster, None).shape == (2, 8)
    assert mesh_for(load_cluster("8xh100"), None).shape == (8,)
    assert mesh_for(cluster, "4x4").shape == mesh_for(cluster, (4, 4)).shape == (4, 4)
    with pytest.raises(MeshError, match="has 8 ranks, not the 16 devices of 2x8xh100; use a mesh of 16, such as"):
        mesh_for(cluster, "8")
    assert resized(cluster, 1, 4).num_devices == 4
    with pytest.raises(MeshError, match="is one node, but processes on 2 nodes"):
        resized(load_cluster("8xh100"), 2, 8)


def test_distribute_without_torchrun_says_how() -> None:
    plan = quick(make(), inputs(), baseline="ddp")
    with pytest.raises(MeshError, match="start it with torchrun"):
        autopar.distribute(make(), plan)


# The decorator in an ordinary process


def test_a_decorated_class_behaves_as_before() -> None:
    plain = make()

    @autopar.auto_parallel(cluster="2xcpu", optimizer="sgd")
    class Decorated(Net):
        pass

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decorated()
    assert isinstance(model, Decorated) and isinstance(model, Net) and Decorated.__name__ == "Decorated"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model(**inputs()), plain(**inputs()))
    model.load_state_dict(plain.state_dict())
    assert model.train() is model and len(list(model.parameters())) == 4
    plan = model.plan(inputs())  # type: ignore[attr-defined]
    assert plan.config.optimizer == "sgd" and plan.mesh.shape == (2,)
    assert not hasattr(plain, "plan"), "the undecorated class stays as it is"


def test_a_decorated_instance_is_of_its_class() -> None:
    model, other = make(), make()
    decorated = autopar.auto_parallel(model, cluster="2xcpu", global_batch=16)
    assert decorated is model and isinstance(model, Net) and type(model).__name__ == "Net"
    assert torch.equal(model(**inputs()), other(**inputs()))
    assert model.plan(x=inputs()["x"]).captured.inputs[0].shape == (16, 16)
    assert not hasattr(other, "plan")


def test_the_decorator_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ArgumentError, match=r"unknown optimizer 'adan'; choose one of .* did you mean adam"):
        autopar.auto_parallel(cluster="2xcpu", optimizer="adan")
    with pytest.raises(ArgumentError, match=r"decorates an nn.Module class or an nn.Module, not int"):
        autopar.auto_parallel(3, cluster="2xcpu")

    class Planner(Net):
        def plan(self) -> None: ...

    with pytest.raises(ArgumentError, match=r"Planner has a plan of its own; use autopar.plan\(model"):
        autopar.auto_parallel(cluster="2xcpu")(Planner)
    with pytest.raises(ArgumentError, match="in processes that torchrun started"):
        autopar.auto_parallel(make(), cluster="2xcpu").distribute(inputs())


# On ranks


def _train(steps: int, model: nn.Module, example: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**example)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _decorated_training(cluster: str) -> tuple[list[float], list[str], int]:
    model = autopar.auto_parallel(make(seed=int(os.environ["RANK"])), cluster=cluster)
    assert model.distribute(inputs()) is model
    losses = _train(3, model, inputs(), torch.optim.SGD(model.parameters(), lr=0.1))
    names = list(model.state_dict())
    return losses, names, sum(local_tensor(p.data).numel() for p in model.parameters())


def test_a_decorated_model_trains_on_ranks_as_in_one_process() -> None:
    """It plans for the two processes there are, although the cluster named has eight; rank 0's weights count."""
    one = make()
    expected = _train(3, one, inputs(), torch.optim.SGD(one.parameters(), lr=0.1))
    for losses, names, _ in ranks(2).run(_decorated_training, "8xcpu"):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert names == list(one.state_dict())


def _first_call() -> float:
    model = autopar.auto_parallel(make(), cluster="2xcpu")
    loss: float = model(**inputs()).item()
    assert all(hasattr(p, MARK) for p in model.parameters())
    return loss


def test_the_first_call_is_enough() -> None:
    assert ranks(2).run(_first_call) == pytest.approx([make()(**inputs()).item()] * 2, rel=1e-5)


def _early_optimizer() -> str:
    model = autopar.auto_parallel(make(), cluster="2xcpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((OptimizerError, RankError)) as caught:
        model(**inputs())
    del optimizer
    return str(caught.value)


def test_an_optimizer_made_too_early_is_an_error_on_every_rank() -> None:
    for message in ranks(2).run(_early_optimizer):
        assert "call model.distribute(example_inputs) first, then make the optimizer" in message


def _different_models() -> str:
    model = autopar.auto_parallel(make(width=16 + 16 * int(os.environ["RANK"])), cluster="2xcpu")
    with pytest.raises(RankError) as caught:
        model(**inputs(width=16 + 16 * int(os.environ["RANK"])))
    return str(caught.value)


def test_ranks_with_different_models_are_an_error_on_every_rank() -> None:
    for message in ranks(2).run(_different_models):
        assert "ranks differ in parameters" in message and "give every rank the same model" in message


def _batch_of_the_decorator() -> str:
    model = autopar.auto_parallel(make(), cluster="2xcpu", global_batch=16)
    with pytest.raises((BatchError, RankError)) as caught:
        model(**inputs(8))
    return str(caught.value)


def test_a_call_with_another_batch_than_the_decorators_is_an_error() -> None:
    for message in ranks(2).run(_batch_of_the_decorator):
        assert "names global batch 16, the call has 8 samples" in message


def _planning_fails() -> str:
    model = autopar.auto_parallel(make(), cluster="2xcpu", memory_gb=1e-9)
    with pytest.raises(InfeasibleError) as caught:
        model(**inputs())
    return str(caught.value)


def test_rank_0s_error_is_everyones() -> None:
    first, second = ranks(2).run(_planning_fails)
    assert first == second


def _distributed(text: str, steps: int) -> list[float]:
    from autopar.api.model_plan import plan_from_text

    model = make()
    module = autopar.distribute(model, plan_from_text(text))
    return _train(steps, module, inputs(), torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize("baseline", ["ddp", "fsdp", None])
def test_a_saved_plan_distributes_a_model(baseline: str | None) -> None:
    one = make()
    expected = _train(3, one, inputs(), torch.optim.SGD(one.parameters(), lr=0.1))
    text = quick(make(), inputs(), baseline=baseline).to_json()
    for losses in ranks(2).run(_distributed, text, 3):
        assert losses == pytest.approx(expected, rel=1e-5)


def _world_mismatch(text: str) -> str:
    from autopar.api.model_plan import plan_from_text

    with pytest.raises((MeshError, RankError)) as caught:
        autopar.distribute(make(), plan_from_text(text))
    return str(caught.value)


def test_a_plan_for_another_number_of_processes_is_an_error() -> None:
    text = quick(make(), inputs(), cluster="4xcpu", baseline="ddp").to_json()
    for message in ranks(2).run(_world_mismatch, text):
        assert "4 ranks but 2 processes were started" in message
