"""The decorator takes what `autopar.plan` takes: micro-batches, pipelines, meshes to search, named configurations."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from test_api import inputs, make

import autopar
from autopar.decorator import OPTIONS
from autopar.errors import ArgumentError
from autopar.staged_model_plan import StagedModelPlan
from tests.process_group import ranks

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
    assert isinstance(made, StagedModelPlan) and (made.pipeline, made.microbatches) == (2, 2)
    assert made.config.precision == "fp64"
    other = autopar.auto_parallel(make(), cluster="2xcpu", microbatches=4, mesh="2").plan(inputs(BATCH))
    assert other.microbatches == 4
    searched = autopar.auto_parallel(make(), cluster="2xcpu", mesh="auto", pipeline=1, microbatches=1)
    assert searched.plan(inputs(BATCH)).estimate.solver["search"]
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
