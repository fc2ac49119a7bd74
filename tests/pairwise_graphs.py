"""Random pairwise strategy graphs of every shape, small enough to try every choice, and the trying."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.search.pairwise.problem import Floats, Ints, Pairwise

MOST_CHOICES = 2_000


def random_pairwise(seed: int) -> Pairwise:
    """Trees, cycles, forests and dense graphs; hubs; functional, additive and forbidding edges; none to three members a
    node; memory that is slack, tight, infeasible or unlimited; a base; zero costs, ties, and costs over ten decades.
    One in three is stubborn: little in it is easy; in one in three most edges are functions.

    Costs and usages are integers, so that sums are exact and `==` may be asked of them.
    """
    rng = np.random.default_rng(seed)
    stubborn = seed % 3 == 0
    num_nodes = int(rng.integers(4, 8)) if stubborn else int(rng.integers(1, 9))
    num_options = rng.integers(1 + stubborn, rng.choice([2, 3, 5]) + 1 + stubborn, num_nodes)
    while num_options.prod() > MOST_CHOICES:
        num_options[np.argmax(num_options)] -= 1
    scale = 10 ** rng.integers(0 + 2 * stubborn, 11)
    zeros, forbidden = (0, 0) if stubborn else (rng.choice([0, 0.3, 0.9]), rng.choice([0, 0, 0.1, 0.4]))

    def costs(size: int, forbidden: float = forbidden) -> Floats:
        drawn = rng.integers(0, scale, size, endpoint=True).astype(float)
        drawn[rng.random(size) < zeros] = 0
        drawn[rng.random(size) < forbidden] = np.inf
        return drawn

    mixed = ["any", "any", "functional", "additive", "constant"]
    kinds = ["any"] if stubborn else ["functional", "functional", "any"] if seed % 3 == 1 else mixed
    ends = _edges(rng, num_nodes, rng.choice(["cycle", "sparse", "dense"] if stubborn else SHAPES))
    matrices = [_matrix(rng, rng.choice(kinds), num_options[a], num_options[b], costs) for a, b in ends]
    first_option = _starts(num_options)

    num_times = int(rng.integers(3 * stubborn, 9))
    counts = [1, 1, 2] if stubborn else [0, 1, 1, 1, 2, 3]
    members = [
        (node, *np.sort(rng.choice(num_times + 1, 2, replace=False)))
        for node in range(num_nodes if num_times else 0)
        for _ in range(rng.choice(counts))
    ]
    if rng.random() < 0.3:
        rng.shuffle(members)
    member_node, begin, end = np.array(members, np.int64).reshape(-1, 3).T.copy()
    widths = num_options[member_node]
    scale_of_bytes = rng.choice([1000] if stubborn else [1, 3, 1000])
    constant = rng.random(len(members)) < 0.3 * (not stubborn)
    taken = [
        np.full(width, rng.integers(0, scale_of_bytes)) if same else rng.integers(0, scale_of_bytes + 1, width)
        for width, same in zip(widths, constant, strict=True)
    ]
    problem = Pairwise(
        first_option=first_option,
        cost=costs(first_option[-1]),
        edge_a=np.array([a for a, _ in ends], np.int64),
        edge_b=np.array([b for _, b in ends], np.int64),
        first_pair=_starts(np.array([m.size for m in matrices], np.int64)),
        pair_cost=np.concatenate([np.zeros(0), *(matrix.ravel() for matrix in matrices)]),
        member_node=member_node,
        begin=begin,
        end=end,
        first_usage=_starts(widths),
        usage=np.concatenate([np.zeros(0), *taken]),
        base=rng.integers(0, scale_of_bytes + 1, num_times).astype(float) * rng.choice([0, 1]),
        limit=np.inf,
    )
    peaks = np.sort(every_choice(problem)[2])
    some = [peaks[len(peaks) // 2], peaks[len(peaks) // 10], peaks[0]]
    limit = rng.choice(some if stubborn else [np.inf, peaks[-1], *some, peaks[0] - 1])
    return replace(problem, limit=float(max(limit, 0)))


def every_choice(problem: Pairwise) -> tuple[Ints, Floats, Floats]:
    """All choices, a row each, with their costs and peaks."""
    sizes = problem.num_options()
    choices = np.stack(np.unravel_index(np.arange(sizes.prod(dtype=int)), tuple(sizes) or (1,)), 1)[:, : len(sizes)]
    costs = np.zeros(len(choices))
    for node, first in enumerate(problem.first_option[:-1]):
        costs += problem.cost[first + choices[:, node]]
    for a, b, first in zip(problem.edge_a, problem.edge_b, problem.first_pair, strict=False):
        costs += problem.pair_cost[first + choices[:, a] * sizes[b] + choices[:, b]]
    taken = np.tile(problem.base, (len(choices), 1))
    for m, node in enumerate(problem.member_node):
        own = problem.usage[problem.first_usage[m] + choices[:, node]]
        taken[:, problem.begin[m] : problem.end[m]] += own[:, None]
    return choices, costs, taken.max(1, initial=0)


def brute_force(problem: Pairwise) -> tuple[float, Ints] | None:
    """Cost and one choice of least cost among those that are allowed and fit; None where there is none."""
    choices, costs, peaks = every_choice(problem)
    costs[peaks > problem.limit] = np.inf
    best = int(np.argmin(costs))
    return (float(costs[best]), choices[best]) if costs[best] < np.inf else None


SHAPES = ["none", "tree", "chain", "star", "cycle", "sparse", "dense"]


def _edges(rng: np.random.Generator, num_nodes: int, shape: str) -> list[tuple[int, int]]:
    """No pair twice, either way round."""
    order = rng.permutation(num_nodes)
    later = range(1, num_nodes)
    pairs = {
        "none": [],
        "tree": [(rng.integers(i), i) for i in later],
        "chain": [(i - 1, i) for i in later],
        "star": [(0, i) for i in later],
        "cycle": [(i - 1, i) for i in later] + ([(0, num_nodes - 1)] if num_nodes > 2 else []),
        "sparse": [(i, j) for j in later for i in range(j) if rng.random() < 2 / num_nodes],
        "dense": [(i, j) for j in later for i in range(j) if rng.random() < 0.8],
    }[shape]
    flips = rng.random(len(pairs)) < 0.5
    turned = [(b, a) if flip else (a, b) for (a, b), flip in zip(pairs, flips, strict=True)]
    return [(int(order[a]), int(order[b])) for a, b in turned]


def _matrix(rng: np.random.Generator, kind: str, rows: int, columns: int, costs: Callable[..., Floats]) -> Floats:
    """Any costs; a function of one end; a sum of one function an end; or one number."""
    if kind == "any":
        return costs(rows * columns).reshape(rows, columns)
    if kind == "functional":
        partner = rng.integers(0, columns, rows)
        allowed = partner[:, None] == np.arange(columns)
        return np.where(allowed, costs(rows * columns).reshape(rows, columns), np.inf)
    if kind == "additive":
        return costs(rows)[:, None] + costs(columns, 0)[None, :]
    return np.full((rows, columns), costs(1, 0)[0])


def _starts(sizes: NDArray[np.int64]) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
