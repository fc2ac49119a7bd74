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
from autopar.search.exact.steiner import Metric, metric
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


def without_impossible(graph: StrategyGraph) -> StrategyGraph:
    """The graph without the arcs that take for ever."""
    arcs = [np.isfinite(group.arc_seconds) for group in graph.groups]
    if all(mask.all() for mask in arcs):
        return graph
    return restrict(graph, [np.ones(len(node.seconds), bool) for node in graph.nodes], arcs).graph


def reduce(
    graph: StrategyGraph,
    *,
    options: Sequence[Mask] | None = None,
    arcs: Sequence[Mask] | None = None,
    by_seconds: bool = True,
) -> Reduction:
    """Leave out what the optimum does not need, beginning with the options and arcs whose given mask is not set.

    Without `by_seconds` only memory counts as cost. InfeasibleError when no choice of options is compatible.
    """
    alive = [np.isfinite(node.seconds) for node in graph.nodes]
    if options is not None:
        alive = [a & b for a, b in zip(alive, options, strict=True)]
    open_arcs = [np.isfinite(group.arc_seconds) for group in graph.groups]
    if arcs is not None:
        open_arcs = [a & b for a, b in zip(open_arcs, arcs, strict=True)]
    metrics: list[Metric] = []
    known: dict[object, Metric] = {}  # tensors of one shape travel alike
    for group, mask in zip(graph.groups, open_arcs, strict=True):
        group = replace(group, arc_seconds=np.where(mask, group.arc_seconds, np.inf))
        key = (group.num_vertices, *(a.tobytes() for a in (group.arc_source, group.arc_target, group.arc_seconds)))
        known[key] = replace(known[key], group=group) if key in known else metric(group)
        metrics.append(known[key])
    _make_consistent(graph, alive, metrics)
    for i in range(len(graph.nodes)):
        alive[i] &= _undominated(graph, i, alive, by_seconds=by_seconds)
    weighted = {term.group for term in graph.memory.arcs} if graph.memory is not None else set()
    for i, group in enumerate(graph.groups):
        open_arcs[i] &= _useful_arcs(group, alive, metrics[i], exchange=by_seconds and i not in weighted)
    return restrict(graph, alive, open_arcs)


def _make_consistent(graph: StrategyGraph, alive: list[Mask], metrics: Sequence[Metric]) -> None:
    """Drop, until nothing changes, options without a compatible partner on an edge or across a group."""
    reach: list[Mask] = [np.asarray(np.isfinite(m.distance)) for m in metrics]
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
        for group, reachable in zip(graph.groups, reach, strict=True):
            for consumer in group.consumers:
                given = np.unique(group.gives[alive[group.producer]])
                asked = consumer.wants >= 0
                alive[consumer.node] &= ~asked | np.asarray(reachable[given].any(axis=0))[consumer.wants]
                if not (alive[consumer.node] & ~asked).any():
                    wanted = np.unique(consumer.wants[alive[consumer.node] & asked])
                    alive[group.producer] &= np.asarray(reachable[:, wanted].any(axis=1))[group.gives]
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


def _useful_arcs(group: Group, alive: Sequence[Mask], paths: Metric, *, exchange: bool) -> Mask:
    """Arcs between a vertex that may be reached and one that may lead on; with `exchange` only those that no path of
    other arcs replaces. Every replacement is cheaper, ties included, so that all may be left out at once."""
    wanted = [c.wants[alive[c.node]] for c in group.consumers]
    targets = np.unique(np.concatenate(wanted)) if wanted else np.zeros(0, np.int64)
    targets = targets[targets >= 0]
    given = np.unique(group.gives[alive[group.producer]])
    source, target = group.arc_source, group.arc_target
    if not targets.size or not source.size:
        return np.zeros(len(source), bool)
    reached: Mask = np.asarray(np.isfinite(paths.distance[given]).any(axis=0))
    leads: Mask = np.asarray(np.isfinite(paths.distance[:, targets]).any(axis=1))
    useful: Mask = reached[source] & leads[target] & (source != target)
    if exchange:
        first = np.full((group.num_vertices, group.num_vertices), -1)
        order = np.argsort(-paths.price, kind="stable")
        first[source[order], target[order]] = order
        useful &= first[source, target] == np.arange(len(source))
        arcs = np.flatnonzero(useful)
        around = paths.distance[source[arcs]] + paths.distance[:, target[arcs]].T
        around[np.arange(len(arcs)), source[arcs]] = np.inf
        around[np.arange(len(arcs)), target[arcs]] = np.inf
        useful[arcs] = paths.price[arcs] < around.min(axis=1)
    return np.asarray(useful, bool)
