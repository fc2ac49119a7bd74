"""Which arcs carry a tensor from the vertex that is given to all that are wanted, at least cost?

The cheapest arborescence from a root to a set of terminals (Dreyfus and Wagner 1971, directed): with S(X, u) the least
cost of reaching all of X from u and d the shortest distances,

    S({t}, u) = d(u, t)        S(X, u) = min over w of d(u, w) + min over Y of S(Y, w) + S(X - Y, w)

exponential in the number of terminals only, which are the consumers of one tensor.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.strategy_graph import Group
from autopar.search.graph.ways_kernel import shorten_lengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TIE = 1e-12
"""What an arc costs beyond its price, as a part of the dearest: then no path goes round a cycle of free arcs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """Shortest distances between all vertices of a group, `distance[from, to]`, each arc a little dearer (`TIE`)."""

    group: Group
    price: Floats
    distance: Floats
    leaving: tuple[Ints, ...]

    def path(self, source: int, target: int) -> list[int]:
        """The arcs of a shortest path; raises ValueError when there is none."""
        if not np.isfinite(self.distance[source, target]):
            raise ValueError(f"group {self.group.name!r}: no path from vertex {source} to vertex {target}")
        arcs = []
        while source != target:
            out = self.leaving[source]
            ahead = self.distance[self.group.arc_target[out], target]
            arcs.append(int(out[np.argmin(self.price[out] + ahead)]))
            source = int(self.group.arc_target[arcs[-1]])
        return arcs


def with_ties(seconds: Floats) -> Floats:
    """Each arc a little dearer (`TIE`)."""
    finite = seconds[np.isfinite(seconds)]
    return np.asarray(seconds + TIE * (float(finite.max()) if finite.size and finite.max() > 0 else 1.0))


def metric(group: Group) -> Metric:
    """Of the group's arcs."""
    price = with_ties(group.arc_seconds)
    distance = np.full((group.num_vertices, group.num_vertices), np.inf)
    np.fill_diagonal(distance, 0.0)
    np.minimum.at(distance, (group.arc_source, group.arc_target), price)
    shorten_lengths(distance)
    order = np.argsort(group.arc_source, kind="stable")
    first = np.searchsorted(group.arc_source[order], np.arange(group.num_vertices + 1))
    leaving = tuple(order[first[v] : first[v + 1]] for v in range(group.num_vertices))
    return Metric(group=group, price=price, distance=distance, leaving=leaving)


def cheapest_arcs(metric: Metric, root: int, terminals: set[int]) -> Ints:
    """Arcs of a cheapest arborescence from `root` to `terminals`; ValueError when one cannot be reached."""
    wanted = sorted(terminals - {root})
    if not wanted:
        return np.zeros(0, np.int64)
    if len(wanted) == 1:
        return np.array(metric.path(root, wanted[0]), np.int64)
    full = (1 << len(wanted)) - 1
    reach: dict[int, Floats] = {}
    here: dict[int, Floats] = {}
    split: dict[int, Ints] = {}
    for subset in range(1, full + 1):
        if subset & (subset - 1) == 0:
            reach[subset] = metric.distance[:, wanted[subset.bit_length() - 1]]
            continue
        parts = [part for part in _parts(subset) if part > subset ^ part]
        sums = np.stack([reach[part] + reach[subset ^ part] for part in parts])
        best = sums.argmin(axis=0)
        split[subset] = np.array(parts)[best]
        here[subset] = sums[best, np.arange(len(best))]
        reach[subset] = (metric.distance + here[subset]).min(axis=1)
    if not np.isfinite(reach[full][root]):
        raise ValueError(f"group {metric.group.name!r}: vertices {wanted} cannot all be reached from {root}")
    arcs: set[int] = set()
    pending = [(full, root)]
    while pending:
        subset, vertex = pending.pop()
        if subset in here:
            fork = int((metric.distance[vertex] + here[subset]).argmin())
            arcs.update(metric.path(vertex, fork))
            part = int(split[subset][fork])
            pending += [(part, fork), (subset ^ part, fork)]
        else:
            arcs.update(metric.path(vertex, wanted[subset.bit_length() - 1]))
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
