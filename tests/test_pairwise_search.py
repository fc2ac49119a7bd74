"""Anytime search on pairwise graphs: what it says re-evaluates, never beats brute force and seldom misses it.

Its kernels are held against oracles that try everything.
"""

import numpy as np
import pytest

from autopar.search.compiled import below, seeded, uniform
from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.anytime import AnytimeSearch, Outside
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.forests import gather, gumbel_table, own_costs, plant, settle, sweep, work_for
from autopar.search.pairwise.graph import cost_of, graph_of, usage_of
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.levels import add, highest, levels
from autopar.search.pairwise.problem import Ints, Pairwise, evaluate, fits, usage
from autopar.search.pairwise.regions import improve, induced, region
from tests.pairwise_graphs import brute_force, every_choice, random_pairwise

SEEDS = range(1000, 1150)


def allowed(problem: Pairwise) -> tuple[Ints, np.ndarray]:
    """Choices that are allowed and fit, with their costs."""
    choices, costs, peaks = every_choice(problem)
    good = (peaks <= problem.limit) & (costs < np.inf)
    return choices[good].astype(np.int64), costs[good]


def no_prices(problem: Pairwise) -> np.ndarray:
    return np.zeros(len(graph_of(problem).base) + 1)


def searched(problem: Pairwise, seed: int, sweeps: int, start: Ints | None = None) -> AnytimeSearch | None:
    """After a cool and a hot round; None where the bound leaves nothing to search."""
    dual = DualBound(problem)
    dual.ascend(passes=10)
    if dual.closed:
        return None
    outside = Outside(heard=lambda *_: None, better=lambda _: None, worker=Worker())
    search = AnytimeSearch(
        Guide(problem=problem, remainder=dual.remainder()), outside, seed=seed, stop=np.inf, start=start
    )
    for heat in (0.1, 3.0):
        search.fresh(heat * search.guide.unit(), sweeps)
    return search


def test_search_reaches_what_brute_force_does_and_never_less() -> None:
    feasible = optimal = 0
    for seed in SEEDS:
        problem = random_pairwise(seed)
        best = brute_force(problem)
        search = searched(problem, seed, 200)
        feasible += best is not None
        if search is None or search.best.cost[0] == np.inf:
            continue
        assert best is not None
        assert fits(problem, search.best.choice)
        assert evaluate(problem, search.best.choice) == search.best.cost[0] >= best[0]
        optimal += search.best.cost[0] == best[0]
    assert optimal >= 0.9 * feasible > 50


def test_the_seed_and_the_number_of_sweeps_decide_a_round() -> None:
    for seed in (1002, 1005, 1008):
        problem = random_pairwise(seed)
        first, second = (searched(problem, 7, 75) for _ in range(2))
        assert first is not None and second is not None
        assert first.best.cost[0] == second.best.cost[0]
        assert np.array_equal(first.best.choice, second.best.choice)


def test_a_start_that_fits_is_never_lost() -> None:
    for seed in SEEDS[:40]:
        problem = random_pairwise(seed)
        choices, costs = allowed(problem)
        if len(costs):
            start = choices[np.argsort(costs)[len(costs) // 4]]
            search = searched(problem, seed, 5, start)
            assert search is not None and search.best.cost[0] <= evaluate(problem, start)


def test_draws_are_even() -> None:
    state = seeded(5)
    assert np.bincount([below(state, 7) for _ in range(7_000)], minlength=7).min() > 800
    values = np.array([uniform(state) for _ in range(4_000)])
    assert 0.0 < values.min() < 0.01 < 0.99 < values.max() < 1.0
    assert abs(gumbel_table().mean() - np.euler_gamma) < 1e-3


@pytest.mark.parametrize("times", [1, 2, 3, 5, 17, 64, 100])
def test_levels_are_the_naive_ones(times: int) -> None:
    rng = np.random.default_rng(times)
    taken = rng.integers(0, 100, times).astype(float)
    tree = levels(taken)
    for _ in range(200):
        begin, end = np.sort(rng.choice(times + 1, 2, replace=False))
        nbytes = float(rng.integers(-9, 10))
        add(tree.peak, tree.added, begin, end, nbytes)
        taken[begin:end] += nbytes
        begin, end = np.sort(rng.choice(times + 1, 2, replace=False))
        assert highest(tree.peak, tree.added, begin, end) == taken[begin:end].max()
        assert tree.peak[1] == taken.max()


def test_neighbours_and_members_say_what_the_problem_says() -> None:
    for seed in SEEDS[:60]:
        problem = random_pairwise(seed)
        graph = graph_of(problem)
        assert np.array_equal(graph.twin[graph.twin], np.arange(len(graph.other)))
        choices, costs, _ = every_choice(problem)
        for k in range(0, len(choices), 1 + len(choices) // 7):
            choice = choices[k].astype(np.int64)
            cost = cost_of(graph, choice)
            assert cost == costs[k] if costs[k] < np.inf else cost >= graph.wall
            if problem.limit < np.inf:
                assert np.array_equal(usage_of(graph, choice), usage(problem, choice))


def test_a_forest_is_maximal_and_the_best_choice_on_it_is_found() -> None:
    for seed in SEEDS[:60]:
        problem = random_pairwise(seed)
        graph, state = graph_of(problem), seeded(seed)
        work = work_for(graph)
        choices, costs, _ = every_choice(problem)
        choice = choices[below(state, len(choices))].astype(np.int64)
        size = plant(graph, work, state)
        inside = work.planted
        assert sorted(work.order[:size]) == list(np.flatnonzero(inside))
        edges = int((inside[problem.edge_a] & inside[problem.edge_b]).sum())
        assert edges == int((work.up[work.order[:size]] >= 0).sum())
        prices = no_prices(problem)
        own_costs(graph, work, size, choice, prices, 0.0, state)
        gather(graph, work, size)
        same = (choices[:, ~inside] == choice[~inside]).all(axis=1)
        settle(graph, work, size, choice)
        least = costs[same].min()
        assert evaluate(problem, choice) == least


def test_a_hard_sweep_never_worsens_what_fits_and_fills_no_time_further_that_is_over() -> None:
    for seed in SEEDS[:60]:
        problem = random_pairwise(seed)
        graph, state = graph_of(problem), seeded(seed)
        work = work_for(graph)
        choices, _, _ = every_choice(problem)
        choice = choices[below(state, len(choices))].astype(np.int64)
        for _ in range(8):
            before, over = cost_of(graph, choice), np.maximum(usage_of(graph, choice), graph.limit)
            sweep(graph, work, choice, no_prices(problem), 0.0, True, 0.0, state)
            assert cost_of(graph, choice) <= before
            if not len(graph.base) or (over <= graph.limit).all():
                assert (usage_of(graph, choice) <= graph.limit).all()


def test_a_region_is_the_problem_with_the_rest_fixed_and_its_best_is_found() -> None:
    improved = 0
    for seed in SEEDS[:60]:
        problem = random_pairwise(seed)
        choices, costs = allowed(problem)
        if not len(costs):
            continue
        choice = choices[len(costs) // 2]
        dual = DualBound(problem)
        dual.ascend(passes=5)
        guide = Guide(problem=problem, remainder=dual.remainder())
        inside = region(graph_of(problem), guide, choice, max(problem.num_nodes - 1, 1), seeded(seed))
        part = induced(problem, choice, inside)
        assert np.array_equal(usage(part, choice[inside]), usage(problem, choice))
        same = (choices[:, ~inside] == choice[~inside]).all(axis=1)
        constant = {evaluate(problem, other) - evaluate(part, other[inside]) for other in choices[same]}
        assert len(constant) == 1
        better = improve(guide, choice, inside, seconds=np.inf, worker=Worker())
        assert evaluate(problem, better) == costs[same].min()
        improved += better is not choice
    assert improved > 10
