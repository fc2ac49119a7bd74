"""Labels on vertices prove what the linear relaxation proves, and never more than the optimum takes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.search.exact import dual_ascent, relaxation
from autopar.search.exact.completion import Completed, complete
from autopar.search.exact.formulation import formulate
from autopar.search.exact.priced_memory import priced
from autopar.search.exact.reduction import reduce
from autopar.search.exact.relaxation import relax
from autopar.search.exact.steiner import metric
from autopar.search.graph.strategy_graph import Consumer, Group, Node, StrategyGraph, evaluate
from tests import brute_force
from tests.llama_like import llama_like
from tests.strategy_graphs import random_graph

BLOCK, GRAPHS = 50, 200
NEAR = 1e-4
"""How near the program's optimum, as a part of it."""


def reduced(seed: int, **options: bool) -> StrategyGraph | None:
    """A random graph without memory and without what has no partner, every third with edges that cost less than
    nothing; None where nothing is compatible."""
    graph = replace(random_graph(seed), memory=None)
    if seed % 3 == 0:
        graph = replace(graph, edges=tuple(replace(edge, seconds=edge.seconds - 2.0) for edge in graph.edges))
    try:
        return reduce(graph, **options).graph
    except InfeasibleError:
        return None


def every_solution(graph: StrategyGraph) -> Iterator[Completed]:
    metrics = [metric(group) for group in graph.groups]
    for choice in product(*(range(len(node.seconds)) for node in graph.nodes)):
        if (found := complete(graph, metrics, np.array(choice))) is not None:
            yield found


@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_no_solution_takes_less_than_the_bound_and_all_that_it_uses_adds(first: int) -> None:
    """seconds >= bound + extra of every option used + extra of every arc used, whatever the solution."""
    for seed in range(first, first + BLOCK):
        graph = reduced(seed, replaces_arcs=bool(seed % 2))
        if graph is None or (dual := dual_ascent.dual_ascent(graph)) is None:
            continue
        options, arcs = dual.extra
        assert all((part >= -1e-9).all() for part in [*options, *arcs]), seed
        for found in every_solution(graph):
            extra = sum(float(part[option]) for part, option in zip(options, found.choice, strict=True))
            extra += sum(float(part[used].sum()) for part, used in zip(arcs, found.arcs, strict=True))
            assert found.seconds >= dual.bound + extra - 1e-9, seed


@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_what_labels_suggest_is_a_solution_and_takes_what_is_said(first: int) -> None:
    found = 0
    for seed in range(first, first + BLOCK):
        graph = reduced(seed)
        dual = None if graph is None else dual_ascent.dual_ascent(graph)
        if dual is not None and dual.found is not None:
            assert evaluate(graph, *dual.found) == pytest.approx(dual.seconds, rel=1e-12, abs=1e-12), seed
            assert dual.seconds >= dual.bound - 1e-9, seed
            found += 1
    assert found > BLOCK / 2


@pytest.mark.parametrize("sweeps", [2, dual_ascent.MOST_SWEEPS])
@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_the_relaxation_is_that_of_the_program(first: int, sweeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the ascent comes to its end or a program has to help, which with two sweeps is often."""
    helped, whole = [], relaxation._whole

    def noted(*given: Any) -> relaxation.Relaxed:
        helped.append(given)
        return whole(*given)

    monkeypatch.setattr(relaxation, "_whole", noted)
    monkeypatch.setattr(dual_ascent, "MOST_SWEEPS", sweeps)
    for seed in range(first, first + BLOCK):
        graph = reduced(seed, replaces_arcs=bool(seed % 2))
        if graph is None:
            continue
        linear = formulate(graph)
        answer = linear.model.solve(relaxed=True)
        if answer.infeasible:
            with pytest.raises(InfeasibleError):
                relax(graph)
            continue
        found, least = relax(graph), answer.bound / linear.scale
        assert least - NEAR * abs(least) - 1e-9 <= found.bound <= least + 1e-7 * abs(least) + 1e-9, seed
        assert found.extra is not None and found.mixed is not None, seed
        assert_solves(graph, found.mixed)
        assert found.mixed.seconds <= found.bound + NEAR * abs(found.bound) + 1e-7, seed
        half = least - 0.5 * abs(least)
        early = relax(graph, enough=half)
        assert half - 1e-9 <= early.bound <= least + 1e-7 * abs(least) + 1e-9, seed
        ends = [found, early, relax(graph, enough=least), relax(graph, enough=least - 0.01 * abs(least))]
        for end in ends:  # wherever it ended, what is beyond the bound is beyond this one
            assert_extra(graph, end)
    assert helped or sweeps > 2


def assert_extra(graph: StrategyGraph, relaxed: relaxation.Relaxed) -> None:
    """Every solution takes the bound and what any option or arc that it uses takes beyond it."""
    if relaxed.extra is None:
        return
    options, arcs = relaxed.extra
    for found in every_solution(graph):
        used = [part[option] for part, option in zip(options, found.choice, strict=True)]
        used += [value for part, taken in zip(arcs, found.arcs, strict=True) for value in part[taken]]
        assert found.seconds >= relaxed.bound + max(used) - 1e-6 * max(1.0, abs(relaxed.bound))


def assert_solves(graph: StrategyGraph, mixed: relaxation.Mixed) -> None:
    """One unit of every node, and of a tensor as much leaves what is given as is wanted elsewhere."""
    assert all(used.sum() == pytest.approx(1.0, abs=1e-6) for used in mixed.options)
    seconds = sum(float(node.seconds @ used) for node, used in zip(graph.nodes, mixed.options, strict=True))
    seconds += sum(float(group.arc_seconds @ used) for group, used in zip(graph.groups, mixed.arcs, strict=True))
    if not graph.edges:
        assert seconds == pytest.approx(mixed.seconds, rel=1e-6, abs=1e-6)
    for group, used in zip(graph.groups, mixed.arcs, strict=True):
        for consumer in group.consumers:
            for vertex in range(group.num_vertices):
                into = float(used[(group.arc_target == vertex) & (group.arc_source != vertex)].sum())
                wanted = float(mixed.options[consumer.node][consumer.wants == vertex].sum())
                given = float(mixed.options[group.producer][group.gives == vertex].sum())
                assert wanted <= given + into + 1e-6


def tree(seed: int) -> StrategyGraph:
    """Each node but the first shares one tensor with one before it, as its producer or its consumer."""
    rng = np.random.default_rng(seed)
    nodes = [Node(name=f"node{i}", seconds=rng.random(rng.integers(1, 5))) for i in range(rng.integers(2, 7))]
    groups = []
    for i in range(1, len(nodes)):
        ends = [int(rng.integers(i)), i]
        producer, consumer = ends if rng.random() < 0.5 else ends[::-1]
        num = int(rng.integers(2, 6))
        ring, others = rng.permutation(num), rng.integers(0, num, (2, 4))
        wants = rng.integers(-1 if rng.random() < 0.3 else 0, num, len(nodes[consumer].seconds))
        groups.append(
            Group(
                name=f"tensor{i}",
                producer=producer,
                gives=rng.integers(0, num, len(nodes[producer].seconds)),
                consumers=(Consumer(node=consumer, wants=wants),),
                num_vertices=num,
                arc_source=np.concatenate([ring, others[0]]),
                arc_target=np.concatenate([np.roll(ring, 1), others[1]]),
                arc_seconds=rng.random(num + 4) * (rng.random(num + 4) < 0.8),
            )
        )
    return StrategyGraph(nodes=tuple(nodes), groups=tuple(groups))


@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_on_a_tree_the_bound_is_the_optimum(first: int) -> None:
    """There the ascent is dynamic programming: two sweeps, and nothing is left to add."""
    for seed in range(first, first + BLOCK):
        graph = tree(seed)
        dual = dual_ascent.dual_ascent(graph)
        best = brute_force.solve(graph).seconds
        assert dual is not None
        assert dual.bound == pytest.approx(best, rel=1e-9), seed
        assert dual.seconds == pytest.approx(best, rel=1e-9), seed


def test_the_bound_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reduce(replace(llama_like((2, 4)), memory=None), replaces_arcs=False).graph
    bounds = []
    monkeypatch.setattr(dual_ascent, "STANDS", -1.0)
    for sweeps in (2, 4, 8, 16, 32):
        monkeypatch.setattr(dual_ascent, "MOST_SWEEPS", sweeps)
        dual = dual_ascent.dual_ascent(graph)
        assert dual is not None
        bounds.append(dual.bound)
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0]


def test_it_ends_where_the_bound_is_enough() -> None:
    graph = reduce(replace(llama_like((2, 4)), memory=None)).graph
    whole = dual_ascent.dual_ascent(graph)
    assert whole is not None
    early = dual_ascent.dual_ascent(graph, 0.5 * whole.bound)
    assert early is not None
    assert early.found is None
    assert 0.5 * whole.bound <= early.bound < whole.bound


def test_arcs_of_less_than_nothing_are_left_to_the_program() -> None:
    graph = tree(3)
    group = graph.groups[0]
    seconds = group.arc_seconds.copy()
    seconds[0] = -1.0
    assert dual_ascent.dual_ascent(replace(graph, groups=(replace(group, arc_seconds=seconds),))) is None


@pytest.mark.parametrize("price", [0.0, 1e-11, 1e-9])
def test_at_prices_of_memory_it_is_the_relaxation_of_a_whole_step(price: float) -> None:
    graph = llama_like((4, 8), limit=22.3e9)
    assert graph.memory is not None
    cheap = reduce(priced(graph, np.full(len(graph.memory.base), price))).graph
    linear = formulate(cheap)
    least = linear.model.solve(relaxed=True).bound / linear.scale
    assert relax(cheap).bound == pytest.approx(least, rel=NEAR)
