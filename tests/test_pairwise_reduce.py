"""Reductions of pairwise strategy graphs keep the optimum, memory included: each alone, and all of them in turn.

Oracle: every choice of hundreds of random graphs, tried.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.search.pairwise.problem import Ints, Pairwise, evaluate, fits
from autopar.search.pairwise.reduce.limit import drop_oversized, drop_times
from autopar.search.pairwise.reduce.pipeline import Reduced, apply, finished, reduce, started
from autopar.search.pairwise.reduce.rules import contract, drop_dominated, eliminate, fold, settle, tighten
from autopar.search.pairwise.reduce.tables import Tables
from tests.pairwise_graphs import brute_force, every_choice, random_pairwise

NUM_GRAPHS = 801
CHECKED_CHOICES = 8


def decide_by_limit(tables: Tables) -> None:
    drop_times(tables)
    drop_oversized(tables)


def settled_and_folded(tables: Tables) -> None:
    apply(tables, settle)
    apply(tables, fold)


ALONE: dict[str, Callable[[Tables], None]] = {
    "tighten": lambda tables: apply(tables, tighten),
    "settle members": lambda tables: apply(tables, settle),
    "fold": settled_and_folded,
    "eliminate": lambda tables: apply(tables, eliminate),
    "contract": lambda tables: apply(tables, contract),
    "drop dominated options": lambda tables: apply(tables, drop_dominated),
    "drop times and oversized options": decide_by_limit,
}


def size_of(problem: Pairwise) -> tuple[float, ...]:
    """What a reduction makes smaller: nodes, options, edges, entries of members, times, bytes to choose from."""
    parts = (problem.cost, problem.edge_a, problem.usage, problem.base)
    options = int(np.isfinite(problem.cost).sum())
    return (problem.num_nodes, options, float(problem.usage.sum()), *(len(part) for part in parts))


@cache
def graph(seed: int) -> tuple[Pairwise, float]:
    """With its optimum."""
    problem = random_pairwise(seed)
    best = brute_force(problem)
    return problem, np.inf if best is None else best[0]


def assert_same_optimum(seed: int, problem: Pairwise, optimum: float, reduced: Reduced) -> None:
    choices, costs, peaks = every_choice(reduced.problem)
    costs_that_fit = np.where(peaks <= reduced.problem.limit, costs, np.inf)
    assert costs_that_fit.min() + reduced.offset == optimum, seed
    allowed = np.flatnonzero(costs < np.inf)
    for row in np.random.default_rng(seed).permutation(allowed)[:CHECKED_CHOICES]:
        lifted = reduced.lift(choices[row])
        assert evaluate(problem, lifted) == costs[row] + reduced.offset, seed
        assert fits(problem, lifted) == fits(reduced.problem, choices[row]), seed
        lowered = reduced.lower(lifted)
        assert lowered is not None and np.array_equal(lowered, choices[row]), seed


@pytest.mark.parametrize("rule", ALONE)
def test_a_rule_alone_keeps_the_optimum(rule: str) -> None:
    reduced_graphs = 0
    for seed in range(NUM_GRAPHS):
        problem, optimum = graph(seed)
        tables = started(problem)
        before = size_of(tables.to_problem()[0])
        try:
            ALONE[rule](tables)
        except InfeasibleError:
            assert optimum == np.inf, seed
            continue
        reduced = finished(tables, problem.num_nodes)
        reduced_graphs += size_of(reduced.problem) != before
        assert_same_optimum(seed, problem, optimum, reduced)
    assert reduced_graphs > NUM_GRAPHS / 10, "the graphs give this rule nothing to do"


def test_all_rules_keep_the_optimum() -> None:
    left = []
    for seed in range(NUM_GRAPHS):
        problem, optimum = graph(seed)
        try:
            reduced = reduce(problem)
        except InfeasibleError as error:
            assert optimum == np.inf, seed
            assert_bytes_are_needed(problem, error)
            continue
        assert_same_optimum(seed, problem, optimum, reduced)
        left.append(reduced.problem.num_nodes)
    assert np.mean(np.array(left) == 0) < 0.9, "nearly every graph is reduced to nothing: others would test more"


def assert_bytes_are_needed(problem: Pairwise, error: InfeasibleError) -> None:
    """Nothing allowed fits into less than the error names, and it names bytes just where memory matters."""
    _, costs, peaks = every_choice(problem)
    least = peaks[costs < np.inf].min(initial=np.inf)
    if error.least_nbytes is None:
        assert least == np.inf
    else:
        assert problem.limit < error.least_nbytes <= least


def test_no_time_is_no_excuse_for_another_optimum() -> None:
    for seed in range(0, NUM_GRAPHS, 7):
        problem, optimum = graph(seed)
        try:
            reduced = reduce(problem, seconds=0)
        except InfeasibleError:
            assert optimum == np.inf
            continue
        assert_same_optimum(seed, problem, optimum, reduced)


def test_reducing_what_is_reduced_changes_nothing() -> None:
    for seed in range(0, NUM_GRAPHS, 7):
        problem, optimum = graph(seed)
        if optimum < np.inf:
            once = reduce(problem)
            twice = reduce(once.problem)
            assert len(twice.problem.cost) <= len(once.problem.cost)
            assert len(twice.problem.cost) >= 0.9 * len(once.problem.cost)


def chain(num_nodes: int, num_options: int, *, hub: bool) -> Pairwise:
    """Each node a function of the one before, or of the first where `hub`; node 0 has members, so that it stays."""
    rng = np.random.default_rng(0)
    edges = np.arange(num_nodes - 1)
    matrices = np.full((num_nodes - 1, num_options, num_options), np.inf)
    for matrix in matrices:
        matrix[np.arange(num_options), rng.permutation(num_options)] = rng.integers(0, 100, num_options)
    sizes: Callable[[int, int], Ints] = lambda count, size: np.arange(count + 1) * size  # noqa: E731
    return Pairwise(
        first_option=sizes(num_nodes, num_options),
        cost=rng.integers(0, 100, num_nodes * num_options).astype(float),
        edge_a=np.zeros(num_nodes - 1, np.int64) if hub else edges,
        edge_b=edges + 1,
        first_pair=sizes(num_nodes - 1, num_options**2),
        pair_cost=matrices.ravel(),
        member_node=np.arange(num_nodes),
        begin=np.arange(num_nodes),
        end=np.arange(num_nodes) + 2,
        first_usage=sizes(num_nodes, num_options),
        usage=rng.integers(0, 100, num_nodes * num_options).astype(float),
        base=np.zeros(num_nodes + 1),
        limit=150.0,
    )


@pytest.mark.parametrize("hub", [False, True])
def test_a_chain_of_functions_becomes_one_node_that_carries_all_memory(hub: bool) -> None:
    problem = chain(500, 4, hub=hub)
    tables = started(problem)
    apply(tables, contract)
    reduced = finished(tables, problem.num_nodes)
    assert reduced.problem.num_nodes == 1 and reduced.problem.num_edges == 0
    assert len(reduced.problem.member_node) == 500
    for option in range(4):
        choice = np.array([option])
        assert evaluate(problem, reduced.lift(choice)) == evaluate(reduced.problem, choice) + reduced.offset
        assert fits(problem, reduced.lift(choice)) == fits(reduced.problem, choice)
