"""Anytime search on pairwise graphs: what it says re-evaluates, never beats brute force and seldom misses it.

Its kernels are held against oracles that try everything.
"""

import numpy as np
import pytest

from autopar.errors import ArgumentError, InfeasibleError
from autopar.search.compiled import below, seeded, uniform
from autopar.search.pairwise import anytime
from autopar.search.pairwise.anytime import search
from autopar.search.pairwise.forests import gather, gumbel_table, own_costs, plant, settle, sweep, work_for
from autopar.search.pairwise.graph import cost_of, graph_of, usage_of
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


def test_search_reaches_what_brute_force_does_and_never_less() -> None:
    feasible = optimal = 0
    for seed in SEEDS:
        problem = random_pairwise(seed)
        best = brute_force(problem)
        try:
            found = search(problem, sweeps=400, seed=seed)
        except InfeasibleError:
            feasible += best is not None
            continue
        assert best is not None
        assert fits(problem, found.choice)
        assert evaluate(problem, found.choice) == found.cost >= best[0]
        feasible += 1
        optimal += found.cost == best[0]
    assert optimal >= 0.9 * feasible > 50


def test_seed_and_sweeps_decide_everything() -> None:
    for seed in (1002, 1005, 1008):
        problem = random_pairwise(seed)
        results = [search(problem, sweeps=150, seed=7) for _ in range(2)]
        assert results[0].cost == results[1].cost
        assert results[0].sweeps == results[1].sweeps == 150
        assert np.array_equal(results[0].choice, results[1].choice)


def test_a_start_that_fits_is_never_lost() -> None:
    for seed in SEEDS[:40]:
        problem = random_pairwise(seed)
        choices, costs = allowed(problem)
        if len(costs):
            start = choices[np.argsort(costs)[len(costs) // 4]]
            assert search(problem, sweeps=5, seed=seed, start=start).cost <= evaluate(problem, start)


def test_prices_are_taken() -> None:
    problem = random_pairwise(1002)
    prices = np.full(problem.num_times, 1e3)
    found = search(problem, sweeps=200, seed=1, prices=prices)
    assert evaluate(problem, found.choice) == found.cost
    assert (prices == 1e3).all()


def test_a_limit_that_nothing_meets_is_an_error_that_says_the_least_peak() -> None:
    seen = 0
    for seed in SEEDS:
        problem = random_pairwise(seed)
        _, costs, peaks = every_choice(problem)
        if (peaks > problem.limit).all() and (costs < np.inf).any():
            with pytest.raises(InfeasibleError, match=r"least peak seen is (\d+)") as error:
                search(problem, sweeps=100, seed=1)
            assert int(str(error.value).split("seen is ")[1].split()[0]) >= peaks[costs < np.inf].min()
            seen += 1
    assert seen > 3


def test_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_pairwise(1002)
    rounds = []

    def interrupted(self: anytime.Search, hot: float, sweeps: int) -> None:
        rounds.append(hot)
        raise KeyboardInterrupt

    monkeypatch.setattr(anytime.Search, "reheat", interrupted)
    found = search(problem, sweeps=10_000, seed=1)
    assert rounds
    assert found.sweeps < 10_000
    assert fits(problem, found.choice)


def test_budget_is_one_of_two() -> None:
    with pytest.raises(ArgumentError, match="seconds or in sweeps"):
        search(random_pairwise(1002))


def test_a_budget_in_seconds_solves_regions_too() -> None:
    problem = random_pairwise(1002)
    best = brute_force(problem)
    assert best is not None
    assert search(problem, seconds=1.0, seed=1).cost == best[0]


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
        size = plant(graph, state, work.planted, work.order, work.up)
        inside = work.planted
        assert sorted(work.order[:size]) == list(np.flatnonzero(inside))
        edges = int((inside[problem.edge_a] & inside[problem.edge_b]).sum())
        assert edges == int((work.up[work.order[:size]] >= 0).sum())
        prices = no_prices(problem)
        own_costs(graph, choice, inside, work.order, size, prices, 0.0, work.gumbel, state, work.own)
        gather(graph, work.order, work.up, size, work.own, work.total)
        same = (choices[:, ~inside] == choice[~inside]).all(axis=1)
        settle(graph, choice, work.order, work.up, size, work.total, work.value)
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
        inside = region(problem, graph_of(problem), choice, max(problem.num_nodes - 1, 1), seeded(seed))
        part = induced(problem, choice, inside)
        assert np.array_equal(usage(part, choice[inside]), usage(problem, choice))
        same = (choices[:, ~inside] == choice[~inside]).all(axis=1)
        constant = {evaluate(problem, other) - evaluate(part, other[inside]) for other in choices[same]}
        assert len(constant) == 1
        better = improve(problem, choice, inside, seconds=10.0)
        assert evaluate(problem, better) == costs[same].min()
        improved += better is not choice
    assert improved > 10
