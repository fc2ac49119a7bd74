"""What is the best choice in a part of the graph while the rest stays as it is? Found exactly, part after part.

A region is some tens to thousands of nodes: around what the choice wastes by a dual bound (`guide`), around a node, or
those that take memory at one time and what is around them, so that memory can change hands. What stays fixed turns into
option costs and base bytes; what is left is reduced, bounded by messages below what the region costs now, and what that
does not close is a mixed program over the options and pairs that may still do better.
"""

from dataclasses import dataclass, replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.search.compiled import State, below, compiled, draw
from autopar.search.exact.array_worker import Worker
from autopar.search.pairwise.bound import DualBound
from autopar.search.pairwise.graph import Graph
from autopar.search.pairwise.guide import Guide
from autopar.search.pairwise.problem import Ints, Pairwise, evaluate, fits, ranges, starts, usage
from autopar.search.pairwise.reduce.pipeline import reduce
from autopar.search.pairwise.restricted import best_open

Flags = NDArray[np.bool_]

GAP = 0.05
"""Of what a region may still gain: where its program stops proving, for the next region gains more than the rest."""

_PASSES = 60
_SMALLEST, _GROWTH, _SHRINK = 8, 1.15, 0.7


@dataclass(slots=True)
class Size:
    """How many nodes a region has: more while they are solved in a fraction of the time allowed, fewer when not."""

    nodes: float = 150.0

    def adapt(self, spent: float, allowed: float, most: int) -> None:
        """After a region that took `spent` of `allowed` seconds."""
        if spent < 0.3 * allowed:
            self.nodes = min(self.nodes * _GROWTH, float(most))
        elif spent > 0.8 * allowed:
            self.nodes = max(self.nodes * _SHRINK, float(_SMALLEST))


@compiled
def grow(graph: Graph, seeds: Ints, size: int, state: State, inside: Flags) -> None:
    """Mark `size` nodes: the seeds, then neighbours of marked nodes, drawn at random; a new seed where none is left."""
    nodes = len(inside)
    front = np.empty(nodes, np.int64)
    reached = np.zeros(nodes, np.bool_)
    inside[:] = False
    width = marked = 0
    for u in seeds:
        if not reached[u]:
            reached[u] = True
            front[width] = u
            width += 1
    while marked < min(size, nodes):
        if width == 0:
            u = below(state, nodes)
            if reached[u]:
                continue
            reached[u] = True
        else:
            # Mostly the oldest: compact regions have few fixed neighbours for their size.
            k = 0 if draw(state) & np.uint64(3) else below(state, width)
            u = front[k]
            for i in range(k, width - 1):
                front[i] = front[i + 1]
            width -= 1
        inside[u] = True
        marked += 1
        for h in range(graph.first_half[u], graph.first_half[u + 1]):
            v = graph.other[h]
            if not reached[v]:
                reached[v] = True
                front[width] = v
                width += 1


def region(graph: Graph, guide: Guide, choice: Ints, size: int, state: State) -> Flags:
    """A random region: mostly around what is wasted, else around a node, or around nodes with memory to trade at a time
    that is nearly full."""
    problem = guide.problem
    inside = np.zeros(problem.num_nodes, np.bool_)
    seeds = np.array([below(state, problem.num_nodes)], np.int64)
    if below(state, 8) and len(wasteful := guide.seeds(choice, state)):
        seeds = wasteful
    elif len(graph.base) and below(state, 2):
        taken = usage(problem, choice)
        full = np.flatnonzero(taken >= 0.9 * taken.max())
        time = full[below(state, len(full))]
        alive = problem.member_node[(problem.begin <= time) & (time < problem.end)]
        if len(alive):
            several = max(size // (1 + below(state, 8)), 1)
            seeds = np.array([alive[below(state, len(alive))] for _ in range(several)], np.int64)
    grow(graph, seeds, size, state, inside)
    return inside


def induced(problem: Pairwise, choice: Ints, inside: Flags) -> Pairwise:
    """The problem on the nodes inside, in their order, with the others at their choice.

    evaluate(induced, part) differs from the whole's cost by a constant, and the bytes at every time are the same.
    """
    num = problem.num_options()
    nodes = np.flatnonzero(inside)
    number = np.cumsum(inside) - 1
    first_option = starts(num[nodes])
    cost = problem.cost[ranges(problem.first_option[nodes], num[nodes])]
    a, b = problem.edge_a, problem.edge_b
    for at_a, near, far in ((True, a, b), (False, b, a)):
        cut = np.flatnonzero(inside[near] & ~inside[far])
        width, stays = num[near[cut]], choice[far[cut]]
        option = ranges(np.zeros(len(cut), np.int64), width)
        columns = np.repeat(num[b[cut]], width)
        fixed = np.repeat(stays, width)
        pair = option * columns + fixed if at_a else fixed * columns + option
        paid = problem.pair_cost[np.repeat(problem.first_pair[cut], width) + pair]
        np.add.at(cost, np.repeat(first_option[number[near[cut]]], width) + option, paid)
    inner = np.flatnonzero(inside[a] & inside[b])
    size = problem.first_pair[inner + 1] - problem.first_pair[inner]
    member = inside[problem.member_node]
    kept = np.flatnonzero(member)
    width = num[problem.member_node[kept]]
    outside = problem.usage[problem.first_usage[:-1] + choice[problem.member_node]] * ~member
    return Pairwise(
        first_option=first_option,
        cost=cost,
        edge_a=number[a[inner]],
        edge_b=number[b[inner]],
        first_pair=starts(size),
        pair_cost=problem.pair_cost[ranges(problem.first_pair[inner], size)],
        member_node=number[problem.member_node[kept]],
        begin=problem.begin[kept],
        end=problem.end[kept],
        first_usage=starts(width),
        usage=problem.usage[ranges(problem.first_usage[kept], width)],
        base=_with(problem, outside),
        limit=problem.limit,
    )


def improve(guide: Guide, choice: Ints, inside: Flags, *, seconds: float, worker: Worker) -> Ints:
    """A choice that is no worse and differs inside only; if time allows, what it gains is within `GAP` of the most that
    can be gained inside. `choice` must fit."""
    stop = monotonic() + seconds
    problem = guide.problem
    part = induced(problem, choice, inside)
    stood = evaluate(part, choice[inside])
    try:
        reduced = reduce(_without_waste(part, guide, choice, inside), seconds=seconds)
    except InfeasibleError:
        return choice
    if not reduced.problem.num_nodes:
        return _put(problem, choice, inside, reduced.lift(np.zeros(0, np.int64)))
    dual = DualBound(reduced.problem, upper=stood - reduced.offset)
    dual.ascend(passes=_PASSES, seconds=max(stop - monotonic(), 0.01) / 3.0)
    left = dual.remainder()
    better = None if dual.closed else best_open(dual, left, dual.most, worker, stop, GAP)[0]
    return choice if better is None else _put(problem, choice, inside, reduced.lift(better))


def _without_waste(part: Pairwise, guide: Guide, choice: Ints, inside: Flags) -> Pairwise:
    """The region without options and pairs that alone waste more than all of it does now."""
    left = replace(guide.problem, cost=guide.remainder.option, pair_cost=guide.remainder.pair)
    left = induced(left, choice, inside)
    most = evaluate(left, choice[inside]) + guide.idle(choice)
    most += 1e-9 * abs(guide.remainder.bound)
    if not np.isfinite(most):
        return part
    cost = np.where(left.cost > most, np.inf, part.cost)
    return replace(part, cost=cost, pair_cost=np.where(left.pair_cost > most, np.inf, part.pair_cost))


def _put(problem: Pairwise, choice: Ints, inside: Flags, part: Ints) -> Ints:
    """The choice with another one inside, if that is better and fits."""
    other = choice.copy()
    other[inside] = part
    return other if evaluate(problem, other) < evaluate(problem, choice) and fits(problem, other) else choice


def _with(problem: Pairwise, taken: NDArray[np.float64]) -> NDArray[np.float64]:
    change = np.zeros(problem.num_times + 1)
    np.add.at(change, problem.begin, taken)
    np.subtract.at(change, problem.end, taken)
    return np.asarray(problem.base + np.cumsum(change[:-1]), np.float64)
