"""The restricted mixed program is exact: what it proves is what trying every choice finds."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from autopar.search.exact.array_model import ArrayModel
from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.problem import Pairwise, evaluate, fits
from autopar.search.pairwise.restricted import Outcome, solve_restricted
from tests.pairwise_graphs import brute_force, random_pairwise


def solved(problem: Pairwise, *, upper: float = np.inf, seconds: float | None = None) -> Outcome:
    dual = DualBound(problem, upper=upper)
    dual.ascend(passes=8)
    return solve_restricted(dual, seconds=seconds)


def check(problem: Pairwise) -> bool:
    """Whether it has a choice that fits."""
    best = brute_force(problem)
    cost = np.inf if best is None else best[0]
    outcome = solved(problem)
    assert (outcome.cost, outcome.bound) == (cost, cost)
    assert outcome.optimal
    assert (outcome.choice is None) == (best is None)
    if outcome.choice is not None:
        assert evaluate(problem, outcome.choice) == cost
        assert fits(problem, outcome.choice)
    return best is not None


@pytest.mark.parametrize("first", range(0, 400, 200))
def test_exact_on_random_graphs(first: int) -> None:
    feasible = [check(random_pairwise(seed)) for seed in range(first, first + 200)]
    # Both kinds are there.
    assert 8 < sum(feasible) < 196


def test_a_known_cost_that_is_optimal_is_proved_and_one_that_is_not_is_beaten() -> None:
    for seed in range(100):
        problem = random_pairwise(seed)
        best = brute_force(problem)
        if best is None:
            continue
        proved = solved(problem, upper=best[0])
        assert proved.choice is None and proved.bound == best[0]
        beaten = solved(problem, upper=best[0] + 1.0)
        assert beaten.choice is not None and beaten.cost == beaten.bound == best[0]


def test_memory_rows_that_nobody_priced_are_found() -> None:
    """Two nodes want their big option at different times; no price was ever paid, since no pass was made."""
    problem = Pairwise(
        first_option=np.array([0, 2, 4, 6]),
        cost=np.array([0.0, 5.0, 0.0, 4.0, 0.0, 3.0]),
        edge_a=np.zeros(0, np.int64),
        edge_b=np.zeros(0, np.int64),
        first_pair=np.zeros(1, np.int64),
        pair_cost=np.zeros(0),
        member_node=np.array([0, 1, 1, 2]),
        begin=np.array([0, 0, 2, 2]),
        end=np.array([1, 1, 3, 3]),
        first_usage=np.array([0, 2, 4, 6, 8]),
        usage=np.array([7.0, 0.0, 6.0, 0.0, 2.0, 0.0, 9.0, 0.0]),
        base=np.zeros(3),
        limit=10.0,
    )
    outcome = solve_restricted(DualBound(problem))
    assert outcome.cost == outcome.bound == 4.0
    assert outcome.choice is not None and outcome.choice.tolist() == [0, 1, 0]
    assert solve_restricted(DualBound(replace(problem, limit=8.0))).cost == 7.0


def test_the_same_from_a_process_of_its_own() -> None:
    for seed in (0, 3):
        problem = random_pairwise(seed)
        best = brute_force(problem)
        assert solved(problem, seconds=60.0).cost == (np.inf if best is None else best[0])


def test_no_time_no_harm() -> None:
    problem = random_pairwise(0)
    outcome = solve_restricted(DualBound(problem), seconds=0.0)
    assert outcome.choice is None and outcome.cost == np.inf and outcome.bound == -np.inf


def test_a_solve_that_does_not_end_in_time_is_ended_and_the_next_one_starts_afresh() -> None:
    model = ArrayModel()
    model.add_columns(1, cost=1.0, lower=2.0, upper=3.0)
    with Worker() as worker:
        answer = worker.solve(model, seconds=60.0)
        assert answer is not None and answer.objective == 2.0
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGSTOP)
        assert worker.solve(model, seconds=0.2) is None
        answer = worker.solve(model, seconds=60.0)
        assert answer is not None and answer.objective == 2.0
