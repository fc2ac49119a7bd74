"""Memory at a price: what the priced graph says is what seconds and bytes cost, and its bound is one."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.search.exact.completion import complete
from autopar.search.exact.formulation import formulate
from autopar.search.exact.limited_bound import least_within
from autopar.search.exact.memory_prices import Ascent, Goal, Plane, ascend, hopeless, plane, remember, remembered
from autopar.search.exact.priced_memory import original_arcs, priced
from autopar.search.exact.reduction import reduce
from autopar.search.exact.steiner import Metric, metric
from autopar.search.graph.strategy_graph import Floats, Ints, StrategyGraph, evaluate, usage
from tests import brute_force
from tests.strategy_graphs import random_graph

BLOCK = 20


def with_memory(first: int) -> list[tuple[int, StrategyGraph]]:
    return [(seed, g) for seed in range(first, first + BLOCK) if (g := random_graph(seed)).memory is not None]


def all_choices(graph: StrategyGraph) -> list[Ints]:
    return [np.array(c, np.int64) for c in itertools.product(*(range(len(node.seconds)) for node in graph.nodes))]


@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_bytes_cost_what_they_are_priced_at(first: int) -> None:
    """The cheapest of the priced graph costs its seconds and its bytes' price, and no choice costs less."""
    for seed, graph in with_memory(first):
        assert graph.memory is not None
        prices = np.random.default_rng(seed).random(len(graph.memory.base)) * 2e-10
        cheap = priced(graph, prices)
        assert cheap.memory is None
        try:
            found = brute_force.solve(cheap)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                brute_force.solve(StrategyGraph(nodes=graph.nodes, groups=graph.groups, edges=graph.edges))
            continue
        arcs = original_arcs(graph, found.arcs)
        offset = float(prices @ graph.memory.base)

        def cost(choice: Ints, arcs: tuple[Ints, ...], graph: StrategyGraph = graph, prices: Floats = prices) -> float:
            return evaluate(graph, choice, arcs) + float(prices @ usage(graph, choice, arcs))

        assert found.seconds + offset == pytest.approx(cost(found.choice, arcs), rel=1e-9, abs=1e-9), seed
        metrics = [metric(group) for group in graph.groups]
        for choice in all_choices(graph):
            whole = complete(graph, metrics, choice)
            if whole is not None:
                assert found.seconds + offset <= cost(whole.choice, whole.arcs) + 1e-9, seed


@pytest.mark.parametrize("first", range(0, 80, BLOCK))
def test_prices_bound_every_choice_that_fits(first: int) -> None:
    """`bound` is at most the optimum, is what its prices give, and is infinite only where nothing fits."""
    for seed, graph in with_memory(first):
        memory = graph.memory
        assert memory is not None
        fitting = [math.inf]
        metrics = [metric(group) for group in graph.groups]

        def solve(
            cheap: StrategyGraph,
            _prices: Floats,
            _end: float,
            graph: StrategyGraph = graph,
            metrics: list[Metric] = metrics,
            fitting: list[float] = fitting,
        ) -> tuple[Plane, float]:
            found = brute_force.solve(cheap)
            whole = complete(graph, metrics, found.choice)
            if whole is not None and whole.fits:
                fitting.append(whole.seconds)
            return plane(graph, found.choice, original_arcs(graph, found.arcs)), found.seconds

        planes: list[Plane] = []
        start = np.random.default_rng(seed).random(len(memory.base)) * 1e-10 if seed % 2 else None
        try:
            ascent = ascend(
                graph,
                solve,
                Goal(best=partial(min, fitting), relative_gap=1e-6, over=lambda: False, only=seed % 4 > 1),
                planes=planes,
                start=start,
            )
        except InfeasibleError:  # no choice is compatible, whatever it takes
            continue
        try:
            optimum = brute_force.solve(graph).seconds
        except InfeasibleError:
            assert len(fitting) == 1, seed
            continue
        assert ascent.bound <= optimum * (1 + 1e-9) + 1e-9, seed
        assert min(fitting) >= optimum - 1e-9, seed
        least = brute_force.solve(priced(graph, ascent.prices)).seconds
        assert ascent.bound == pytest.approx(
            least + float(ascent.prices @ (memory.base - memory.limit)), rel=1e-9, abs=1e-9
        ), seed
        promise = min(s + float(ascent.prices @ e) * (abs(memory.limit) or 1.0) for s, e in planes)
        assert ascent.bound <= promise + 1e-9, seed


@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_linear_programs_at_prices_find_what_the_one_with_rows_for_moments_does(first: int) -> None:
    """Duality; and so no solution that fits takes less. With a cutoff the bound says on which side of it that is."""
    seen = 0
    for seed, graph in with_memory(first):
        try:
            rows = formulate(reduce(graph).graph)
            found = least_within(graph, prices={})
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                brute_force.solve(graph)
            continue
        answer = rows.model.solve(relaxed=True)
        if answer.infeasible:
            with pytest.raises(InfeasibleError):
                brute_force.solve(graph)
            continue
        relaxed = answer.bound / rows.scale
        assert graph.memory is not None
        free = least_within(replace(graph, memory=replace(graph.memory, limit=math.inf)), prices={})
        assert free <= relaxed * (1 + 1e-6) + 1e-9, seed
        assert relaxed * (1 - 2e-3) - 1e-9 <= found <= relaxed * (1 + 1e-6) + 1e-9, seed
        for cutoff in (0.5 * relaxed, 0.9 * relaxed, 1.1 * relaxed):
            prices = {7: 1e-10} if seed % 2 else {}
            bound = least_within(graph, cutoff=cutoff, prices=prices)
            assert (bound >= cutoff) == (cutoff < relaxed), seed
            assert bound <= relaxed * (1 + 1e-6) + 1e-9, seed
            enough = least_within(graph, enough=cutoff, prices={})
            assert min(cutoff, relaxed) * (1 - 2e-3) - 1e-9 <= enough <= relaxed * (1 + 1e-6) + 1e-9, seed
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("first", range(0, 100, BLOCK))
def test_where_nothing_fitted_before_that_is_looked_at_first_and_believed_of_nothing(first: int) -> None:
    """A moment at which nothing fitted the last time changes no bound; it is forgotten where something fits, and told
    where nothing does."""
    seen = set()
    for seed, drawn in with_memory(first):
        assert drawn.memory is not None
        moments = tuple(range(len(drawn.memory.base)))
        limit = drawn.memory.limit * (1.0, 0.7, 0.4)[seed % 3]
        graph = replace(drawn, memory=replace(drawn.memory, moments=moments, limit=limit))
        known: dict[int, float] = {}
        told = {int(np.random.default_rng(seed).integers(len(moments))): math.inf}
        try:
            found, again = least_within(graph, prices=known), least_within(graph, prices=told)
        except InfeasibleError:
            continue
        assert again == pytest.approx(found, rel=2e-3, abs=1e-9), seed
        for prices in (known, told):
            assert (math.inf in prices.values()) == (found == math.inf), seed
        if found == math.inf:
            with pytest.raises(InfeasibleError):
                brute_force.solve(graph)
            assert least_within(graph, prices=known) == math.inf, seed
        seen.add(found == math.inf)
    assert len(seen) == 2  # both were met


def test_prices_of_a_search_gone_astray_are_not_remembered() -> None:
    known = {1: 0.5, 4: math.inf}
    remember(known, (1, 2), Ascent(prices=np.array([7.0, 0.0]), bound=3.0, astray=True))
    assert known == {1: 0.5}  # something may fit
    remember(known, (1, 2), Ascent(prices=np.array([0.0, 2.0]), bound=math.inf))
    assert known == {1: 0.5, 2: math.inf}
    start, doubted = remembered(known, (1, 2)), hopeless(known, (1, 2))
    assert start is not None and start.tolist() == [0.5, 0.0]
    assert doubted is not None and doubted.tolist() == [0.0, 1.0]
    remember(known, (1, 3), Ascent(prices=np.array([0.0, 2.0]), bound=math.inf))
    assert known == {1: 0.5, 3: math.inf}  # the last such moment alone
    remember(known, (1, 2), Ascent(prices=np.array([0.2, 0.1]), bound=3.0))
    assert known == {1: 0.2, 2: 0.1} and hopeless(known, (1, 2)) is None


def test_a_plane_holds_seconds_and_what_is_beyond_the_limit() -> None:
    seen = 0
    for seed, graph in with_memory(0):
        metrics = [metric(group) for group in graph.groups]
        for choice in all_choices(graph):
            if (whole := complete(graph, metrics, choice)) is not None:
                seconds, excess = plane(graph, whole.choice, whole.arcs)
                assert seconds == pytest.approx(whole.seconds), seed
                assert bool((excess <= 0).all()) == whole.fits, seed
                seen += 1
    assert seen > 100
