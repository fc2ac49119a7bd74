"""Python that changes from call to call: harmless where the next graph is the same, refused by line where it is not."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.as_eager import assert_as_eager

WIDTH = 8


class Config:
    def __init__(self) -> None:
        self.calls = 0


class Net(nn.Module):
    def __init__(self, between: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.between = between
        self.step, self.size, self.notes = 0, 0, list[Any]()
        self.table: Any = None
        self.last: Any = None
        self.mean = torch.zeros(())
        self.config = Config()
        self.dice = random.Random(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.between(self, self.a(x)), y)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64), "y": torch.randn(8, WIDTH, dtype=torch.float64)}


def counts(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    own.notes.append(h.shape)
    own.size = h.shape[0]
    own.last = h
    own.config.calls += 1
    return h


def makes_a_table_once(own: Net, h: Tensor) -> Tensor:
    if own.table is None or own.size < h.shape[1]:
        own.table = torch.linspace(0, 1, WIDTH, dtype=torch.float64).sin()
        own.size = h.shape[1]
    return h * own.table  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", [counts, makes_a_table_once])
def test_notes_and_constants_made_once_are_harmless_and_the_model_is_left_alone(between: Any) -> None:
    own = Net(between).double()
    before = {name: value for name, value in vars(own).items() if name != "notes"}
    assert_as_eager(own, inputs())
    assert {name: value for name, value in vars(own).items() if name != "notes"} == before
    assert own.notes == [] and own.config.calls == 0


def turns_later(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * 2 if own.step > 5_000 else h


def scales_by_step(own: Net, h: Tensor) -> Tensor:
    own.step += 1
    return h * min(1.0, own.step / 3)


def grows(own: Net, h: Tensor) -> Tensor:
    own.notes.append(1)
    return h * len(own.notes)


def averages(own: Net, h: Tensor) -> Tensor:
    h = h - own.mean
    own.mean = 0.5 * own.mean + 0.5 * h.detach().mean()
    return h


def counts_in_config(own: Net, h: Tensor) -> Tensor:
    own.config.calls += 1
    return h * own.config.calls


def own_dice(own: Net, h: Tensor) -> Tensor:
    return h * own.dice.random()


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (scales_by_step, "Net.step"),
        (turns_later, "Net.step"),
        (grows, "Net.notes"),
        (averages, "Net.mean"),
        (counts_in_config, "Net.config"),
        (own_dice, "Net.dice"),
    ],
)
def test_state_that_the_next_call_reads_is_refused_by_name(between: Any, name: str) -> None:
    own = Net(between).double()
    with pytest.raises(CaptureError, match=name):
        capture(own, (), inputs())
    assert own.step == own.config.calls == 0 and own.notes == [] and own.mean.item() == 0
    assert own.dice.random() == random.Random(0).random()


class Warm(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.step += 1  # STEP
        return super().forward(x, y) * min(1.0, self.step / 3)


def test_the_line_that_changes_state_is_named() -> None:
    line = inspect.getsourcelines(Warm)[1] + 2
    with pytest.raises(CaptureError, match=rf"test_python_state\.py:{line}: Warm.step changes .*\(0, then 1\)"):
        capture(Warm(lambda own, h: h).double(), (), inputs())


def draws_by_python(own: Net, h: Tensor) -> Tensor:
    return h if random.random() < 0.5 else h * 2


def draws_by_numpy(own: Net, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


@pytest.mark.parametrize("between", [draws_by_python, draws_by_numpy])
def test_numbers_drawn_outside_torch_are_refused_by_line(between: Any) -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    line = inspect.getsourcelines(between)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_python_state\.py:{line}: forward draws from (Python|NumPy)'s"):
        capture(Net(between).double(), (), inputs())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
