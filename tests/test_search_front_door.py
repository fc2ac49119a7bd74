"""Whatever the graph, one call finds its optimum and proves it, or says that nothing fits."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.search.exact.highs_log import Progress
from autopar.search.graph.strategy_graph import Memory
from autopar.search.graph.strategy_graph import usage as graph_usage
from autopar.search.pairwise import solve as pairwise
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.problem import Pairwise, evaluate, fits, usage
from autopar.search.solve import solve
from tests import brute_force, pairwise_graphs, strategy_graphs
from tests.pairwise_graphs import random_pairwise


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_pairwise_graphs_are_solved_to_the_optimum(first: int) -> None:
    for seed in range(first, first + 40):
        problem = random_pairwise(seed)
        best = pairwise_graphs.brute_force(problem)
        if best is None:
            with pytest.raises(InfeasibleError) as refused:
                solve(problem, relative_gap=0.0)
            assert refused.value.least_nbytes == least_limit(problem)
            continue
        told: list[Progress] = []
        found = solve(problem, relative_gap=0.0, on_progress=told.append)
        assert found.status == "optimal"
        assert fits(problem, found.choice)
        assert evaluate(problem, found.choice) == found.seconds == best[0]
        assert found.bound <= best[0]
        assert all(state.bound <= best[0] <= state.incumbent for state in told)


def least_limit(problem: Pairwise) -> float | None:
    """The least peak of all choices that are allowed, None if there is none."""
    peaks = [
        float(usage(problem, np.array(choice)).max())
        for choice in product(*map(range, problem.num_options()))
        if np.isfinite(evaluate(problem, np.array(choice)))
    ]
    return min(peaks, default=None)


def test_strategy_graphs_of_either_kind_go_through_the_same_door() -> None:
    kinds = set()
    for seed in range(40):
        graph = strategy_graphs.random_graph(seed)
        if seed % 2:
            memory = graph.memory
            kept = None if memory is None else Memory(limit=memory.limit, base=memory.base, nodes=memory.nodes)
            graph = replace(graph, groups=(), memory=kept)
        try:
            best = brute_force.solve(graph)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve(graph)
            continue
        found = solve(graph, relative_gap=1e-6)
        assert found.seconds == pytest.approx(best.seconds, rel=1e-6, abs=1e-9)
        if graph.memory is not None:
            assert graph_usage(graph, found.choice, found.arcs).max(initial=0.0) <= graph.memory.limit * (1 + 1e-9)
        kinds.add((bool(graph.groups), graph.memory is not None))
    assert len(kinds) == 4


def test_an_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the search: the answer is a choice that fits, its bound holds."""
    problem, interrupts = _hard(), []

    def interrupted(state: Progress) -> None:
        if np.isfinite(state.incumbent) and state.elapsed > 0.0:
            interrupts.append(state.incumbent)
            raise KeyboardInterrupt

    monkeypatch.setattr(pairwise.DualBound, "ascend", lambda self, **_: self.bound)
    found = solve(problem, relative_gap=0.0, seconds=30.0, on_progress=interrupted)
    assert interrupts
    if found.status != "interrupted":  # a proof that was under way came in time
        assert found.status == "optimal" and found.bound == found.seconds
    assert fits(problem, found.choice)
    assert found.bound <= found.seconds <= interrupts[0]


def test_what_a_choice_costs_above_the_bound_is_what_it_wastes() -> None:
    """The identity that regions are chosen by: cost = bound + waste + price of idle memory."""
    num = 0
    for seed in range(200):
        problem = random_pairwise(seed)
        dual = DualBound(problem)
        dual.ascend(passes=10)
        if not np.isfinite(dual.bound) or dual.closed:
            continue
        guide = Guide(problem=problem, remainder=dual.remainder())
        for choice, cost in _some_choices(problem, seed):
            option, pair = guide.waste(choice)
            total = guide.remainder.bound + option.sum() + pair.sum() + guide.idle(choice)
            assert total == pytest.approx(cost, rel=1e-9, abs=1e-6 * max(1.0, abs(guide.remainder.bound)))
            assert option.min(initial=0.0) >= 0.0
            assert pair.min(initial=0.0) >= 0.0
            num += 1
    assert num > 200


def _some_choices(problem, seed):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    for _ in range(4):
        choice = np.array([rng.integers(count) for count in problem.num_options()])
        if np.isfinite(cost := evaluate(problem, choice)):
            yield choice, cost


def _hard():  # type: ignore[no-untyped-def]
    """A grid whose reductions end early, with memory that binds."""
    from autopar.search.pairwise.problem import Pairwise

    rng = np.random.default_rng(5)
    side, options = 7, 4
    nodes = side * side
    ends = [(i, i + 1) for i in range(nodes) if (i + 1) % side] + [(i, i + side) for i in range(nodes - side)]
    taken = rng.integers(1, 100, (nodes, options)).astype(float)
    problem = Pairwise(
        first_option=np.arange(nodes + 1) * options,
        cost=rng.integers(0, 1000, nodes * options).astype(float),
        edge_a=np.array([a for a, _ in ends]),
        edge_b=np.array([b for _, b in ends]),
        first_pair=np.arange(len(ends) + 1) * options**2,
        pair_cost=rng.integers(0, 1000, len(ends) * options**2).astype(float),
        member_node=np.arange(nodes),
        begin=np.zeros(nodes, np.int64),
        end=np.ones(nodes, np.int64),
        first_usage=np.arange(nodes + 1) * options,
        usage=taken.ravel(),
        base=np.zeros(1),
        limit=float(0.8 * taken.mean(axis=1).sum()),
    )
    assert usage(problem, np.argmin(taken, axis=1)).max() <= problem.limit
    return problem
