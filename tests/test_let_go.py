"""A module that nobody holds any more leaves memory, gradients and all; hooks of autograd are held where no collector
looks, and would keep what they hold."""

import gc
import weakref

import pytest
import runtime_cases as cases
import torch
from process_group import ranks
from torch import Tensor

from autopar.plan import Plan
from autopar.runtime.accumulate import Prepared


def forgotten(plan: Plan) -> tuple[int, int, int]:
    """How many parameters there were, how many are left, and how many sums of micro-batches."""
    module = cases.distributed(plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        if plan.microbatches > 1:
            module.train_step(cases.batch(step))
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
