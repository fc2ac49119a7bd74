"""Random pairwise strategy graphs of every shape, small enough to try every choice, and the trying."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from autopar.search.pairwise.problem import Floats, Ints, Pairwise, evaluate, fits, usage


def random_pairwise(seed: int) -> Pairwise:
    """Trees, cycles, forests and dense graphs; hubs; functional, additive and forbidding edges; none to three members a
    node; memory that is slack, tight, infeasible or unlimited; a base; zero costs, ties, and costs over ten decades.

    Costs and usages are integers, so that sums are exact and `==` may be asked of them.
    """
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 9))
    num_options = rng.integers(1, rng.choice([2, 3, 5]) + 1, num_nodes)
    while num_options.prod() > 5_000:
        num_options[np.argmax(num_options)] -= 1
    scale = 10 ** rng.integers(0, 11)
    zeros, forbidden = rng.choice([0, 0.3, 0.9]), rng.choice([0, 0, 0.1, 0.4])

    def costs(size: int, forbidden: float = forbidden) -> Floats:
        drawn = rng.integers(0, scale, size, endpoint=True).astype(float)
        drawn[rng.random(size) < zeros] = 0
        drawn[rng.random(size) < forbidden] = np.inf
        return drawn

    ends = _edges(rng, num_nodes)
    matrices = [_matrix(rng, num_options[a], num_options[b], costs) for a, b in ends]
    first_option = np.concatenate([[0], np.cumsum(num_options)])

    num_times = int(rng.integers(0, 9))
    members: list[tuple[int, int, int]] = []
    if num_times:
        for node in range(num_nodes):
            for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
                begin, end = np.sort(rng.choice(num_times + 1, 2, replace=False))
                members.append((node, int(begin), int(end)))
        if rng.random() < 0.3:
            rng.shuffle(members)
    member_node, begin, end = np.array(members, np.int64).reshape(-1, 3).T.copy()
    widths = num_options[member_node]
    byte_scale = rng.choice([1, 3, 1000])
    taken = [rng.integers(0, byte_scale, width, endpoint=True) * rng.choice([0, 1, 1]) for width in widths]
    base = rng.integers(0, byte_scale, num_times, endpoint=True).astype(float) * rng.choice([0, 1])
    problem = Pairwise(
        first_option=first_option,
        cost=costs(first_option[-1]),
        edge_a=np.array([a for a, _ in ends], np.int64),
        edge_b=np.array([b for _, b in ends], np.int64),
        first_pair=np.concatenate([[0], np.cumsum([m.size for m in matrices])]).astype(np.int64),
        pair_cost=np.concatenate([np.zeros(0), *(matrix.ravel() for matrix in matrices)]),
        member_node=member_node,
        begin=begin,
        end=end,
        first_usage=np.concatenate([[0], np.cumsum(widths)]).astype(np.int64),
        usage=np.concatenate([np.zeros(0), *taken]),
        base=base,
        limit=np.inf,
    )
    peaks = _peaks(problem)
    low, high = peaks.min(), peaks.max()
    limit = rng.choice([np.inf, high, low, low - 1, np.floor((low + high) / 2), np.floor(low + (high - low) / 4)])
    return replace(problem, limit=float(max(limit, 0)))


def brute_force(problem: Pairwise) -> tuple[float, Ints] | None:
    """Cost and one choice of least cost among those that are allowed and fit; None where there is none."""
    best: tuple[float, Ints] | None = None
    for options in product(*map(range, problem.num_options())):
        choice = np.array(options, np.int64)
        cost = evaluate(problem, choice)
        if cost < np.inf and (best is None or cost < best[0]) and fits(problem, choice):
            best = cost, choice
    return best


def _edges(rng: np.random.Generator, num_nodes: int) -> list[tuple[int, int]]:
    """No pair twice, either way round."""
    order = rng.permutation(num_nodes)
    shape = rng.choice(["none", "tree", "chain", "star", "cycle", "sparse", "dense"])
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


def _matrix(rng: np.random.Generator, rows: int, columns: int, costs: Callable[..., Floats]) -> Floats:
    """Any costs; a function of one end; a sum of one function an end; or one number."""
    kind = rng.choice(["any", "any", "functional", "additive", "constant"])
    if kind == "any":
        return costs(rows * columns).reshape(rows, columns)
    if kind == "functional":
        partner = rng.integers(0, columns, rows)
        allowed = partner[:, None] == np.arange(columns)
        return np.where(allowed, costs(rows * columns).reshape(rows, columns), np.inf)
    if kind == "additive":
        return costs(rows)[:, None] + costs(columns, 0)[None, :]
    return np.full((rows, columns), costs(1, 0)[0])


def _peaks(problem: Pairwise) -> Floats:
    """Of a sample of choices."""
    rng = np.random.default_rng(0)
    peaks = []
    for _ in range(20):
        choice = (rng.random(problem.num_nodes) * problem.num_options()).astype(np.int64)
        peaks.append(usage(problem, choice).max(initial=0))
    return np.array(peaks)
