"""Which options and arcs of a strategy graph can be left out without losing its optimum?

- Options that no choice of a neighbour is compatible with (arc consistency over edges and groups).
- Options that another option of the node replaces: it gives and wants the same vertices, no pair on any edge is dearer,
  it is no dearer itself and takes no more memory at any moment.
- Arcs that no tensor can need, and arcs that a path of other arcs replaces at no greater cost.

The result is a strategy graph again, with the positions of what was kept. Vertices keep their numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.search.exact.steiner import with_ties
from autopar.search.graph.strategy_graph import (
    ArcMemory,
    Consumer,
    Edge,
    Floats,
    Group,
    Ints,
    Memory,
    Node,
    NodeMemory,
    StrategyGraph,
)
from autopar.search.graph.ways_kernel import reached, shortest_arcs

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A smaller graph; `options[node]` and `arcs[group]` are positions in the graph it came from."""

    graph: StrategyGraph
    options: tuple[Ints, ...]
    arcs: tuple[Ints, ...]

    def lift(self, choice: Ints, arcs: Sequence[Ints]) -> tuple[Ints, tuple[Ints, ...]]:
        """A solution of the smaller graph as one of the larger."""
        lifted = np.array([int(kept[o]) for kept, o in zip(self.options, choice, strict=True)], np.int64)
        return lifted, tuple(kept[used] for kept, used in zip(self.arcs, arcs, strict=True))

    def lower(self, choice: Ints) -> Ints | None:
        """A choice of the larger graph in the smaller one, None where one of its options was left out."""
        lowered = np.zeros(len(choice), np.int64)
        for i, kept in enumerate(self.options):
            found = np.flatnonzero(kept == choice[i])
            if not found.size:
                return None
            lowered[i] = found[0]
        return lowered


def restrict(graph: StrategyGraph, options: Sequence[Mask], arcs: Sequence[Mask]) -> Reduction:
    """The graph with only the options and arcs whose mask is set."""
    kept = tuple(np.flatnonzero(mask) for mask in options)
    used = tuple(np.flatnonzero(mask) for mask in arcs)
    groups = tuple(
        replace(
            group,
            gives=group.gives[kept[group.producer]],
            consumers=tuple(Consumer(node=c.node, wants=c.wants[kept[c.node]]) for c in group.consumers),
            arc_source=group.arc_source[used[i]],
            arc_target=group.arc_target[used[i]],
            arc_seconds=group.arc_seconds[used[i]],
        )
        for i, group in enumerate(graph.groups)
    )
    memory = graph.memory
    if memory is not None:
        memory = Memory(
            limit=memory.limit,
            base=memory.base,
            moments=memory.moments,
            kept=memory.kept,
            nodes=tuple(replace(term, nbytes=term.nbytes[kept[term.node]]) for term in memory.nodes),
            arcs=tuple(
                ArcMemory(group=term.group, nbytes=term.nbytes[used[term.group]], coefficient=term.coefficient)
                for term in memory.arcs
            ),
        )
    return Reduction(
        graph=StrategyGraph(
            nodes=tuple(Node(name=node.name, seconds=node.seconds[kept[i]]) for i, node in enumerate(graph.nodes)),
            groups=groups,
            edges=tuple(
                Edge(a=edge.a, b=edge.b, seconds=edge.seconds[np.ix_(kept[edge.a], kept[edge.b])])
                for edge in graph.edges
            ),
            memory=memory,
        ),
        options=kept,
        arcs=used,
    )


def reduce(
    graph: StrategyGraph,
    *,
    options: Sequence[Mask] | None = None,
    arcs: Sequence[Mask] | None = None,
    by_seconds: bool = True,
    replaces_arcs: bool = True,
) -> Reduction:
    """Leave out what the optimum does not need, beginning with the options and arcs whose given mask is not set.

    Without `by_seconds` only memory counts as cost; without `replaces_arcs` those stay that a path of others replaces,
    which takes as long to find as a dual ascent. InfeasibleError when no choice of options is compatible.
    """
    alive = [np.isfinite(node.seconds) for node in graph.nodes]
    if options is not None:
        alive = [a & b for a, b in zip(alive, options, strict=True)]
    open_arcs = [np.isfinite(group.arc_seconds) for group in graph.groups]
    if arcs is not None:
        open_arcs = [a & b for a, b in zip(open_arcs, arcs, strict=True)]
    _make_consistent(graph, alive, open_arcs)
    for i in range(len(graph.nodes)):
        alive[i] &= _undominated(graph, i, alive, by_seconds=by_seconds)
    weighted = {term.group for term in graph.memory.arcs} if graph.memory is not None else set()
    known: dict[object, Mask] = {}  # tensors of one shape travel alike
    for i, group in enumerate(graph.groups):
        if by_seconds and replaces_arcs and i not in weighted:
            seconds = np.where(open_arcs[i], group.arc_seconds, np.inf)
            key = (group.num_vertices, *(a.tobytes() for a in (group.arc_source, group.arc_target, seconds)))
            if key not in known:
                known[key] = _shortest(group, open_arcs[i])
            open_arcs[i] &= known[key]
        open_arcs[i] &= _useful_arcs(group, alive, open_arcs[i])
    return restrict(graph, alive, open_arcs)


def _make_consistent(graph: StrategyGraph, alive: list[Mask], open_arcs: Sequence[Mask]) -> None:
    """Drop, until nothing changes, options without a compatible partner on an edge or across a group."""
    finite: list[Mask] = [np.asarray(np.isfinite(edge.seconds)) for edge in graph.edges]
    changed = True
    while changed:
        before = sum(int(mask.sum()) for mask in alive)
        for edge, pairs in zip(graph.edges, finite, strict=True):
            if edge.a == edge.b:
                alive[edge.a] &= np.diagonal(pairs)
                continue
            alive[edge.a] &= pairs[:, alive[edge.b]].any(axis=1)
            alive[edge.b] &= pairs[alive[edge.a]].any(axis=0)
        for group, mask in zip(graph.groups, open_arcs, strict=True):
            source, target = group.arc_source[mask], group.arc_target[mask]
            for consumer in group.consumers:
                asked = consumer.wants >= 0
                came = reached(group.num_vertices, source, target, group.gives[alive[group.producer]])
                alive[consumer.node] &= ~asked | came[consumer.wants]
                if not (alive[consumer.node] & ~asked).any():
                    wanted = consumer.wants[alive[consumer.node] & asked]
                    alive[group.producer] &= reached(group.num_vertices, target, source, wanted)[group.gives]
        for node, mask in zip(graph.nodes, alive, strict=True):
            if not mask.any():
                raise InfeasibleError(
                    f"node {node.name!r} has no option that is compatible with its neighbours (memory aside); "
                    "allow more options or redistributions"
                )
        changed = sum(int(mask.sum()) for mask in alive) < before


def _undominated(graph: StrategyGraph, index: int, alive: Sequence[Mask], *, by_seconds: bool) -> Mask:
    """Options of a node that no other, alike in all that its neighbours see, replaces."""
    seconds = graph.nodes[index].seconds
    keys = [group.gives for group in graph.groups if group.producer == index]
    keys += [c.wants for group in graph.groups for c in group.consumers if c.node == index]
    for edge in graph.edges:
        for own, other, pairs in ((edge.a, edge.b, edge.seconds), (edge.b, edge.a, edge.seconds.T)):
            if own == index:
                rows = pairs if edge.a == edge.b else pairs[:, alive[other]]
                keys.append(np.unique(rows, axis=0, return_inverse=True)[1].ravel())
                if edge.a == edge.b:
                    keys.append(np.arange(len(seconds)))
    alike = np.zeros(len(seconds), np.int64)
    if keys:
        alike = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].ravel()
    price = np.where(alive[index], seconds, 0.0)[:, None] if by_seconds else np.zeros((len(seconds), 1))
    weights = np.concatenate([price, node_bytes(graph, index)], axis=1)
    kept = np.zeros(len(seconds), bool)
    if weights.shape[1] == 1:  # the cheapest of each kind
        members = np.flatnonzero(alive[index])
        members = members[np.argsort(weights[members, 0], kind="stable")]
        kept[members[np.unique(alike[members], return_index=True)[1]]] = True
        return kept
    for key in np.unique(alike[alive[index]]):
        members = np.flatnonzero((alike == key) & alive[index])
        members = members[np.lexsort(weights[members].T[::-1])]
        front = np.zeros((0, weights.shape[1]))
        for member in members:
            if not (front <= weights[member]).all(axis=1).any():
                front = np.vstack([front, weights[member]])
                kept[member] = True
    return kept


def node_bytes(graph: StrategyGraph, index: int) -> Floats:
    """`[option, moment]`: bytes that a node's options take by themselves."""
    terms: list[NodeMemory] = [] if graph.memory is None else [t for t in graph.memory.nodes if t.node == index]
    moments = 0 if graph.memory is None else len(graph.memory.base)
    total = np.zeros((len(graph.nodes[index].seconds), moments))
    for term in terms:
        total += np.outer(term.nbytes, term.coefficient)
    return np.unique(total, axis=1) if moments else total


def _shortest(group: Group, mask: Mask) -> Mask:
    """Of these arcs those that no path of others replaces: its arcs are cheaper, ties included, so that all the rest
    may be left out at once."""
    shortest = np.zeros(len(mask), bool)
    ends = group.arc_source[mask], group.arc_target[mask]
    shortest[mask] = shortest_arcs(group.num_vertices, *ends, with_ties(group.arc_seconds[mask]))
    return shortest


def _useful_arcs(group: Group, alive: Sequence[Mask], mask: Mask) -> Mask:
    """Arcs between a vertex that may be reached, by these, and one that may lead on."""
    wanted = np.concatenate([np.zeros(0, np.int64), *(c.wants[alive[c.node]] for c in group.consumers)])
    source, target = group.arc_source[mask], group.arc_target[mask]
    came = reached(group.num_vertices, source, target, group.gives[alive[group.producer]])
    leads = reached(group.num_vertices, target, source, wanted[wanted >= 0])
    return np.asarray(came[group.arc_source] & leads[group.arc_target] & (group.arc_source != group.arc_target), bool)
