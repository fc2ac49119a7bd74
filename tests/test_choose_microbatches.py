"""The number of micro-batches: none that was left out is better, and all are needed once memory binds."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autopar.api import planning as api
from autopar.errors import InfeasibleError
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.microbatches import choose_microbatches, unlimited_bound
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, squares, squares_graph
from tests.zoo_graphs import zoo_graph

BATCH, GAP = 4, 1e-3


@cache
def graph(family: str, count: int) -> CapturedModel:
    return accumulate_gradients(zoo_graph(family, BATCH // count, batch=BATCH), count, lambda: graph(family, 1))


def best(captured: CapturedModel, limit: float | None) -> StagePlan:
    config = TrainConfig(memory_nbytes=limit)
    return make_plan(
        captured, machine(), make_mesh((4,)), config, SearchOptions(relative_gap=GAP, with_baselines=False)
    )


def bound(captured: CapturedModel) -> float:
    return unlimited_bound(captured, machine(), make_mesh((4,)), TrainConfig(), SearchOptions(relative_gap=GAP))


@pytest.mark.parametrize("family", ["vit", "gpt2"])
def test_more_parts_never_help_where_memory_does_not_bind(family: str) -> None:
    """The claim behind the pruning: bounds without a limit grow from a number to its multiples."""
    seconds = [best(graph(family, n), None).estimate for n in divisors(BATCH)]
    for fewer, more in pairwise(seconds):
        assert more.step_seconds >= fewer.bound * (1 - 1e-6)
    searched = []

    def plan(captured: CapturedModel) -> StagePlan:
        searched.append(captured.microbatches)
        return best(captured, None)

    made, captured = choose_microbatches(divisors(BATCH), lambda n: graph(family, n), plan, bound, GAP)
    assert captured.microbatches == made.microbatches == 1 and searched == [1]
    said = made.estimate.search.microbatches
    assert list(said) == ["1", "2", "4"] and "no plan takes less than" in said["4"]


def test_the_choice_is_that_of_trying_all_as_memory_shrinks() -> None:
    peak = best(graph("vit", 1), None).estimate.peak_nbytes
    chosen, seconds = [], []
    made_once: dict[tuple[int, float], StagePlan | InfeasibleError] = {}

    def once(captured: CapturedModel, limit: float) -> StagePlan:
        key = captured.microbatches, limit
        if key not in made_once:
            try:
                made_once[key] = best(captured, limit)
            except InfeasibleError as error:
                made_once[key] = error
        found = made_once[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    for share in (1.0, 0.8, 0.7):
        limit = peak * share
        alone: dict[int, float] = {}
        for n in divisors(BATCH):
            try:
                alone[n] = once(graph("vit", n), limit).estimate.step_seconds
            except InfeasibleError:
                continue
        made, _ = choose_microbatches(
            divisors(BATCH), lambda n: graph("vit", n), lambda g, v=limit: once(g, v), bound, GAP
        )
        assert made.estimate.step_seconds <= min(alone.values()) * (1 + 3 * GAP)
        assert made.estimate.bound <= min(alone.values()) * (1 + 1e-6)
        assert made.estimate.peak_nbytes <= limit * (1 + 1e-9)
        chosen.append(made.microbatches)
        seconds.append(made.estimate.step_seconds)
    assert chosen[0] == 1 and len(alone) < len(divisors(BATCH)), "not all fit where memory is least"
    assert all(later >= earlier * (1 - 3 * GAP) for earlier, later in pairwise(seconds))


@cache
def small(count: int) -> CapturedModel:
    return accumulate_gradients(squares_graph(BATCH // count), count, lambda: small(1))


def test_where_no_number_fits_the_least_that_would_do_is_said() -> None:
    with pytest.raises(InfeasibleError, match="least that would do"):
        choose_microbatches(divisors(BATCH), small, lambda captured: best(captured, 1.0), bound, GAP)


def test_auto_in_the_api() -> None:
    model, inputs = squares()
    made = api.plan(model, inputs, cluster=machine(2), mesh="2", microbatches="auto", with_baselines=False)
    assert made.captured is not None and made.captured.microbatches == made.microbatches
    assert "micro-batches: 1:" in str(made)
    made.check(made.captured)


def test_a_model_whose_sizes_are_no_line_is_captured_at_every_size() -> None:
    """The batch squared is a number of the graph: two points would give another model, which is found out."""

    def loss(o: Tensor, b: tuple[Tensor]) -> Tensor:
        return (o * o.shape[0] ** 2).square().mean() * 0.0 + o.square().mean()

    made = api.plan(
        nn.Linear(4, 4), (torch.randn(8, 4),), cluster=machine(2), mesh="2", microbatches="auto", loss_fn=loss,
        with_baselines=False,
    )  # fmt: skip
    assert made.captured is not None
    made.check(made.captured)
