"""No plan holds less than its share of one copy of all states, and what cannot hold them is told at once."""

import random

import pytest
import torch

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.lower.program import make_program
from autopar.search.costs.evaluate import evaluate
from autopar.search.costs.states import check_states, states_nbytes
from autopar.search.joint.mesh_search import search_meshes
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan
from autopar.search.search_options import SearchOptions
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine, program_of

FAMILIES = ("gpt2", "llama", "bert", "vit", "t5")


class Part(torch.nn.Module):
    """A parameter that is not trained, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(10, 4, bias=False)
        self.inner.requires_grad_(False)
        self.unread = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x).relu()).square().mean()
        return out


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 4), ("sgd", 2), ("sgd-momentum", 3)])
def test_states_are_counted_by_hand(optimizer: str, copies: int) -> None:
    program = make_program(capture(Part(), (torch.zeros(8, 6),)))
    assert states_nbytes(program, optimizer) == 4 * (60 + copies * 40 + 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_holds_less_than_an_even_share(family: str) -> None:
    captured, cluster, rng = captured_of(family), machine(), random.Random(3)
    least = states_nbytes(program_of(family), "adamw") / 4
    plans = [random_plan(captured, make_mesh((2, 2)), rng) for _ in range(10)]
    fsdp = make_baseline("fsdp", captured, cluster, make_mesh((4,)), TrainConfig())
    for plan in [*plans, fsdp]:
        assert evaluate(plan, captured, cluster).peak_nbytes >= least
    assert fsdp.estimate.peak_nbytes < 4 * least  # it says something: of two copies FSDP holds one


def test_what_cannot_hold_the_states_is_told_before_anything_is_planned() -> None:
    said: list[str] = []
    captured = captured_of("vit")
    total = states_nbytes(program_of("vit"), "adamw")

    def graph(batch: int | None) -> CapturedModel:
        return captured

    limit = total / 2.5
    with pytest.raises(InfeasibleError, match="use 3 devices or more") as caught:
        search_meshes(
            None,
            graph,
            machine(2),
            TrainConfig(memory_nbytes=limit),
            SearchOptions(relative_gap=0.01, tell=said.append),
        )
    assert caught.value.least_nbytes == total / 2 and not said
    check_states(program_of("vit"), machine(4), TrainConfig(), 3, limit)
    with pytest.raises(InfeasibleError):
        check_states(program_of("vit"), machine(4), TrainConfig(), 2, limit)
