"""The decorator takes what `autopar.plan` takes: micro-batches, pipelines, meshes to search, named configurations."""

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_api import inputs, make

import autopar
from autopar.api.decorator import OPTIONS
from autopar.errors import ArgumentError
from autopar.runtime import load, save
from tests.process_group import ranks
from tests.runtime_cases import whole

STEPS = 2
BATCH = 8


def test_keywords_are_those_of_plan() -> None:
    keywords = [n for n, p in inspect.signature(autopar.plan).parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert set(OPTIONS) == set(keywords) - {"args", "kwargs"} and "microbatches" in OPTIONS
    with pytest.raises(
        ArgumentError, match=r"unknown keyword 'microbatch'; choose one of .* did you mean microbatches"
    ):
        autopar.auto_parallel(make(), cluster="2xcpu", microbatch=2)
    with pytest.raises(ArgumentError, match="unknown keyword 'args'"):
        autopar.auto_parallel(make(), cluster="2xcpu", args=())


def test_what_is_asked_is_planned() -> None:
    model = autopar.auto_parallel(make(), cluster="2xcpu", baseline="ddp:pp=2,mbs=4", precision="fp64")
    made = model.plan(inputs(BATCH))
    assert (made.pipeline, made.microbatches) == (2, 2)
    assert made.config.precision == "fp64"
    other = autopar.auto_parallel(make(), cluster="2xcpu", microbatches=4, mesh="2").plan(inputs(BATCH))
    assert other.microbatches == 4
    searched = autopar.auto_parallel(make(), cluster="2xcpu", mesh="auto", pipeline=1, microbatches=1)
    assert searched.plan(inputs(BATCH)).estimate.search.space
    with pytest.raises(ArgumentError, match="train_step works in processes that torchrun started"):
        model.train_step(inputs(BATCH))


def train(model: Any, step: Any) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(step(inputs(BATCH))))
        norms.append(float(model.clip_grad_norm_(0.01)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def decorated(options: dict[str, Any]) -> tuple[list[float], list[float], str]:
    model = autopar.auto_parallel(make(), cluster="8xcpu", global_batch=BATCH, **options)
    model.distribute(inputs(BATCH))
    losses, norms = train(model, model.train_step)
    if "pp=2" in options["baseline"]:
        with pytest.raises(ArgumentError, match=r"call module.train_step"):
            model(**inputs(BATCH))
    return losses, norms, type(model.__dict__["_autopar_module"]).__name__


def one_process() -> tuple[list[float], list[float]]:
    model = make()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch)
        loss.backward()
        return loss.detach()

    model.clip_grad_norm_ = partial(_clip, model)
    return train(model, step)


def _clip(model: torch.nn.Module, norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"baseline": "ddp", "microbatches": 4}, "DistributedModule"),
        ({"baseline": "ddp:pp=2,mbs=4"}, "PipelinedModule"),
        ({"baseline": "fsdp:zero=2,mbs=1"}, "DistributedModule"),
    ],
)
def test_a_decorated_model_trains_as_in_one_process(options: dict[str, Any], kind: str) -> None:
    losses, norms = one_process()
    for answer in ranks(2).run(decorated, options):
        assert answer[0] == pytest.approx(losses, rel=1e-5)
        assert answer[1] == pytest.approx(norms, rel=1e-4)
        assert answer[2] == kind


def used(folder: str) -> None:
    """What scripts do with a model, after it was distributed."""
    model = autopar.auto_parallel(make(), cluster="2xcpu", baseline="fsdp", with_baselines=False)
    eager = make()
    loss = model(**inputs(BATCH))
    loss.backward()
    eager(**inputs(BATCH)).backward()
    first = model.blocks[0]
    assert isinstance(first, torch.nn.Linear) and first.weight is dict(model.named_parameters())["blocks.0.weight"]
    torch.testing.assert_close(whole(first.weight.grad), eager.blocks[0].weight.grad)
    model.eval()
    eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(5)["x"]), eager(inputs(5)["x"]))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(average(inputs(5)["x"]), eager(inputs(5)["x"]))
        for parameter in eager.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(model(inputs(5)["x"]), eager(inputs(5)["x"]))
    torch.save(model.state_dict(), f"{folder}/{torch.distributed.get_rank()}.pt")
    save(model, None, f"{folder}/checkpoint", step=0)
    load(average, None, f"{folder}/checkpoint")
    for name, parameter in average.named_parameters():
        torch.testing.assert_close(whole(parameter), eager.get_parameter(name).detach())
    model.load_state_dict(make(seed=3).state_dict())
    torch.testing.assert_close(whole(model.blocks[1].weight), make(seed=3).blocks[1].weight.detach())
    other = make().state_dict()
    other.pop("blocks.0.bias")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(other)
    teacher = copy.deepcopy(model).requires_grad_(False)
    assert not teacher(**inputs(BATCH)).requires_grad and model(**inputs(BATCH)).requires_grad
    with pytest.raises(ArgumentError, match="leave DistributedDataParallel out"):
        torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ArgumentError, match="leave FSDP out"):
        torch.distributed.fsdp.fully_shard(model)
    with pytest.raises(ArgumentError, match=r"module\.compile"):
        torch.compile(model, backend="eager")
    seen: list[int] = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    model(**inputs(BATCH))
    assert seen == [1]
    handle.remove()
    first.register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="would never run"):
        model(**inputs(BATCH))


def test_a_decorated_model_is_used_as_before(tmp_path: Path) -> None:
    ranks(2).run(used, str(tmp_path))


def parts() -> None:
    """The parts of a distributed module are the model's, by type, and say what they do not do."""
    model = make(dropout=0.1)
    module = autopar.distribute(model, autopar.plan(model, inputs(BATCH), cluster="2xcpu", with_baselines=False))
    assert [n for n, _ in module.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(isinstance(part, type(model.get_submodule(n))) for n, part in module.named_modules() if n)
    dropout: Any = module.get_submodule("dropout")
    assert dropout.p == 0.1
    with pytest.raises(ArgumentError, match=r"Dropout.p was captured as 0.1"):
        dropout.p = 0.5
    with pytest.raises(ArgumentError, match="does not run alone"):
        dropout(torch.zeros(2))
    with pytest.raises(ArgumentError, match="would never run"):
        dropout.register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="forward takes"):
        module(inputs(BATCH)["x"], 3)


def test_parts_are_those_of_the_model() -> None:
    ranks(2).run(parts)


class Named(torch.nn.Module):
    """Parts that are called as methods of a distributed module are; copies are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step, self.state = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.0)
        self.copies = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.state(self.step(self.linear(x))).square().mean()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Named":
        made = Named()
        made.load_state_dict(self.state_dict())
        made.copies = self.copies + 1
        return made


def named() -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(4, 4)
    module = autopar.distribute(model, autopar.plan(model, x, cluster="2xcpu", with_baselines=False))
    torch.testing.assert_close(module(x), model(x))
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x[:3]), model.eval()(x[:3]))


def test_parts_may_be_called_as_methods_are() -> None:
    ranks(2).run(named)
    model = autopar.auto_parallel(Named(), cluster="2xcpu")
    assert copy.deepcopy(model).copies == 1
