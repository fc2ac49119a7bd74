"""Which arcs carry a tensor from the vertex that is given to all that are wanted, at least cost?

The cheapest arborescence from a root to a set of terminals (Dreyfus and Wagner 1971, directed): with S(X, u) the least
cost of reaching all of X from u and d the shortest distances,

    S({t}, u) = d(u, t)        S(X, u) = min over w of d(u, w) + min over Y of S(Y, w) + S(X - Y, w)

exponential in the number of terminals only, which are the consumers of one tensor. Either is one pass of Dijkstra's
algorithm along the arcs backward, from t or from all w at once (Erickson, Monma and Veinott 1987).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.strategy_graph import Group
from autopar.search.graph.ways_kernel import desk, leaving, spread

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TIE = 1e-12
"""What an arc costs beyond its price, as a part of the dearest: then no path goes round a cycle of free arcs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """A group's arcs by the vertex that they enter, entering[first[v]:first[v + 1]], each a little dearer (`TIE`)."""

    group: Group
    price: Floats
    first: Ints
    entering: Ints

    def toward(self, start: Floats) -> tuple[Floats, Ints]:
        """From each vertex the least of a way to another and what that one starts with; and the first arc of that way,
        -1 where there is none to go, or none to be reached."""
        key, ahead = start.copy(), np.full(len(start), -1)
        room = desk(len(start) + len(self.price))
        spread(self.first, self.entering, self.group.arc_source, self.price, key, ahead, room)
        return key, ahead

    def end(self, vertex: int) -> Floats:
        """Where ways to one vertex start."""
        start = np.full(self.group.num_vertices, np.inf)
        start[vertex] = 0.0
        return start

    def path(self, source: int, target: int) -> list[int]:
        """The arcs of a shortest path; raises ValueError when there is none."""
        lengths, ahead = self.toward(self.end(target))
        if not np.isfinite(lengths[source]):
            raise ValueError(f"group {self.group.name!r}: no path from vertex {source} to vertex {target}")
        return self.follow(source, ahead)[0]

    def follow(self, vertex: int, ahead: Ints) -> tuple[list[int], int]:
        """The arcs from a vertex on, and where they end."""
        arcs = []
        while ahead[vertex] >= 0:
            arcs.append(int(ahead[vertex]))
            vertex = int(self.group.arc_target[arcs[-1]])
        return arcs, vertex


def with_ties(seconds: Floats) -> Floats:
    """Each arc a little dearer (`TIE`)."""
    finite = seconds[np.isfinite(seconds)]
    return np.asarray(seconds + TIE * (float(finite.max()) if finite.size and finite.max() > 0 else 1.0))


def metric(group: Group) -> Metric:
    """Of the group's arcs."""
    first, entering = leaving(group.num_vertices, group.arc_target)
    return Metric(group=group, price=with_ties(group.arc_seconds), first=first, entering=entering)


def cheapest_arcs(metric: Metric, root: int, terminals: set[int]) -> Ints:
    """Arcs of a cheapest arborescence from `root` to `terminals`; ValueError when one cannot be reached."""
    wanted = sorted(terminals - {root})
    if not wanted:
        return np.zeros(0, np.int64)
    if len(wanted) == 1:
        return np.array(metric.path(root, wanted[0]), np.int64)
    full = (1 << len(wanted)) - 1
    reach: dict[int, Floats] = {}
    ahead: dict[int, Ints] = {}
    split: dict[int, Ints] = {}
    for subset in range(1, full + 1):
        start = metric.end(wanted[subset.bit_length() - 1])
        if parts := [part for part in _parts(subset) if part > subset ^ part]:
            sums = np.stack([reach[part] + reach[subset ^ part] for part in parts])
            best = sums.argmin(axis=0)
            split[subset] = np.array(parts)[best]
            start = sums[best, np.arange(len(best))]
        reach[subset], ahead[subset] = metric.toward(start)
    if not np.isfinite(reach[full][root]):
        raise ValueError(f"group {metric.group.name!r}: vertices {wanted} cannot all be reached from {root}")
    arcs: set[int] = set()
    pending = [(full, root)]
    while pending:
        subset, vertex = pending.pop()
        way, fork = metric.follow(vertex, ahead[subset])
        arcs.update(way)
        if subset in split:
            part = int(split[subset][fork])
            pending += [(part, fork), (subset ^ part, fork)]
    return arborescence(metric.group, np.array(sorted(arcs), np.int64), root, terminals)


def arborescence(group: Group, arcs: Ints, root: int, terminals: set[int]) -> Ints:
    """The arcs among `arcs` that a search from the root needs to reach the terminals: no cycle, nothing idle.

    Cheap arcs are tried first. ValueError when a terminal cannot be reached.
    """
    entered = {root: -1}
    remaining = sorted(arcs.tolist(), key=lambda a: float(group.arc_seconds[a]))
    while (arc := next((a for a in remaining if group.arc_source[a] in entered), None)) is not None:
        remaining.remove(arc)
        entered.setdefault(int(group.arc_target[arc]), arc)
    used: set[int] = set()
    for vertex in terminals:
        while vertex != root:
            if vertex not in entered:
                raise ValueError(f"group {group.name!r}: vertex {vertex} is not reached from {root}")
            arc = entered[vertex]
            used.add(arc)
            vertex = int(group.arc_source[arc])
    return np.array(sorted(used), np.int64)


def _parts(subset: int) -> list[int]:
    """Every proper, non-empty part of a set of bits."""
    parts = []
    part = (subset - 1) & subset
    while part:
        parts.append(part)
        part = (part - 1) & subset
    return parts
