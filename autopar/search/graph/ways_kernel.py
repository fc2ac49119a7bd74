"""Shortest ways between vertices, compiled. What for: layouts (`lattice`), what a strategy graph needs (`exact`)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.search.compiled import compiled
from autopar.search.graph.strategy_graph import Floats, Ints

Bools = NDArray[np.bool_]


class Desk(NamedTuple):
    """Room for a heap of as many as there are vertices and arcs together."""

    keys: Floats
    heap: Ints


def desk(room: int) -> Desk:
    return Desk(keys=np.empty(room), heap=np.empty(room, np.int64))


@compiled
def leaving(num_vertices: int, source: Ints) -> tuple[Ints, Ints]:
    """Arcs by the vertex that they leave: (first position of each vertex, arcs)."""
    first = np.zeros(num_vertices + 1, np.int64)
    for vertex in source:
        first[vertex + 1] += 1
    for vertex in range(num_vertices):
        first[vertex + 1] += first[vertex]
    arcs, fill = np.empty(len(source), np.int64), first[:-1].copy()
    for arc in range(len(source)):
        arcs[fill[source[arc]]] = arc
        fill[source[arc]] += 1
    return first, arcs


@compiled
def reached(num_vertices: int, source: Ints, target: Ints, starts: Ints) -> Bools:
    """Vertices to which arcs lead from one of the starts, and these."""
    first, arcs = leaving(num_vertices, source)
    seen, queue, end = np.zeros(num_vertices, np.bool_), np.empty(num_vertices, np.int64), 0
    for vertex in starts:
        if not seen[vertex]:
            seen[vertex], queue[end] = True, vertex
            end += 1
    at = 0
    while at < end:
        for place in range(first[queue[at]], first[queue[at] + 1]):
            vertex = target[arcs[place]]
            if not seen[vertex]:
                seen[vertex], queue[end] = True, vertex
                end += 1
        at += 1
    return seen


@compiled
def push(keys: Floats, heap: Ints, size: int, key: float, vertex: int) -> None:
    """Add a vertex to a heap of so many, the least key first."""
    at = size
    while at > 0 and key < keys[(at - 1) // 2]:
        keys[at], heap[at] = keys[(at - 1) // 2], heap[(at - 1) // 2]
        at = (at - 1) // 2
    keys[at], heap[at] = key, vertex


@compiled
def pop(keys: Floats, heap: Ints, size: int) -> int:
    """Take the vertex of the least key out of a heap of so many."""
    least, last, at = int(heap[0]), size - 1, 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last and keys[below + 1] < keys[below]:
            below += 1
        if keys[below] >= keys[last]:
            break
        keys[at], heap[at] = keys[below], heap[below]
        at = below
    keys[at], heap[at] = keys[last], heap[last]
    return least


@compiled
def spread(first: Ints, order: Ints, onward: Ints, price: Floats, key: Floats, last: Ints, desk: Desk) -> None:
    """Dijkstra from all vertices with a finite key at once: no key is more than that of a vertex before it and the
    price of the arc between them. last[vertex]: the arc that its key came along, left as it was where it is its own.

    Arcs order[first[v]:first[v + 1]] lead from v to onward[arc].
    """
    size = 0
    for vertex in range(len(key)):
        if key[vertex] < np.inf:
            push(desk.keys, desk.heap, size, key[vertex], vertex)
            size += 1
    while size:
        least = desk.keys[0]
        vertex = pop(desk.keys, desk.heap, size)
        size -= 1
        if least > key[vertex]:
            continue
        for place in range(first[vertex], first[vertex + 1]):
            arc = order[place]
            through = least + price[arc]
            if through < key[onward[arc]]:
                key[onward[arc]], last[onward[arc]] = through, arc
                push(desk.keys, desk.heap, size, through, onward[arc])
                size += 1


@compiled
def everywhere(num_vertices: int, source: Ints, target: Ints, price: Floats) -> tuple[Floats, Ints]:
    """Between all vertices, [from, to]: what shortest ways take, and their last arcs (-1 where there is none)."""
    first, order = leaving(num_vertices, source)
    distance, last = np.full((num_vertices, num_vertices), np.inf), np.full((num_vertices, num_vertices), -1)
    room = num_vertices + len(source)
    desk = Desk(np.empty(room), np.empty(room, np.int64))
    for vertex in range(num_vertices):
        distance[vertex, vertex] = 0.0
        spread(first, order, target, price, distance[vertex], last[vertex], desk)
    return distance, last


@compiled
def shortest_arcs(num_vertices: int, source: Ints, target: Ints, price: Floats) -> Bools:
    """Arcs that are the shortest way between their ends, of parallel ones one: Dijkstra as far as a vertex's own."""
    first, order = leaving(num_vertices, source)
    shortest = np.zeros(len(source), np.bool_)
    distance = np.full(num_vertices, np.inf)
    direct = np.full(num_vertices, -1)
    met, heap = np.empty(num_vertices, np.int64), np.empty(len(source) + num_vertices, np.int64)
    keys = np.empty(len(heap))
    for root in range(num_vertices):
        num_met, size, own = 0, 0, 0
        distance[root] = 0.0
        for place in range(first[root], first[root + 1]):
            arc = order[place]
            vertex = target[arc]
            if price[arc] < distance[vertex]:
                if direct[vertex] < 0:
                    met[num_met] = vertex
                    num_met += 1
                    own += 1
                distance[vertex], direct[vertex] = price[arc], arc
        for at in range(num_met):
            push(keys, heap, size, distance[met[at]], met[at])
            size += 1
        while own and size:
            vertex = pop(keys, heap, size)
            size -= 1
            if direct[vertex] == -2:  # done, by a shorter way
                continue
            if direct[vertex] >= 0:
                shortest[direct[vertex]] = True
                own -= 1
            direct[vertex] = -2
            for place in range(first[vertex], first[vertex + 1]):
                arc = order[place]
                onward, through = target[arc], distance[vertex] + price[arc]
                if through < distance[onward]:
                    if distance[onward] == np.inf:
                        met[num_met] = onward
                        num_met += 1
                    if direct[onward] >= 0:
                        own -= 1
                        direct[onward] = -1
                    distance[onward] = through
                    push(keys, heap, size, through, onward)
                    size += 1
        for at in range(num_met):
            distance[met[at]], direct[met[at]] = np.inf, -1
        distance[root] = np.inf
    return shortest
