"""Accelerate's loop over a planned model is Accelerate's loop over the model."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import ArgumentError, OptimizerError
from tests.process_group import ranks

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'autopar[integrations]'")

import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.accelerate import Accelerator
from autopar.integrations.refused import ACCELERATOR, refuse_precision
from examples.integrations import tiny as cases

ROWS, STEPS = cases.GLOBAL_BATCH // 2, 4
SEEDED = DataLoaderConfiguration(use_seedable_sampler=True)


def run(accelerator: Any, folder: str, world: int, first: int = 0) -> dict[str, Any]:
    """Train steps of two batches, with a save after the second, and evaluate.

    first: steps that were trained before; the plan then has micro-batches, whose call gives the loss.
    """
    torch.manual_seed(3)
    model = cases.tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, others = (
        DataLoader(cases.Words(4), ROWS // world, shuffle=True),
        DataLoader(cases.Words(1), 6 // world),
    )
    model, optimizer, rows, others = accelerator.prepare(model, optimizer, rows, others)
    if first:
        accelerator.load_state(folder)
        rows = accelerator.skip_first_batches(rows, 2 * first)
    losses, norms = [], []
    for number, (tokens, labels) in enumerate(rows, start=2 * first + 1):
        with accelerator.accumulate(model):
            loss = model(tokens, labels) if first else cases.loss_of(model(tokens), labels)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        if number == STEPS:
            accelerator.save_state(folder)
    model.eval()
    guessed = []
    for tokens, labels in others:
        with torch.no_grad():
            guesses = accelerator.gather_for_metrics(model(tokens).argmax(-1))
        guessed.append((guesses, accelerator.gather_for_metrics(labels), accelerator.gather_for_metrics([len(labels)])))
    held = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "hits": [float((a == b).sum()) for a, b, _ in guessed],
        "rows": [len(a) for a, _, _ in guessed],
        "said": [len(c) for _, _, c in guessed],
        "state": {name: value.clone() for name, value in held.items()},
        "loaders": (len(rows), len(others)),
    }


def fresh() -> None:
    """Forget what an Accelerator of another test left in the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def on_rank(folder: str, plans: list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = []
        for number, plan in enumerate(plans):
            fresh()
            options = {"gradient_accumulation_steps": 2, "dataloader_config": SEEDED}
            accelerator = Accelerator(plan=plan, distribute={"loss_fn": cases.loss_fn}, **options)
            found.append(run(accelerator, folder, 2, first=2 * number))
        return found


def test_a_run_is_that_of_accelerate_alone_and_goes_on_in_micro_batches(tmp_path: Path) -> None:
    fresh()
    alone = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=SEEDED)
    expected = run(alone, str(tmp_path / "alone"), 1)
    plans = []
    for parts in (1, 2):
        given = [value[:ROWS] for value in cases.example_batch()]
        how = {"cluster": "2xcpu", "baseline": "fsdp", "microbatches": parts, "check": False}
        plans.append(str(tmp_path / f"{parts}.json"))
        autopar.plan(cases.tiny(), tuple(given), loss_fn=cases.loss_fn, **how).save(plans[-1])
    (whole, resumed), (other, _) = ranks(2).run(on_rank, str(tmp_path / "ranks"), plans)
    assert whole["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    assert resumed["losses"] == pytest.approx(expected["losses"][STEPS:], abs=1e-6)
    assert whole["norms"] == pytest.approx(expected["norms"], abs=1e-6)
    assert resumed["norms"] == pytest.approx(expected["norms"][2:], abs=1e-6)
    for name in ("hits", "rows", "loaders"):
        assert whole[name] == expected[name], name
    assert resumed["hits"] == expected["hits"]
    assert whole["rows"] == [6, 2]
    assert whole["said"] == [2, 2], "what has no row for each sample is gathered from all ranks"
    assert not other["state"], "the main process has the whole state dict"
    for found in (whole, resumed):
        assert list(found["state"]) == list(expected["state"])
        for name, value in found["state"].items():
            assert torch.allclose(value, expected["state"][name], atol=1e-5), name


@pytest.mark.parametrize("name", sorted(ACCELERATOR))
def test_options_that_the_plan_decides_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"Accelerator\({name}=...\) with a plan: "):
        Accelerator(plan="unread.json", **{name: object()})


def test_other_options_are_refused_where_they_do_not_fit() -> None:
    hooked = DistributedDataParallelKwargs(comm_hook="fp16")
    with pytest.raises(ArgumentError, match=r"comm_hook=.*which sends gradients itself"):
        Accelerator(plan="unread.json", kwargs_handlers=[hooked])
    fp32, mixed = (SimpleNamespace(config=SimpleNamespace(precision=name)) for name in ("fp32", "bf16-mixed"))
    for asked, plan in (("no", fp32), ("no", mixed), ("bf16", mixed)):
        refuse_precision(asked, plan)
    with pytest.raises(ArgumentError, match="the plan computes in fp32"):
        refuse_precision("bf16", fp32)
    with pytest.raises(ArgumentError, match="fp16 is asked for, and a plan has no loss scaling"):
        refuse_precision("fp16", mixed)


def refusals_on_rank(plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh()
        with pytest.raises(ArgumentError, match="dispatch_batches=True"):
            Accelerator(plan=plan, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        fresh()
        accelerator = Accelerator(plan=plan, distribute={"loss_fn": cases.loss_fn})
        model = accelerator.prepare(cases.tiny())
        with pytest.raises(ArgumentError, match="has prepared a Tiny, and its plan is of one model"):
            accelerator.prepare(torch.nn.Linear(2, 2))
        with pytest.raises(OptimizerError, match="parameters that the distributed model does not have"):
            accelerator.prepare(torch.optim.SGD(cases.tiny().parameters(), lr=0.1))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(OptimizerError, match="there are 2 optimizers"):
            accelerator.prepare(optimizer, torch.optim.SGD(model.parameters(), lr=0.1))
        for register in (accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook):
            with pytest.raises(ArgumentError, match="each rank's part of the model"):
                register(print)
        with pytest.raises(ArgumentError, match="was given no folder"):
            accelerator.load_state()
        with pytest.raises(ArgumentError, match="an Accelerator with a plan did not write it"):
            accelerator.load_state(str(Path(plan).parent))


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    plan = autopar.plan(cases.tiny(), cases.example_batch(), cluster="2xcpu", baseline="ddp", loss_fn=cases.loss_fn)
    plan.save(tmp_path / "plan.json")
    ranks(2).run(refusals_on_rank, str(tmp_path / "plan.json"))
