"""A strategy graph without redistribution groups as flat arrays: what the kernels of this folder read.

    minimise  sum over nodes of cost[option]  +  sum over edges of pair_cost[option of a, option of b]
    such that base[t] + sum of usage[option] over members with begin <= t < end  is at most limit, at every time t

A *member* is memory that a node's option takes over an interval of time. In a contest graph every node has one at most;
where one node has taken in others (a reduction) it has several. inf is a cost that is not allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairwise:
    """Options of node i: `cost[first_option[i]:first_option[i + 1]]`.

    Edge e couples nodes `edge_a[e] != edge_b[e]`, at most one edge a pair of nodes; its matrix lies row-major in the
    options of a at `pair_cost[first_pair[e]:first_pair[e + 1]]`. Member m belongs to `member_node[m]`, lives at times
    `begin[m] <= t < end[m]`, and takes `usage[first_usage[m]:first_usage[m + 1]]` bytes, one value an option of its
    node (>= 0, and begin < end).
    """

    first_option: Ints
    cost: Floats
    edge_a: Ints
    edge_b: Ints
    first_pair: Ints
    pair_cost: Floats
    member_node: Ints
    begin: Ints
    end: Ints
    first_usage: Ints
    usage: Floats
    base: Floats
    """Bytes taken at every time, whatever is chosen; its length is the number of times."""
    limit: float
    """inf where memory is unlimited."""

    @property
    def num_nodes(self) -> int:
        return len(self.first_option) - 1

    @property
    def num_edges(self) -> int:
        return len(self.edge_a)

    @property
    def num_times(self) -> int:
        return len(self.base)

    def num_options(self) -> Ints:
        """Of every node."""
        return np.diff(self.first_option)


def evaluate(problem: Pairwise, choice: Ints) -> float:
    """Cost of one option a node, memory aside; inf where some option or pair is not allowed."""
    columns = problem.num_options()[problem.edge_b]
    pairs = problem.first_pair[:-1] + choice[problem.edge_a] * columns + choice[problem.edge_b]
    return float(problem.cost[problem.first_option[:-1] + choice].sum() + problem.pair_cost[pairs].sum())


def usage(problem: Pairwise, choice: Ints) -> Floats:
    """Bytes at every time."""
    taken = problem.usage[problem.first_usage[:-1] + choice[problem.member_node]]
    change = np.zeros(problem.num_times + 1)
    np.add.at(change, problem.begin, taken)
    np.subtract.at(change, problem.end, taken)
    return np.asarray(problem.base + np.cumsum(change[:-1]), np.float64)


def fits(problem: Pairwise, choice: Ints) -> bool:
    """Whether the limit holds at every time."""
    return not problem.num_times or bool(usage(problem, choice).max() <= problem.limit)


def starts(sizes: Sequence[int] | Ints) -> Ints:
    """Where parts of these sizes begin, one after the other, and where the last ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def ranges(first: Ints, sizes: Ints) -> Ints:
    """first[0], first[0] + 1, ... (sizes[0] of them), first[1], ..."""
    return np.repeat(first - starts(sizes)[:-1], sizes) + np.arange(sizes.sum(), dtype=np.int64)


def joined(parts: Sequence[Floats]) -> Floats:
    """One array of all."""
    return np.concatenate([np.zeros(0), *parts])
