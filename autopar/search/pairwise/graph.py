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
from autopar.search.pairwise.messages import lay
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, ranges, starts


class Graph(NamedTuple):
    """Half-edges of node u: first_half[u]:first_half[u + 1]; h leads to other[h], twin[h] leads back, and the entry of
    h for option j of that and option i of u is block[first_block[h] + j * (options of u) + i]. Members of u likewise,
    sorted by node; `overlapping[u]` says that two members of u live at one time."""

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
    layout = lay(replace(problem, pair_cost=np.where(finite_pair, problem.pair_cost, wall)))
    by_node = np.argsort(problem.member_node, kind="stable")
    width = problem.num_options()[problem.member_node[by_node]]
    first_member = starts(np.bincount(problem.member_node, minlength=problem.num_nodes))
    begin, end = problem.begin[by_node], problem.end[by_node]
    overlapping = np.zeros(problem.num_nodes, np.bool_)
    _find_overlaps(first_member, begin, end, overlapping)
    return Graph(
        first_option=problem.first_option,
        cost=np.where(finite_cost, problem.cost, wall),
        first_half=layout.first_half,
        other=layout.other,
        twin=layout.twin,
        first_block=layout.first_block[layout.twin],
        block=layout.block,
        first_member=first_member,
        begin=begin,
        end=end,
        first_usage=starts(width),
        usage=problem.usage[ranges(problem.first_usage[:-1][by_node], width)],
        overlapping=overlapping,
        base=problem.base,
        limit=float(problem.limit),
        wall=wall,
    )


def _most(values: Floats, finite: NDArray[np.bool_], first: Ints) -> float:
    """Sum over groups (none empty) of the largest finite magnitude."""
    if len(first) < 2:
        return 0.0
    return float(np.maximum.reduceat(np.where(finite, np.abs(values), 0.0), first[:-1]).sum())


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
