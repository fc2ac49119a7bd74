"""The problem that every solver takes: a value without solver, torch or fx in it (design section 5).

- A *node* has options, each with a cost in seconds.
- An *edge* couples two nodes by a matrix of costs over their options (inf where incompatible).
- A *redistribution group* is one tensor, its producer and its consumers: the producer's option gives a vertex (a
  layout), each consumer's option wants one, and arcs between vertices carry it there. An arc is paid once, however
  many consumers use it. (A parameter is a tensor whose producer's options are its storages and lifetimes.)
- Memory is counted at moments; at every moment the sum of all terms must stay within the limit.

Costs include multiplicities: a folded block's node costs as much as all its layers together.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """`seconds[option]`; inf for an option that is not allowed."""

    name: str
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """`seconds[option of a, option of b]`."""

    a: int
    b: int
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Consumer:
    """`wants[option of node]`: a vertex, or -1 where that option does not read the tensor."""

    node: int
    wants: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """A tensor on its way: `gives[option of producer]` is a vertex; arcs lead from vertex to vertex at a cost."""

    name: str
    producer: int
    gives: Ints
    consumers: tuple[Consumer, ...]
    num_vertices: int
    arc_source: Ints
    arc_target: Ints
    arc_seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeMemory:
    """`nbytes[option] * coefficient[moment]`: persistent state, transient working space, ..."""

    node: int
    nbytes: Floats
    coefficient: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptMemory:
    """A tensor kept for backward: `nbytes[vertex] * coefficient[moment]` for every vertex that is given (where
    `keeps_given`) or wanted by one of `keepers` (positions in the group's consumers); each vertex counted once."""

    group: int
    nbytes: Floats
    coefficient: Floats
    keeps_given: bool
    keepers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArcMemory:
    """`nbytes[arc] * coefficient[moment]` for every arc used: copies that redistribution makes (gathered weights)."""

    group: int
    nbytes: Floats
    coefficient: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """At every moment: base + terms <= limit, in bytes. `moments`: which moments of a step these are, where known."""

    limit: float
    base: Floats
    nodes: tuple[NodeMemory, ...] = ()
    kept: tuple[KeptMemory, ...] = ()
    arcs: tuple[ArcMemory, ...] = ()
    moments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyGraph:
    """Choose one option a node and arcs for every group, the total seconds least within the memory limit."""

    nodes: tuple[Node, ...]
    groups: tuple[Group, ...] = ()
    edges: tuple[Edge, ...] = ()
    memory: Memory | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """One option a node, the arcs used a group, the cost in seconds and a proved lower bound on any solution's cost."""

    choice: Ints
    arcs: tuple[Ints, ...]
    seconds: float
    bound: float
    status: str
    """Why it stopped: `optimal` (within the tolerance asked for), `time limit` or `interrupted`."""
    phases: dict[str, float] = field(default_factory=dict)
    mixture: "tuple[Solution, Solution, float] | None" = None
    """Of a slow choice that fits and a fast one: the seconds of a mixture, which are near enough to the bound."""

    @property
    def gap(self) -> float:
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


def evaluate(graph: StrategyGraph, choice: Ints, arcs: tuple[Ints, ...]) -> float:
    """Exact cost of a choice with given arcs, inf if some consumer is not reached from what the producer gives."""
    total = sum(float(node.seconds[choice[i]]) for i, node in enumerate(graph.nodes))
    total += sum(float(edge.seconds[choice[edge.a], choice[edge.b]]) for edge in graph.edges)
    for group, used in zip(graph.groups, arcs, strict=True):
        reached = {int(group.gives[choice[group.producer]])}
        remaining = set(used.tolist())
        while (arc := next((a for a in remaining if int(group.arc_source[a]) in reached), None)) is not None:
            remaining.discard(arc)
            reached.add(int(group.arc_target[arc]))
        wanted = {int(c.wants[choice[c.node]]) for c in group.consumers} - {-1}
        if not wanted <= reached:
            return float("inf")
        total += float(group.arc_seconds[used].sum())
    return total


def usage(graph: StrategyGraph, choice: Ints, arcs: tuple[Ints, ...]) -> Floats:
    """Bytes at every moment."""
    memory = graph.memory
    if memory is None:
        return np.zeros(0)
    total = memory.base.astype(np.float64).copy()
    for term in memory.nodes:
        total += term.nbytes[choice[term.node]] * term.coefficient
    for kept in memory.kept:
        group = graph.groups[kept.group]
        vertices = {int(group.consumers[i].wants[choice[group.consumers[i].node]]) for i in kept.keepers} - {-1}
        if kept.keeps_given:
            vertices.add(int(group.gives[choice[group.producer]]))
        total += sum(float(kept.nbytes[v]) for v in vertices) * kept.coefficient
    for arc in memory.arcs:
        total += float(arc.nbytes[arcs[arc.group]].sum()) * arc.coefficient
    return total
