"""A module that nobody holds any more leaves memory, gradients and all; hooks of autograd are held where no collector
looks, and would keep what they hold."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import tests.runtime_cases as cases
from autopar.errors import ArgumentError
from autopar.ops.groups import use_groups
from autopar.runtime.accumulate import Prepared
from autopar.values.stage_plan import StagePlan
from tests.process_group import ranks


def forgotten(plan: StagePlan) -> tuple[int, int, int]:
    """How many parameters there were, how many are left, and how many sums of micro-batches."""
    module = cases.distributed(plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        if plan.microbatches > 1:
            module.train_step(cases.batch(step, cases.BATCH * plan.microbatches))
        else:
            module(**cases.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    leaves: list[Tensor] = list(module.state.stored.values())
    held = [weakref.ref(tensor) for tensor in (*module.parameters(), *leaves)]
    del module, optimizer, leaves
    gc.collect()
    left = sum(reference() is not None for reference in held)
    return len(held), left, sum(isinstance(thing, Prepared) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("stored", "lifetime", "count"),
    [("whole", "always", 1), ("split", "use", 1), ("split", "always", 1), ("split", "step", 2), ("whole", "always", 2)],
)
def test_what_a_module_held_is_let_go(stored: str, lifetime: str, count: int) -> None:
    plan = cases.data_parallel((2,), stored, lifetime, microbatches=count)
    for there, left, sums in ranks(2).run(forgotten, plan):
        assert there > 0 and left == 0 and sums == 0


def unfinished() -> tuple[int, int]:
    """Leaves and sums that are left of micro-batches whose gradients nobody took."""
    module = cases.distributed(cases.data_parallel((2,), "split", "step", microbatches=2))
    wide = {name: torch.float64 for name, leaf in module.state.stored.items() if leaf.requires_grad}
    accumulator = module._accumulator(module.local.captured.accumulation)  # type: ignore[arg-type]
    with use_groups(module.groups):
        accumulator.masters = wide
        prepared = accumulator.prepare(module.state.leaves)
    assert wide and prepared.used
    held = [weakref.ref(leaf) for leaf in prepared.used.values() if leaf.requires_grad]
    del prepared
    gc.collect()
    return sum(reference() is not None for reference in held), len(held)


def test_sums_that_nobody_takes_are_let_go() -> None:
    for left, there in ranks(2).run(unfinished):
        assert there > 0 and left == 0


def backward_without_a_module() -> str:
    loss = cases.distributed(cases.data_parallel((2,), "whole", "always"))(**cases.batch(0)).loss
    gc.collect()
    try:
        loss.backward()
    except ArgumentError as error:
        return str(error)
    return ""


def test_a_gradient_that_has_nowhere_to_go_is_an_error() -> None:
    assert all("let go before backward" in said for said in ranks(2).run(backward_without_a_module))
