"""The mixed program finds what trying everything finds, proves it, and says what would do where nothing fits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.search.exact import ilp, memory_prices
from autopar.search.exact.completion import complete, lean
from autopar.search.exact.highs_log import Progress
from autopar.search.exact.steiner import cheapest_arcs, metric
from autopar.search.graph.strategy_graph import (
    ArcMemory,
    Consumer,
    Edge,
    Group,
    KeptMemory,
    Memory,
    Node,
    NodeMemory,
    Solution,
    StrategyGraph,
    evaluate,
    usage,
)
from tests import brute_force
from tests.llama_like import llama_like
from tests.strategy_graphs import random_graph

BLOCK, GRAPHS = 20, 200


def solved(solver, graph: StrategyGraph, **options) -> Solution | InfeasibleError:
    try:
        return solver(graph, **options)
    except InfeasibleError as error:
        return error


@pytest.mark.parametrize("first", range(0, GRAPHS, BLOCK))
def test_equals_brute_force_on_random_graphs(first: int) -> None:
    for seed in range(first, first + BLOCK):
        graph = random_graph(seed)
        expected, found = solved(brute_force.solve, graph), solved(ilp.solve, graph, relative_gap=0.0)
        assert type(found) is type(expected), seed
        if isinstance(found, InfeasibleError):
            assert (found.least_nbytes is None) == (expected.least_nbytes is None), seed
            if found.least_nbytes is not None:
                assert found.least_nbytes == pytest.approx(expected.least_nbytes, rel=1e-6), seed
            continue
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-6, abs=1e-9), seed
        assert found.bound <= expected.seconds * (1 + 1e-7) + 1e-9, seed
        assert found.status == "optimal", seed
        assert_honest(graph, found)


def assert_honest(graph: StrategyGraph, solution: Solution) -> None:
    """What the solution says of itself is what the graph says, and it stays within the limit."""
    assert evaluate(graph, solution.choice, solution.arcs) == solution.seconds
    assert solution.bound <= solution.seconds
    if graph.memory is not None:
        assert (usage(graph, solution.choice, solution.arcs) <= graph.memory.limit).all()


def test_random_graphs_are_of_every_kind() -> None:
    """The oracle test is worth what its graphs are: each outcome, with shared arcs and binding limits among them."""
    kinds = {"no limit": 0, "slack": 0, "binding": 0, "too little": 0, "incompatible": 0, "shared": 0}
    for seed in range(GRAPHS):
        graph = random_graph(seed)
        found = solved(brute_force.solve, graph)
        if isinstance(found, InfeasibleError):
            kinds["incompatible" if found.least_nbytes is None else "too little"] += 1
            continue
        kinds["shared"] += any(
            len(g.consumers) > 1 and len(a) > 0 for g, a in zip(graph.groups, found.arcs, strict=True)
        )
        if graph.memory is None:
            kinds["no limit"] += 1
        else:
            free = brute_force.solve(replace(graph, memory=None))
            kinds["binding" if free.seconds < found.seconds else "slack"] += 1
    assert min(kinds.values()) >= 10, kinds


@pytest.mark.parametrize("first", range(240, 540, 100))
def test_few_prices_leave_more_to_the_program_and_nothing_out(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last prices rule out is ruled out within the limit: with one price or two that is seldom what is near
    the optimum, and the program decides."""
    widened, widen = [], ilp._Run._widen

    def noted(self: ilp._Run, *given: Any, **options: Any) -> Any:
        widened.append(options["phase"])
        return widen(self, *given, **options)

    monkeypatch.setattr(ilp._Run, "_widen", noted)
    for seed in range(first, first + 100):
        graph = random_graph(seed)
        if graph.memory is None:
            continue
        expected = solved(brute_force.solve, graph)
        for prices in (1, 2, 3):
            monkeypatch.setattr(memory_prices, "EVALUATIONS", prices)
            found = solved(ilp.solve, graph, relative_gap=0.0)
            assert type(found) is type(expected), seed
            if isinstance(found, Solution):
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-6, abs=1e-9), seed
                assert found.bound <= expected.seconds * (1 + 1e-7) + 1e-9, seed
    assert widened.count("within limit") > 5


@pytest.mark.parametrize("first", range(0, 60, BLOCK))
def test_a_loose_gap_is_kept_and_proved(first: int) -> None:
    for seed in range(first, first + BLOCK):
        graph = random_graph(seed)
        found, expected = solved(ilp.solve, graph, relative_gap=0.2), solved(brute_force.solve, graph)
        if isinstance(found, Solution):
            assert_honest(graph, found)
            assert found.bound <= expected.seconds * (1 + 1e-7) + 1e-9, seed
            assert found.gap <= 0.2 + 1e-9, seed


@pytest.mark.parametrize("first", range(0, 60, BLOCK))
def test_a_hint_changes_no_optimum(first: int) -> None:
    for seed in range(first, first + BLOCK):
        graph = random_graph(seed)
        hint = np.array([len(node.seconds) - 1 for node in graph.nodes])
        plain, hinted = (solved(ilp.solve, graph, relative_gap=0.0, hint=h) for h in (None, hint))
        assert type(plain) is type(hinted), seed
        if isinstance(plain, Solution):
            assert hinted.seconds == pytest.approx(plain.seconds, rel=1e-6, abs=1e-9), seed


def diamond(shared: float, limit: float | None = None) -> StrategyGraph:
    """One tensor, given at 0, wanted at 2 and 3: each directly for 3, or both over 1 for `shared` + 1 + 1.

    The producer can also give at 4, dearer by 5, from where both are reached for nothing.
    """
    return StrategyGraph(
        nodes=(
            Node(name="producer", seconds=np.array([0.0, 5.0])),
            Node(name="left", seconds=np.zeros(1)),
            Node(name="right", seconds=np.zeros(1)),
        ),
        groups=(
            Group(
                name="tensor",
                producer=0,
                gives=np.array([0, 4]),
                consumers=(Consumer(node=1, wants=np.array([2])), Consumer(node=2, wants=np.array([3]))),
                num_vertices=5,
                arc_source=np.array([0, 0, 0, 1, 1, 4, 4]),
                arc_target=np.array([2, 3, 1, 2, 3, 2, 3]),
                arc_seconds=np.array([3.0, 3.0, shared, 1.0, 1.0, 0.0, 0.0]),
            ),
        ),
        memory=None
        if limit is None
        else Memory(
            limit=limit,
            base=np.zeros(1),
            arcs=(ArcMemory(group=0, nbytes=np.array([1.0, 1.0, 9.0, 1.0, 1.0, 4.0, 4.0]), coefficient=np.ones(1)),),
        ),
    )


def test_an_arc_is_paid_once_and_that_decides() -> None:
    """Priced for each consumer the way over 1 costs 2 * (2.5 + 1) = 7 and the producer would give at 4 for 5."""
    found = ilp.solve(diamond(2.5), relative_gap=0.0)
    assert found.seconds == pytest.approx(4.5)
    assert found.choice[0] == 0
    assert found.arcs[0].tolist() == [2, 3, 4]
    assert ilp.solve(diamond(3.5), relative_gap=0.0).seconds == pytest.approx(5.0)


@pytest.mark.parametrize(("limit", "seconds"), [(11.0, 4.5), (10.0, 5.0), (8.0, 5.0), (7.0, 6.0), (2.0, 6.0)])
def test_copies_on_the_way_take_memory(limit: float, seconds: float) -> None:
    """The shared way takes 11 bytes, the dearer producer 8, two direct arcs 2; no mixture of halves of these."""
    assert ilp.solve(diamond(2.5, limit), relative_gap=0.0).seconds == pytest.approx(seconds)
    assert brute_force.solve(diamond(2.5, limit)).seconds == pytest.approx(seconds)


def test_too_little_for_the_copies_says_the_least() -> None:
    with pytest.raises(InfeasibleError, match=r"1e-09 GB.*least that would do is 2e-09 GB") as caught:
        ilp.solve(diamond(2.5, 1.0))
    assert caught.value.least_nbytes == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_arcs_to_many_vertices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, 9, (2, 26))
    group = Group(
        name="tensor",
        producer=0,
        gives=np.zeros(1, np.int64),
        consumers=(),
        num_vertices=9,
        arc_source=source,
        arc_target=target,
        arc_seconds=rng.integers(0, 9, 26).astype(float),
    )
    wanted = frozenset(rng.integers(0, 9, 5).tolist())
    expected = brute_force.cheapest_set(group, 0, wanted)
    if not expected:
        with pytest.raises(ValueError, match=r"reach|no path"):
            cheapest_arcs(metric(group), 0, set(wanted))
        return
    found = cheapest_arcs(metric(group), 0, set(wanted))
    assert group.arc_seconds[found].sum() == group.arc_seconds[expected[0]].sum()
    assert len(set(target[found].tolist())) == len(found)


def test_a_free_cycle_conjures_nothing() -> None:
    """0 <-> 1 is free both ways, but the tensor is given at 2, and 2 -> 0 costs 7."""
    graph = StrategyGraph(
        nodes=(Node(name="producer", seconds=np.zeros(1)), Node(name="user", seconds=np.zeros(1))),
        groups=(
            Group(
                name="tensor",
                producer=0,
                gives=np.array([2]),
                consumers=(Consumer(node=1, wants=np.array([1])), Consumer(node=1, wants=np.array([0]))),
                num_vertices=3,
                arc_source=np.array([0, 1, 2]),
                arc_target=np.array([1, 0, 0]),
                arc_seconds=np.array([0.0, 0.0, 7.0]),
            ),
        ),
    )
    found = ilp.solve(graph, relative_gap=0.0)
    assert found.seconds == 7.0
    assert found.arcs[0].tolist() == [0, 2]


def test_what_is_kept_twice_is_counted_once() -> None:
    """Given and wanted at one vertex: 6 bytes, not 12; wanted elsewhere: both."""
    nodes = (Node(name="producer", seconds=np.zeros(1)), Node(name="user", seconds=np.array([1.0, 0.0])))
    group = Group(
        name="tensor",
        producer=0,
        gives=np.array([0]),
        consumers=(Consumer(node=1, wants=np.array([0, 1])),),
        num_vertices=2,
        arc_source=np.array([0]),
        arc_target=np.array([1]),
        arc_seconds=np.zeros(1),
    )
    kept = KeptMemory(group=0, nbytes=np.full(2, 6.0), coefficient=np.ones(1), keeps_given=True, keepers=(0,))
    for limit, seconds in ((12.0, 0.0), (11.0, 1.0), (6.0, 1.0)):
        memory = Memory(limit=limit, base=np.zeros(1), kept=(kept,))
        found = ilp.solve(StrategyGraph(nodes=nodes, groups=(group,), memory=memory), relative_gap=0.0)
        assert found.seconds == seconds
    with pytest.raises(InfeasibleError) as caught:
        memory = Memory(limit=5.0, base=np.zeros(1), kept=(kept,))
        ilp.solve(StrategyGraph(nodes=nodes, groups=(group,), memory=memory))
    assert caught.value.least_nbytes == pytest.approx(6.0)


def test_the_peak_is_a_maximum_over_moments() -> None:
    """Two terms of 6 bytes at different moments fit 6 bytes; at one moment they need 12."""
    nodes = tuple(Node(name=str(i), seconds=np.array([0.0, 1.0])) for i in range(2))
    for second, seconds in (([0.0, 1.0], 0.0), ([1.0, 0.0], 1.0)):
        terms = tuple(
            NodeMemory(node=i, nbytes=np.array([6.0, 0.0]), coefficient=np.array(coefficient))
            for i, coefficient in enumerate(([1.0, 0.0], second))
        )
        graph = StrategyGraph(nodes=nodes, memory=Memory(limit=6.0, base=np.zeros(2), nodes=terms))
        assert ilp.solve(graph, relative_gap=0.0).seconds == seconds


def test_incompatible_options_are_no_matter_of_memory() -> None:
    nodes = tuple(Node(name=f"n{i}", seconds=np.zeros(2)) for i in range(3))
    differ = np.array([[np.inf, 0.0], [0.0, np.inf]])
    triangle = tuple(Edge(a=a, b=b, seconds=differ) for a, b in ((0, 1), (1, 2), (0, 2)))
    graph = StrategyGraph(nodes=nodes, edges=triangle, memory=Memory(limit=1e9, base=np.zeros(1)))
    with pytest.raises(InfeasibleError, match="no choice of options is compatible") as caught:
        ilp.solve(graph)
    assert caught.value.least_nbytes is None


def test_a_binding_limit_on_two_axes_is_proved() -> None:
    graph = llama_like((8, 8), limit=22.3e9)
    seen: list[Progress] = []
    found = ilp.solve(graph, relative_gap=1e-4, on_progress=seen.append)
    assert_honest(graph, found)
    assert found.status == "optimal"
    assert found.gap <= 1e-4
    free = ilp.solve(replace(graph, memory=None), relative_gap=5e-3)
    assert free.seconds < found.seconds
    assert {progress.phase for progress in seen} == {"without limit", "within limit"}
    assert len(seen) > 3, "HiGHS's own lines were not read"
    assert all(progress.bound <= progress.incumbent * (1 + 1e-6) for progress in seen)


def test_no_time_is_an_error_unless_a_hint_fits() -> None:
    graph = llama_like((8, 8), limit=25e9)
    with pytest.raises(ilp.SearchTimeoutError, match="no solution was found in 1e-06 s"):
        ilp.solve(graph, seconds=1e-6)
    best = ilp.solve(graph)
    found = ilp.solve(graph, seconds=1e-6, hint=best.choice)
    assert found.status == "time limit"
    assert found.seconds == pytest.approx(best.seconds)
    assert 0 < found.bound < found.seconds


def test_brute_force_refuses_what_is_too_large() -> None:
    with pytest.raises(ValueError, match="too many to enumerate"):
        brute_force.solve(llama_like((2, 2)))


def test_arcs_that_fit_are_found_where_the_cheapest_do_not() -> None:
    """For the choice of the best solution, at prices of memory that make bytes dear: never below the best."""
    seen = 0
    for seed in range(400):
        graph = random_graph(seed)
        if graph.memory is None:
            continue
        try:
            best = brute_force.solve(graph)
        except InfeasibleError:
            continue
        metrics = [metric(group) for group in graph.groups]
        cheapest = complete(graph, metrics, best.choice)
        if cheapest is None or cheapest.fits:
            continue
        found = lean(graph, metrics, best.choice, np.full(len(graph.memory.base), 10.0))
        if found is not None:
            assert found.fits and found.seconds >= best.seconds * (1 - 1e-9)
            assert found.seconds == pytest.approx(evaluate(graph, found.choice, found.arcs))
            seen += 1
    assert seen
