"""A strategy graph without groups as flat arrays.

Memory that a node's option takes at several moments becomes one member for each run of moments at which its coefficient
stays the same. What even the smallest option takes joins the base, so that usages are never negative.
"""

from itertools import pairwise

import numpy as np

from autopar.search.graph.strategy_graph import Edge, StrategyGraph
from autopar.search.pairwise.problem import Floats, Pairwise, joined, starts


def flatten(graph: StrategyGraph) -> Pairwise:
    """The same problem: choices keep their meaning, costs and bytes are equal. ValueError if it has groups."""
    if graph.groups:
        raise ValueError(f"a graph with {len(graph.groups)} redistribution groups has no pairwise form")
    seconds = [node.seconds.astype(np.float64) for node in graph.nodes]
    matrices: dict[tuple[int, int], Floats] = {}
    for edge in graph.edges:
        if edge.a == edge.b:
            seconds[edge.a] = seconds[edge.a] + np.diagonal(edge.seconds)
        else:
            key, pairs = _ordered(edge)
            matrices[key] = matrices[key] + pairs if key in matrices else pairs
    members, base = _members(graph)
    ends = np.array(list(matrices), np.int64).reshape(-1, 2)
    return Pairwise(
        first_option=starts([len(part) for part in seconds]),
        cost=joined(seconds),
        edge_a=np.ascontiguousarray(ends[:, 0]),
        edge_b=np.ascontiguousarray(ends[:, 1]),
        first_pair=starts([matrix.size for matrix in matrices.values()]),
        pair_cost=joined([matrix.ravel() for matrix in matrices.values()]),
        member_node=np.array([node for node, _, _, _ in members], np.int64),
        begin=np.array([begin for _, begin, _, _ in members], np.int64),
        end=np.array([end for _, _, end, _ in members], np.int64),
        first_usage=starts([len(taken) for _, _, _, taken in members]),
        usage=joined([taken for _, _, _, taken in members]),
        base=base,
        limit=np.inf if graph.memory is None else graph.memory.limit,
    )


def _ordered(edge: Edge) -> tuple[tuple[int, int], Floats]:
    return ((edge.a, edge.b), edge.seconds) if edge.a < edge.b else ((edge.b, edge.a), edge.seconds.T)


def _members(graph: StrategyGraph) -> tuple[list[tuple[int, int, int, Floats]], Floats]:
    """(node, begin, end, bytes an option) of every run, and the base."""
    members: list[tuple[int, int, int, Floats]] = []
    if graph.memory is None:
        return members, np.zeros(0)
    base = graph.memory.base.astype(np.float64)
    for term in graph.memory.nodes:
        borders = np.flatnonzero(np.diff(term.coefficient)) + 1
        for begin, end in pairwise([0, *borders.tolist(), len(term.coefficient)]):
            taken = term.nbytes * term.coefficient[begin]
            least = taken.min(initial=np.inf)
            base[begin:end] += least
            if (taken > least).any():
                members.append((term.node, begin, end, taken - least))
    return members, base
