"""`train_step` is what one process does with the same micro-batches: losses, states, bytes; and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.runtime_cases as cases
from autopar.errors import ArgumentError, BatchError
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.runtime import DistributedBatchSampler, LocalBatch, count_messages
from autopar.values.placement import Layout, Shard
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks

STEPS = 2


def whole_batch(step: int, count: int) -> dict[str, Tensor]:
    """The global batch of `count` micro-batches, labels ignored unevenly."""
    data = cases.batch(step, count * cases.BATCH)
    for row in range(len(data["labels"])):
        data["labels"][row, : row * 3 // len(data["labels"])] = -100
    return data


def train_whole(count: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process: each micro-batch's mean weighs as many labels as count in it."""
    model = cases.words(microbatches=count)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(STEPS):
        data = whole_batch(step, count)
        total = int((data["labels"] != -100).sum())
        loss = 0.0
        for ids, labels in zip(data["ids"].chunk(count), data["labels"].chunk(count), strict=True):
            part = model(ids, labels)["loss"] * int((labels != -100).sum()) / total
            part.backward()
            loss += float(part.detach())
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def train_distributed(plan: StagePlan) -> tuple[list[float], dict[str, Tensor], bool]:
    module = cases.distributed(plan)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    losses, same = [], True
    for step in range(STEPS):
        with count_messages(module) as sent:
            losses.append(float(module.train_step(whole_batch(step, plan.microbatches))))
        same &= sent == messages_of(module.local.captured, module.local.plan, on_host=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, cases.whole_state(module), same


PLANS = {
    "ddp": lambda mesh, count: cases.data_parallel(mesh, "whole", microbatches=count),
    **{
        lifetime: (lambda mesh, count, v=lifetime: cases.data_parallel(mesh, lifetime=v, microbatches=count))
        for lifetime in ("step", "microbatch", "use")
    },
    "recomputed": lambda mesh, count: cases.recomputed(
        cases.data_parallel(mesh, lifetime="step", microbatches=count), 0.6
    ),
    **{
        f"random{seed}": (lambda mesh, count, seed=seed: cases.some_plan(mesh, seed, microbatches=count))
        for seed in range(3)
    },
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_in_micro_batches_equals_one_process(plan: str) -> None:
    """Every other plan on two ranks, the rest on two by two."""
    mesh, count = (((2, 2), 4), ((2,), 2))[list(PLANS).index(plan) % 2]
    losses, state = train_whole(count)
    world = 2 ** len(mesh)
    for got_losses, got_state, bytes_as_said in ranks(world).run(train_distributed, PLANS[plan](mesh, count)):
        assert bytes_as_said
        assert got_losses == pytest.approx(losses, rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(got_state[name], value, rtol=1e-8, atol=1e-9, msg=name)


def calls(plan: StagePlan) -> dict[str, int]:
    local = cases.distributed(plan).local
    sent = messages_of(local.captured, local.plan, on_host=True)
    return {kind: sum(n for (k, _), (n, _) in sent.items() if k == kind) for kind in ("all_gather", "reduce_scatter")}


def test_collectives_of_a_lifetime_are_paid_once_a_step_or_once_a_micro_batch() -> None:
    sent = {v: ranks(2).run(calls, PLANS[v]((2,), 4))[0] for v in ("step", "microbatch", "use")}
    assert sent["microbatch"]["all_gather"] == 4 * sent["step"]["all_gather"] > 0
    assert sent["microbatch"]["reduce_scatter"] == 4 * sent["step"]["reduce_scatter"] > 0
    assert sent["use"]["all_gather"] > sent["microbatch"]["all_gather"]
    assert sent["use"]["reduce_scatter"] == sent["microbatch"]["reduce_scatter"]


def gradients_add_up(plan: StagePlan) -> None:
    """Two steps without zero_grad add; a step of the rank's own slices is the same; evaluation has the step's loss."""
    module = cases.distributed(plan)
    data = whole_batch(1, plan.microbatches)
    first = module.train_step(data)
    once = {p.placeholder: module.local_gradient(p.placeholder) for p in module.local.captured.parameters}
    once = {name: g.clone() for name, g in once.items() if g is not None}
    again = module.train_step(module.local_batch(data))
    assert float(again) == pytest.approx(float(first), rel=1e-12)
    for name, gradient in once.items():
        torch.testing.assert_close(module.local_gradient(name), 2 * gradient, rtol=1e-10, atol=1e-12)
    assert not first.requires_grad and all(leaf.grad is None for leaf in module.state.leaves.values())
    with torch.no_grad():
        assert module(**data).item() == pytest.approx(float(first), rel=1e-12)
    with pytest.raises(ArgumentError, match="train_step"):
        module(**data)
    with pytest.raises(BatchError, match="ids has 9 samples, which 2 micro-batches"):
        module.train_step(cases.batch(1, 9))
    with pytest.raises(BatchError, match=r"\(2, 4\) in each of 2 parts.*micro-batch \(8, 4\)"):
        module.train_step(cases.batch(1, 4))


@pytest.mark.parametrize("lifetime", ["step", "use"])
def test_steps_add_to_gradients_and_take_slices(lifetime: str) -> None:
    ranks(2).run(gradients_add_up, PLANS[lifetime]((2,), 2))


def sampled(plan: StagePlan) -> tuple[float, float]:
    """Loading only a rank's rows is the same step."""
    module = cases.distributed(plan)
    data = whole_batch(3, plan.microbatches)
    rows = next(iter(DistributedBatchSampler(range(len(data["ids"])), module, shuffle=False)))
    assert len(rows) == len(data["ids"]) // 2
    return float(module.train_step(data)), float(module.train_step(LocalBatch({k: v[rows] for k, v in data.items()})))


def test_the_sampler_gives_rows_micro_batch_after_micro_batch() -> None:
    for whole, own in ranks(2).run(sampled, PLANS["step"]((2,), 2)):
        assert own == pytest.approx(whole, rel=1e-12)


def exported(folder: str) -> tuple[float, float, bool]:
    import importlib.util

    from autopar.runtime import load_exported

    spec = importlib.util.spec_from_file_location("exported_model", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["exported_model"] = code
    spec.loader.exec_module(code)
    model = dict(cases.words().named_parameters())
    own = load_exported(folder, [code.forward], lambda name, shape, dtype: model[name].detach())
    from autopar.values.plan_file import load_plan

    module = cases.distributed(load_plan(Path(folder) / "plan.json").single)
    data = whole_batch(2, module.plan.microbatches)
    with count_messages(own) as sent:
        loss = float(own.train_step(data))
    expected = float(module.train_step(data))
    for spec_ in module.local.captured.parameters:
        got, want = own.local_gradient(spec_.placeholder), module.local_gradient(spec_.placeholder)
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    return loss, expected, sent == messages_of(module.local.captured, module.local.plan, on_host=True)


@pytest.mark.parametrize("plan", ["step", "use", "recomputed", "random1"])
def test_exported_code_trains_in_micro_batches(plan: str, tmp_path: Path) -> None:
    from autopar.export.folder import export_folder
    from autopar.oracle.reference import buffers_of

    made: StagePlan = PLANS[plan]((2,), 2)
    captured = cases.captured(microbatches=2)
    local = emit(captured, made)
    export_folder(tmp_path, captured, [local], one_stage(made), buffers_of(captured, cases.words(microbatches=2)))
    assert "module.train_step(batch)" in (tmp_path / "train.py").read_text()
    assert f"({2 * cases.BATCH}, {cases.LENGTH})" in (tmp_path / "train.py").read_text()
    for loss, expected, bytes_as_said in ranks(2).run(exported, str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert bytes_as_said


def one_batch(plan: StagePlan) -> Any:
    module = cases.distributed(plan)
    loss = module.train_step(cases.batch(1))
    other = cases.distributed(plan)
    other(**cases.batch(1)).backward()
    for spec in module.local.captured.parameters:
        got, want = module.local_gradient(spec.placeholder), other.local_gradient(spec.placeholder)
        assert (got is None and want is None) or torch.equal(got, want)
    return float(loss), module(**cases.batch(1)).item()


def test_a_step_of_one_batch_is_a_call() -> None:
    plan = cases.data_parallel((2,))
    assert isinstance(next(iter(plan.layouts.values())), Layout) and Shard(0) in next(iter(plan.layouts.values())).axes
    for loss, called in ranks(2).run(one_batch, plan):
        assert loss == pytest.approx(called, rel=1e-12)
