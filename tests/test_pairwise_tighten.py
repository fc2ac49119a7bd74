"""Closing and reducing by turns keeps every choice that beats a known cost; what messages suggest is best on trees."""

from dataclasses import replace

import numpy as np

from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.problem import evaluate, fits
from autopar.search.pairwise.tighten import tighten
from tests.pairwise_graphs import brute_force, random_pairwise
from tests.test_pairwise_bound import is_forest


def climb(dual: DualBound, _: float) -> None:
    dual.ascend(passes=2)


def test_the_best_choice_below_a_known_cost_is_among_those_left() -> None:
    left = refuted = decided = 0
    for seed in range(600):
        problem = random_pairwise(seed)
        best = brute_force(problem)
        if best is None:
            continue
        upper = best[0] + (0.0, 1.0, 1.0 + abs(best[0]) / 2)[seed // 3 % 3]
        dual = DualBound(problem, upper=upper)
        dual.ascend(passes=3)
        if dual.closed:
            continue
        last = tighten(dual, climb)
        if upper == best[0]:
            # Nothing beats it: whatever is left costs as much.
            assert last.choice is None or not fits(problem, last.choice) or evaluate(problem, last.choice) >= upper
            refuted += 1
        elif last.dual is None:
            assert last.choice is not None and fits(problem, last.choice)
            assert evaluate(problem, last.choice) == best[0]
            decided += 1
        else:
            smaller = brute_force(last.dual.problem)
            assert smaller is not None and last.dual.bound <= smaller[0]
            choice = last.lift(smaller[1])
            assert smaller[0] + last.offset == evaluate(problem, choice) == best[0] and fits(problem, choice)
            left += 1
    assert left > 20 and refuted > 40 and decided > 40


def test_what_messages_suggest_is_the_best_choice_of_a_forest() -> None:
    checked = 0
    for seed in range(400):
        problem = replace(random_pairwise(seed), limit=np.inf)
        best = brute_force(problem)
        if best is None or not is_forest(problem):
            continue
        dual = DualBound(problem)
        dual.ascend(passes=40)
        assert evaluate(problem, dual.remainder().choice) == best[0]
        checked += 1
    assert checked > 100
