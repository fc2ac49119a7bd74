"""Bounds of pairwise graphs are below the best choice, never fall, and are tight on trees; with what is left of an
option or pair they are below every choice that uses it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.messages import lay, leave, sweep
from autopar.search.pairwise.prices import priced, step, sums
from autopar.search.pairwise.problem import Floats, Pairwise, evaluate, fits, usage
from tests.pairwise_graphs import brute_force, random_pairwise


def optimum(problem: Pairwise) -> float:
    best = brute_force(problem)
    return np.inf if best is None else best[0]


def random_choices(problem: Pairwise, num: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [(rng.random(problem.num_nodes) * problem.num_options()).astype(np.int64) for _ in range(num)]


def test_no_choice_that_fits_costs_less_than_the_bound_and_the_bound_never_falls() -> None:
    tight = 0
    for seed in range(1000):
        problem = random_pairwise(seed)
        best = optimum(problem)
        dual, last = DualBound(problem, upper=best + 1.0 if seed % 3 else np.inf), -np.inf
        for _ in range(3):
            assert dual.ascend(passes=4) >= last
            last = dual.bound
        assert last <= best
        tight += last == best
    # Most of these graphs are small enough for the relaxation to be tight.
    assert tight > 500


def test_without_memory_the_bound_of_a_forest_is_its_optimum() -> None:
    checked = 0
    for seed in range(400):
        problem = random_pairwise(seed)
        problem = replace(problem, limit=np.inf)
        if is_forest(problem):
            dual = DualBound(problem)
            dual.ascend(passes=40)
            assert dual.bound == optimum(problem)
            checked += 1
    assert checked > 100


def is_forest(problem: Pairwise) -> bool:
    root = list(range(problem.num_nodes))
    for a, b in zip(problem.edge_a.tolist(), problem.edge_b.tolist(), strict=True):
        if root[a] == root[b]:
            return False
        root = [root[a] if r == root[b] else r for r in root]
    return True


def test_no_choice_that_uses_an_option_or_pair_costs_less_than_the_bound_and_what_is_left_of_it() -> None:
    raised = 0
    for seed in range(600):
        problem = random_pairwise(seed)
        if problem.num_options().prod() > 150:
            continue
        option, pair = _cheapest_with(problem)
        best = option.min()
        for upper in (np.inf, best + 1.0):
            dual = DualBound(problem, upper=upper)
            dual.ascend(passes=1 + seed % 70)
            left = dual.remainder()
            for own, cheapest in ((left.option, option), (left.pair, pair)):
                # Of what costs `upper` or more, nothing is promised.
                assert (left.proved + own <= cheapest)[cheapest < upper].all()
                raised += int((left.proved + own > dual.bound).sum())
    assert raised > 1000


def _cheapest_with(problem: Pairwise) -> tuple[Floats, Floats]:
    option, pair = np.full(len(problem.cost), np.inf), np.full(len(problem.pair_cost), np.inf)
    columns = problem.num_options()[problem.edge_b]
    for options in product(*map(range, problem.num_options())):
        choice = np.array(options)
        cost = evaluate(problem, choice)
        if cost < np.inf and fits(problem, choice):
            used = problem.first_option[:-1] + choice
            option[used] = np.minimum(option[used], cost)
            used = problem.first_pair[:-1] + choice[problem.edge_a] * columns + choice[problem.edge_b]
            pair[used] = np.minimum(pair[used], cost)
    return option, pair


def test_what_is_left_of_costs_and_the_bound_add_up_to_the_cost_of_every_choice() -> None:
    for seed in range(300):
        problem = random_pairwise(seed)
        dual = DualBound(problem)
        dual.ascend(passes=8)
        if dual.closed:
            continue
        left = dual.remainder()
        assert left.option.min() >= 0.0 and left.pair.min(initial=0.0) >= 0.0 and left.prices.min(initial=0.0) >= 0.0
        problem_left = replace(problem, cost=left.option, pair_cost=left.pair)
        for choice in random_choices(problem, 20):
            cost = evaluate(problem, choice)
            slack = left.prices @ (problem.limit - usage(problem, choice)) if left.prices.any() else 0.0
            scale = abs(cost) + abs(left.bound) + abs(slack) + 1.0
            assert evaluate(problem_left, choice) + slack + left.bound == pytest.approx(cost, abs=1e-9 * scale)


def test_messages_of_any_size_leave_a_bound() -> None:
    for seed in range(200):
        problem = random_pairwise(seed)
        best = optimum(replace(problem, limit=np.inf))
        layout = lay(problem)
        rng = np.random.default_rng(seed)
        messages = rng.normal(0.0, 1e3, int(layout.first_message[-1]))
        weight = np.zeros(len(problem.cost))
        bound, rounding = sweep(layout, problem.cost, messages, False, 0.0, weight)
        assert bound - rounding <= best
        if bound < np.inf:
            rest = leave(
                *(layout, problem.cost, messages, problem.first_pair, problem.edge_a),
                *(np.empty(len(problem.cost)), np.empty(len(problem.pair_cost))),
            )
            assert rest == pytest.approx(bound, abs=1e-6 + rounding)


def test_prices_times_usage_are_what_options_pay() -> None:
    for seed in range(200):
        problem = random_pairwise(seed)
        rng = np.random.default_rng(seed)
        prices = step(np.zeros(problem.num_times), rng.random(problem.num_times), gap=1e3, most=1e9, limit=10.0)
        assert (np.diff(sums(prices)) == prices).all(), "prefix sums are exact"
        paid = replace(problem, cost=priced(problem, np.zeros(len(problem.cost)), prices))
        paid = replace(paid, pair_cost=np.zeros(len(problem.pair_cost)))
        for choice in random_choices(problem, 5):
            expected = float(prices @ (usage(problem, choice) - problem.base))
            assert evaluate(paid, choice) == pytest.approx(expected)


def test_runs_of_as_many_passes_are_the_same_to_the_bit() -> None:
    for seed in range(20):
        problem = random_pairwise(seed)
        first, second = DualBound(problem), DualBound(problem)
        first.ascend(passes=30)
        for _ in range(3):
            second.ascend(passes=10)
        assert first.bound == second.bound
        assert (first.prices == second.prices).all()


def test_prices_rise_until_they_prove_that_nothing_fits() -> None:
    checked = 0
    for seed in range(60):
        problem = random_pairwise(seed)
        if len(problem.usage):
            dual = DualBound(replace(problem, usage=problem.usage + 1.0, base=np.zeros(problem.num_times), limit=0.5))
            dual.ascend(passes=3000)
            assert dual.bound == np.inf
            checked += 1
    assert checked > 20
