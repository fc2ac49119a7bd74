"""A random strategy for every node: loss, every gradient on every rank and every byte as in one process.

The real test of rules and passes: whatever the search may choose, the rewritten graph must compute the model. With
dropout, masks are drawn for whole tensors on both sides, so that they are compared too.
"""

import random

import pytest
import torch

from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.lower import emit as emitting
from autopar.search.known.random_plan import random_plan
from autopar.values.mesh import make_mesh
from tests.plans_in_threads import errors_of, one_process
from tests.search_cases import exact_of
from tests.zoo import FAMILIES, zoo

MESHES = ((4,), (2, 2), (2, 2, 2))
NUM_PLANS = {0.0: 3, 0.1: 2}
"""By the rate of dropout: every mesh once, and those of four ranks. `benchmarks/verify_families.py` draws more."""


@pytest.mark.parametrize(
    ("family", "dropout"),
    [*((family, 0.0) for family in FAMILIES[1::2]), *((family, 0.1) for family in FAMILIES[::2])],
)
def test_random_plans_equal_one_process(family: str, dropout: float) -> None:
    model, kwargs = zoo(family, dtype=torch.float64, dropout=dropout)
    captured = exact_of(family, dropout)
    reference = one_process(captured, model, kwargs)
    rng = random.Random(f"{family} {dropout}")
    for number in range(NUM_PLANS[dropout]):
        plan = random_plan(captured, make_mesh(MESHES[number % len(MESHES)]), rng)
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {parameter} off by {gradient_error}"


def test_a_wrong_layout_is_refused_and_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: stored Replicate instead of Invariant, gradients are summands and the check says so."""
    from dataclasses import replace

    from autopar.values.placement import REPLICATE, Layout

    model, kwargs = zoo("bert", dtype=torch.float64)
    captured = exact_of("bert")
    reference = one_process(captured, model, kwargs)
    mesh = make_mesh((2,))
    choices = {
        node.name: ("dim0",) if "linear" in node.name else ("replicate",)
        for node in captured.graph.nodes
        if node.op == "call_function"
    }
    plan = random_plan(captured, mesh, random.Random(0))
    whole = {name: Layout((REPLICATE,)) for name in plan.layouts}
    wrong = replace(plan, choices=choices, layouts=whole)
    with pytest.raises(PlanMismatchError, match="the gradient of a Replicate parameter is never summed"):
        errors_of(reference, wrong)
    monkeypatch.setattr(emitting, "check_legal", lambda program, plan: None)
    _, gradient_error, _ = errors_of(reference, wrong)
    assert gradient_error > 1e-3


class Twice(torch.nn.Module):
    """A batch norm that runs twice a step: what it counts the first time it is given the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(x.roll(1, 1)) - self.layers(x)).square().mean()
        return loss


def test_no_collective_is_predicted_for_gradients_of_running_statistics() -> None:
    model, x = Twice().double(), torch.randn(8, 4, dtype=torch.float64)
    captured = capture(model, (x,))
    reference = one_process(captured, model, {"0": x})
    rng = random.Random(1)
    for _ in range(4):
        loss_error, gradient_error, _ = errors_of(reference, random_plan(captured, make_mesh((2, 2)), rng))
        assert loss_error <= 1e-10 and gradient_error <= 1e-8
