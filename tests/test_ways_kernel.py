"""Shortest ways: kernels equal SciPy's on random graphs, with parallel arcs, loops and arcs that cost nothing."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autopar.search.exact.steiner import with_ties
from autopar.search.graph.ways_kernel import desk, everywhere, leaving, reached, shortest_arcs, spread

Graph = tuple[int, np.ndarray, np.ndarray, np.ndarray]


def random_graph(seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 25))
    num = int(rng.integers(0, 4 * n))
    price = with_ties(rng.integers(0, 9, num) * 1.0)
    return n, rng.integers(0, n, num), rng.integers(0, n, num), price


def cheapest(graph: Graph) -> np.ndarray:
    """Of the arcs from one vertex to another, what the cheapest takes."""
    n, source, target, price = graph
    matrix = np.full((n, n), np.inf)
    np.minimum.at(matrix, (source, target), price)
    return matrix


def distances(matrix: np.ndarray) -> np.ndarray:
    ends = np.nonzero(np.isfinite(matrix))
    found: np.ndarray = dijkstra(csr_array((matrix[ends], ends), shape=matrix.shape))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_distances_and_last_arcs(seed: int) -> None:
    graph = n, source, target, price = random_graph(seed)
    wanted = distances(cheapest(graph))
    own, last = everywhere(n, source, target, price)
    np.testing.assert_allclose(own, wanted)
    for a, b in np.argwhere(np.isfinite(wanted)):
        if a != b:
            arc = last[a, b]
            assert target[arc] == b
            np.testing.assert_allclose(wanted[a, source[arc]] + price[arc], wanted[a, b])


@pytest.mark.parametrize("seed", range(40))
def test_shortest_arcs_keep_all_distances_and_none_is_replaced_by_others(seed: int) -> None:
    graph = n, source, target, price = random_graph(seed)
    wanted = distances(cheapest(graph))
    kept = shortest_arcs(n, source, target, price)
    some = n, source[kept], target[kept], price[kept]
    np.testing.assert_allclose(distances(cheapest(some)), wanted)
    for arc in np.flatnonzero(kept):
        others = np.delete(np.flatnonzero(kept), np.flatnonzero(kept) == arc)
        left = distances(cheapest((n, source[others], target[others], price[others])))
        assert left[source[arc], target[arc]] > price[arc], "an arc that others replace was kept"


@pytest.mark.parametrize("seed", range(40))
def test_reached(seed: int) -> None:
    graph = n, source, target, _ = random_graph(seed)
    starts = np.random.default_rng(seed).integers(0, n, seed % 3)
    wanted = np.isfinite(distances(cheapest(graph)))[starts].any(axis=0) if len(starts) else np.zeros(n, bool)
    np.testing.assert_array_equal(reached(n, source, target, starts), wanted)


@pytest.mark.parametrize("seed", range(40))
def test_from_many_vertices_at_once(seed: int) -> None:
    """The least of any vertex's key and the way from there; last arcs lead back to a vertex whose key was its own."""
    graph = n, source, target, price = random_graph(seed)
    rng = np.random.default_rng(seed)
    start = np.where(rng.random(n) < 0.4, rng.integers(-5, 20, n) * 1.0, np.inf)
    key, last = start.copy(), np.full(n, -1)
    spread(*leaving(n, source), target, price, key, last, desk(n + len(price)))
    wanted = (start[:, None] + distances(cheapest(graph))).min(axis=0)
    np.testing.assert_allclose(key, wanted, atol=1e-12)
    for vertex in np.flatnonzero(np.isfinite(key)):
        at, paid = int(vertex), 0.0
        while last[at] >= 0:
            paid += price[last[at]]
            at = int(source[last[at]])
        assert key[vertex] == pytest.approx(start[at] + paid)
