"""A run that is saved, ends and goes on in new processes is the run that did not end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import tests.runtime_cases as cases
from autopar.errors import ArgumentError, CheckpointError, PlanMismatchError
from autopar.runtime import finish_saving, init, latest, load, save
from autopar.values.stage_plan import StagePlan
from tests.checkpoint_cases import Run
from tests.process_group import ranks, run_apart

HALF = 6
"""Steps of each half; an epoch has 4."""


def whole_run(plan: StagePlan, root: str, dropout: float, asynchronous: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the second half and the state at its end, saved in between."""
    run = Run(plan, dropout)
    run.seed(3)
    run.train(HALF)
    save(run.module, run.optimizer, root, step=HALF, asynchronous=asynchronous, **run.kept)
    losses = run.train(HALF)
    finish_saving()
    return losses, run.state()


def second_half(plan: StagePlan, root: str, dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(plan, dropout)
    run.seed(99)
    assert latest(root) == HALF
    loaded = load(run.module, run.optimizer, root, **run.kept)
    assert loaded.step == HALF and loaded.folder == Path(root) / "step-00000006"
    return run.train(HALF), run.state()


def in_new_process(tell: Any, plan: StagePlan, root: str, dropout: float) -> None:
    init()
    losses, state = second_half(plan, root, dropout)
    tell((losses, {name: value.tolist() for name, value in state.items()}))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_under_the_same_plan_bit_for_bit(asynchronous: bool, tmp_path: Path) -> None:
    plan, dropout = cases.data_parallel((2,)), 0.0 if asynchronous else 0.25
    if dropout:
        plan = cases.some_plan((2,), 3, dropout=dropout)
    wanted = ranks(2).run(whole_run, plan, str(tmp_path), dropout, asynchronous)
    for (losses, state), (code, told) in zip(
        wanted, run_apart(2, in_new_process, plan, str(tmp_path), dropout), strict=True
    ):
        assert code == 0
        assert told[0] == losses
        assert told[1] == {name: value.tolist() for name, value in state.items()}


def test_under_another_plan_and_number_of_ranks(tmp_path: Path) -> None:
    (losses, state), *_ = ranks(2).run(whole_run, cases.data_parallel((2,)), str(tmp_path), 0.0, False)
    for other, found in ranks(4).run(second_half, cases.data_parallel((2, 2)), str(tmp_path), 0.0):
        assert other == pytest.approx(losses, rel=1e-8)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


def from_the_beginning(root: str, stale: bool) -> list[list[float]]:
    """Losses of a run that is not saved, of one that is before its first step, and of one that goes on from there.

    stale: the module that goes on has gradients and optimizer state of its own by then.
    """

    def trained(run: Run) -> list[float]:
        run.seed(5)
        return run.train(HALF)

    plain, saved, other = Run(), Run(), Run()
    save(saved.module, saved.optimizer, root, step=0, **saved.kept)
    assert not saved.optimizer.state, "saving makes no step"
    if stale:
        other.train(1)
        other.module(**cases.batch(9)).backward()
    load(other.module, other.optimizer, root, **other.kept)
    other.optimizer.zero_grad()
    other.coming = None
    return [trained(plain), trained(saved), trained(other)]


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
def test_a_save_before_the_first_step_changes_nothing(stale: bool, tmp_path: Path) -> None:
    for plain, saved, other in ranks(2).run(from_the_beginning, str(tmp_path), stale):
        assert saved == plain and other == plain


def with_frozen(root: str) -> tuple[list[str], list[str]]:
    """Names of parameters that have optimizer state: where one was frozen when it was saved, and loaded thawed."""
    run, other = Run(), Run()
    first, *_ = run.module.parameters()
    first.requires_grad_(False)
    run.train(2)
    save(run.module, run.optimizer, root, step=2, **run.kept)
    load(other.module, other.optimizer, root, **other.kept)
    found = []
    for one in (run, other):
        names: dict[Tensor, str] = {parameter: name for name, parameter in one.module.named_parameters()}
        found.append(sorted(names[parameter] for parameter, state in one.optimizer.state.items() if state))
    other.train(1)
    return found[0], found[1]


def test_state_is_there_for_the_parameters_that_had_some(tmp_path: Path) -> None:
    for saved, loaded in ranks(2).run(with_frozen, str(tmp_path)):
        assert saved == loaded and len(saved) > 1


class Position:
    """A loader of this rank's rows, whose place is its own."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def save_places(plan: StagePlan, root: str) -> int:
    run = Run(plan)
    place = Position(10 + run.data.start)
    save(run.module, run.optimizer, root, step=1, data=place)
    return place.place


def load_places(plan: StagePlan, root: str) -> int:
    run = Run(plan)
    place = Position()
    load(run.module, run.optimizer, root, data=place)
    return place.place - run.data.start


def no_place(plan: StagePlan, root: str) -> None:
    run = Run(plan)
    with pytest.raises(CheckpointError, match=r"none of them read the part of each batch.*leave data out"):
        load(run.module, run.optimizer, root, data=Position())


def test_each_rank_takes_the_position_of_one_that_read_the_same_rows(tmp_path: Path) -> None:
    """Of 2 ranks with half of the rows each, none read what one of 4 reads."""
    assert ranks(2).run(save_places, cases.data_parallel((2,)), str(tmp_path)) == [10, 14]
    assert ranks(2).run(load_places, cases.data_parallel((2,)), str(tmp_path)) == [10, 10]
    ranks(4).run(no_place, cases.data_parallel((2, 2)), str(tmp_path))


def asked_wrongly(plan: StagePlan, root: str) -> None:
    run = Run(plan)
    save(run.module, run.optimizer, root, step=1, scheduler=run.scheduler)
    with pytest.raises(CheckpointError, match="and data is asked for"):
        load(run.module, run.optimizer, root, **run.kept)
    with pytest.warns(UserWarning, match="holds scheduler, which load was not given"):
        load(run.module, run.optimizer, root)
    step = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    with pytest.raises(PlanMismatchError, match="scheduler CosineAnnealingLR, and a StepLR is given"):
        load(run.module, run.optimizer, root, scheduler=step)
    with pytest.raises(PlanMismatchError, match="optimizer AdamW, and a SGD"):
        load(run.module, torch.optim.SGD(run.module.parameters(), lr=0.1), root)
    with pytest.raises(ArgumentError, match="without its optimizer"):
        load(run.module, None, root, scheduler=run.scheduler)
    with pytest.raises(CheckpointError, match=r"no step 7 is below .*; there are 1"):
        load(run.module, run.optimizer, root, step=7)
    with pytest.raises(CheckpointError, match="holds step 1 and step 1 is to be saved"):
        save(run.module, run.optimizer, root, step=1)
    run.scheduler.__dict__["base_lrs"] = [object()]
    with pytest.raises(CheckpointError, match=r"scheduler.state_dict\(\)\['base_lrs'\]\[0\] is a builtins.object"):
        save(run.module, run.optimizer, root, step=2, scheduler=run.scheduler)
    assert latest(root) == 1


def test_what_a_checkpoint_does_not_hold_is_said(tmp_path: Path) -> None:
    ranks(2).run(asked_wrongly, cases.data_parallel((2,)), str(tmp_path))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.relu(layer(x)), 0.2, self.training)
        return x.square().mean()


def decorated(options: dict[str, Any], root: str) -> None:
    """A decorated model, in stages or whole, saved beside training: what is loaded goes on alike."""

    def begin(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = autopar.auto_parallel(Small(), cluster="2xcpu", global_batch=8, **options)
        model.distribute(torch.ones(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(float(model.train_step(torch.ones(8, 8))))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return losses

    model, optimizer, scheduler = begin(1)
    train(model, optimizer, scheduler)
    save(model, optimizer, root, step=2, scheduler=scheduler, asynchronous=True)
    wanted = train(model, optimizer, scheduler)
    other, optimizer, scheduler = begin(2)
    load(other, optimizer, root, scheduler=scheduler)
    assert train(other, optimizer, scheduler) == wanted
    for name, value in other.named_parameters():
        assert torch.equal(cases.whole(value), cases.whole(model.get_parameter(name)))


@pytest.mark.parametrize("baseline", ["fsdp", "ddp:pp=2,mbs=4"])
def test_decorated_models_whole_or_in_stages(baseline: str, tmp_path: Path) -> None:
    ranks(2).run(decorated, {"baseline": baseline}, str(tmp_path))
