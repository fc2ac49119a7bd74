"""A `Pairwise` problem as search kernels walk it: the neighbours of a node, the members of a node, no infinities.

Each edge is kept in both directions, its matrix row-major in the options of the *other* end, so that fixing a neighbour
and taking a minimum for a neighbour both read along memory. What is not allowed costs `wall`: more than everything that
is allowed can sum to, so that a search climbs down from a choice that breaks rules and needs no case for infinity.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints, Pairwise


class Graph(NamedTuple):
    """Half-edges of node u: first_half[u]:first_half[u + 1]; h leads to other[h], twin[h] leads
    back, and the entry of h for option j of that
    and option i of u is block[first_block[h] + j * (options of u) + i]. Members of u likewise, sorted by node;
    `overlapping[u]` says that two members of u live at one time."""

    first_option: Ints
    cost: Floats
    first_half: Ints
    other: Ints
    twin: Ints
    first_block: Ints
    block: Floats
    first_member: Ints
    begin: Ints
    end: Ints
    first_usage: Ints
    usage: Floats
    overlapping: NDArray[np.bool_]
    base: Floats
    limit: float
    wall: float


def graph_of(problem: Pairwise) -> Graph:
    """The same problem with neighbours at hand; without members where memory is unlimited."""
    if problem.limit == np.inf:
        none, empty = np.zeros(0, np.int64), np.zeros(0)
        problem = replace(problem, member_node=none, begin=none, end=none, usage=empty, base=empty, limit=0.0)
        problem = replace(problem, first_usage=np.zeros(1, np.int64))
    finite_cost, finite_pair = np.isfinite(problem.cost), np.isfinite(problem.pair_cost)
    wall = 4.0 * _most(problem.cost, finite_cost, problem.first_option)
    wall += 4.0 * _most(problem.pair_cost, finite_pair, problem.first_pair) + 1.0
    num, edges = problem.num_options(), problem.num_edges
    owner = np.concatenate([problem.edge_a, problem.edge_b])
    other = np.concatenate([problem.edge_b, problem.edge_a])
    edge = np.tile(np.arange(edges, dtype=np.int64), 2)
    by_owner = np.argsort(owner, kind="stable")
    place_of = np.empty(2 * edges, np.int64)
    place_of[by_owner] = np.arange(2 * edges)
    size = (num[owner] * num[other])[by_owner]
    first_block = _starts(size)
    block = np.empty(int(first_block[-1]))
    swapped = owner[by_owner] == problem.edge_b[edge[by_owner]]
    pairs = np.where(finite_pair, problem.pair_cost, wall)
    _lay(pairs, problem.first_pair, edge[by_owner], swapped, num[owner[by_owner]], num[other[by_owner]], block)
    by_node = np.argsort(problem.member_node, kind="stable")
    width = num[problem.member_node[by_node]]
    first_usage = _starts(width)
    place = np.repeat(problem.first_usage[:-1][by_node] - first_usage[:-1], width) + np.arange(first_usage[-1])
    first_member = _starts(np.bincount(problem.member_node, minlength=problem.num_nodes))
    begin, end = problem.begin[by_node], problem.end[by_node]
    overlapping = np.zeros(problem.num_nodes, np.bool_)
    _find_overlaps(first_member, begin, end, overlapping)
    return Graph(
        first_option=problem.first_option,
        cost=np.where(finite_cost, problem.cost, wall),
        first_half=_starts(np.bincount(owner, minlength=problem.num_nodes)),
        other=other[by_owner],
        twin=place_of[(by_owner + edges) % max(2 * edges, 1)],
        first_block=first_block,
        block=block,
        first_member=first_member,
        begin=begin,
        end=end,
        first_usage=first_usage,
        usage=problem.usage[place],
        overlapping=overlapping,
        base=problem.base,
        limit=float(problem.limit),
        wall=wall,
    )


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _most(values: Floats, finite: NDArray[np.bool_], first: Ints) -> float:
    """Sum over groups (none empty) of the largest finite magnitude."""
    return (
        float(np.maximum.reduceat(np.where(finite, np.abs(values), 0.0), first[:-1]).sum()) if len(first) > 1 else 0.0
    )


@compiled
def _lay(
    pairs: Floats, first_pair: Ints, edge: Ints, swapped: NDArray[np.bool_], own: Ints, others: Ints, block: Floats
) -> None:
    at = 0
    for h in range(len(edge)):
        start = first_pair[edge[h]]
        for j in range(others[h]):
            for i in range(own[h]):
                block[at] = pairs[start + (j * own[h] + i if swapped[h] else i * others[h] + j)]
                at += 1


@compiled
def _find_overlaps(first_member: Ints, begin: Ints, end: Ints, overlapping: NDArray[np.bool_]) -> None:
    for u in range(len(overlapping)):
        for m in range(first_member[u], first_member[u + 1]):
            for k in range(first_member[u], m):
                if begin[m] < end[k] and begin[k] < end[m]:
                    overlapping[u] = True


@compiled
def take(graph: Graph, u: int, option: int, sign: float, change: Floats) -> None:
    """Add sign * what option of u takes to the change of bytes between one time and the next."""
    for m in range(graph.first_member[u], graph.first_member[u + 1]):
        nbytes = sign * graph.usage[graph.first_usage[m] + option]
        change[graph.begin[m]] += nbytes
        change[graph.end[m]] -= nbytes


@compiled
def usage_of(graph: Graph, choice: Ints) -> Floats:
    """Bytes at every time."""
    change = np.zeros(len(graph.base) + 1)
    for u in range(len(choice)):
        take(graph, u, choice[u], 1.0, change)
    taken = np.empty(len(graph.base))
    level = 0.0
    for t in range(len(taken)):
        level += change[t]
        taken[t] = graph.base[t] + level
    return taken


@compiled
def cost_of(graph: Graph, choice: Ints) -> float:
    """Cost of a choice with `wall` for what is not allowed."""
    total = 0.0
    for u in range(len(choice)):
        total += graph.cost[graph.first_option[u] + choice[u]]
        options = graph.first_option[u + 1] - graph.first_option[u]
        for h in range(graph.first_half[u], graph.first_half[u + 1]):
            if graph.other[h] > u:
                total += graph.block[graph.first_block[h] + choice[graph.other[h]] * options + choice[u]]
    return total
