"""Training saved under one plan goes on under another, on another number of ranks, as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tests.runtime_cases as cases
from autopar.errors import CheckpointError, OptimizerError
from autopar.runtime import load, save
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks

State = dict[str, Tensor]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    output = model(**cases.batch(seed))
    (output["loss"] if isinstance(output, dict) else output.loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        cases.whole(value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def train_and_save(plan: StagePlan, folder: str) -> None:
    module = cases.distributed(plan)
    optimizer = adamw(module)
    for seed in range(2):
        step(module, optimizer, seed)
    save(module, optimizer, folder, step=2)


def load_and_train(plan: StagePlan, folder: str) -> tuple[State, list[Tensor], State, int]:
    module = cases.distributed(plan)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    optimizer = adamw(module)
    load(module, optimizer, folder)
    loaded, held = cases.whole_state(module), moments(optimizer)
    for parameter, held_of_it in optimizer.state.items():
        kinds = {isinstance(value, DTensor) for name, value in held_of_it.items() if name != "step"}
        assert kinds == {isinstance(parameter, DTensor)}
    step(module, optimizer, 2)
    return loaded, held, cases.whole_state(module), module.num_calls


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (cases.data_parallel((2, 2)), cases.data_parallel((2,), "whole")),
        (cases.some_plan((2, 2), 1), cases.some_plan((2,), 2)),
        (cases.some_plan((2,), 3), cases.some_plan((4,), 4)),
    ],
    ids=["zero3 on 4 to ddp on 2", "random on 2x2 to random on 2", "random on 2 to random on 4"],
)
def test_another_plan_and_another_number_of_ranks(saved: StagePlan, loaded: StagePlan, tmp_path: Path) -> None:
    model = cases.words()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed)
    before, held = {k: v.clone() for k, v in model.state_dict().items()}, moments(optimizer)
    step(model, optimizer, 2)
    ranks(saved.mesh.size).run(train_and_save, saved, str(tmp_path))
    for got, got_held, after, num_calls in ranks(loaded.mesh.size).run(load_and_train, loaded, str(tmp_path)):
        for name, value in before.items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-8, msg=name)
        for got_moment, moment in zip(got_held, held, strict=True):
            torch.testing.assert_close(got_moment, moment, rtol=1e-8, atol=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(after[name], value, rtol=1e-8, atol=1e-8, msg=name)
        assert num_calls == 3


def bad_calls(plan: StagePlan, folder: str) -> None:
    module = cases.distributed(plan)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(module, adamw(module), folder)
    with pytest.raises(OptimizerError, match="Adafactor"):
        save(module, torch.optim.Adafactor(module.parameters()), folder, step=0)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    ranks(2).run(bad_calls, cases.data_parallel((2,)), str(tmp_path / "nothing"))
