"""One sweep of the dual ascent over a strategy graph's nodes, and the choice that its prices suggest; compiled.

What the arrays mean is said in `dual_ascent`.
"""

from typing import NamedTuple

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.graph.strategy_graph import Floats, Ints
from autopar.search.graph.ways_kernel import Desk, spread

FIRST_SHARE = 0.7
"""Of what is left of an arc's seconds: what the consumer whose turn it is may use. With all of it the first takes what
others need, and the ascent stands still further below the relaxation's optimum; with half it takes longer."""


class ArcLinks(NamedTuple):
    """A link is a tensor (or an edge) and one of its consumers; link l leads from node giver[l] to node taker[l].

    Node n: options first_option[n]:first_option[n + 1], `seconds`; its links are links[first_link[n]:...].
    Tensor g: arcs first_arc[g]:first_arc[g + 1], `arc_seconds`; its links are first_of[g]:first_of[g + 1].
    Link l, of tensor[l]: labels first_label[l]:..., one a vertex; hops first_hop[l]:..., from one vertex to another:
    first those along the tensor's arcs, in their order, then free ones to the vertex of options that do not read.
    gives[first_given[l] + option], wants[first_wanted[l] + option]: vertices. Hops by the vertex that they leave:
    hops leaving[first_hop[l] + k] for k in first_leaving[first_label[l] + l + v: ... + 1]; `entering` likewise.
    """

    first_option: Ints
    seconds: Floats
    first_link: Ints
    links: Ints
    first_arc: Ints
    arc_seconds: Floats
    first_of: Ints
    giver: Ints
    taker: Ints
    tensor: Ints
    first_given: Ints
    gives: Ints
    first_wanted: Ints
    wants: Ints
    first_label: Ints
    first_hop: Ints
    hop_source: Ints
    hop_target: Ints
    first_leaving: Ints
    leaving: Ints
    first_entering: Ints
    entering: Ints


class Prices(NamedTuple):
    """label[first_label[l] + v]: what link l's tensor is worth at vertex v. use[hop]: of its seconds what labels need;
    used[arc]: the same of all consumers together."""

    label: Floats
    use: Floats
    used: Floats


class Room(NamedTuple):
    """To work in: a number an option, a hop, a vertex, and a heap."""

    taken: Floats
    seconds: Floats
    key: Floats
    last: Ints
    desk: Desk


@compiled
def leads_on(links: ArcLinks, link: int, node: int, backward: bool) -> bool:
    """Whether the other end of a node's link has its turn later."""
    other = links.giver[link] + links.taker[link] - node
    return bool(other != node and (other < node) == backward)


@compiled
def here(links: ArcLinks, label: Floats, node: int, out: Floats) -> float:
    """What each option of a node takes at these labels, in `out`; returns the least."""
    first = links.first_option[node]
    num = links.first_option[node + 1] - first
    for option in range(num):
        out[option] = links.seconds[first + option]
    for place in range(links.first_link[node], links.first_link[node + 1]):
        link = links.links[place]
        labels = label[links.first_label[link] : links.first_label[link + 1]]
        if links.giver[link] == node:
            vertices = links.gives[links.first_given[link] : links.first_given[link] + num]
            for option in range(num):
                out[option] -= labels[vertices[option]]
        if links.taker[link] == node:
            vertices = links.wants[links.first_wanted[link] : links.first_wanted[link] + num]
            for option in range(num):
                out[option] += labels[vertices[option]]
    return float(out[:num].min())


@compiled
def along(links: ArcLinks, link: int, ahead: bool, room: Room) -> None:
    """Dijkstra along a link's hops, ahead or back, from all vertices with a finite key."""
    num = links.first_label[link + 1] - links.first_label[link]
    corner = links.first_label[link] + link
    begin, end = links.first_hop[link], links.first_hop[link + 1]
    if ahead:
        first, order = links.first_leaving[corner : corner + num + 1], links.leaving[begin:end]
        onward = links.hop_target[begin:end]
    else:
        first, order = links.first_entering[corner : corner + num + 1], links.entering[begin:end]
        onward = links.hop_source[begin:end]
    spread(first, order, onward, room.seconds, room.key[:num], room.last, room.desk)


@compiled
def sweep(links: ArcLinks, prices: Prices, backward: bool, room: Room) -> float:
    """Every node in turn, the first first or the last, hands what its options take above the least to its links to
    nodes whose turn is still to come, each an equal part. Returns the bound."""
    taken, key, nodes = room.taken, room.key, len(links.first_option) - 1
    for turn in range(nodes):
        node = nodes - 1 - turn if backward else turn
        left = 0
        for place in range(links.first_link[node], links.first_link[node + 1]):
            left += leads_on(links, links.links[place], node, backward)
        for place in range(links.first_link[node], links.first_link[node + 1]):
            link = links.links[place]
            if leads_on(links, link, node, backward):
                least = here(links, prices.label, node, taken)
                labels = prices.label[links.first_label[link] : links.first_label[link + 1]]
                lend(links, prices, link, room)
                ahead = node == links.giver[link]
                first = links.first_given[link] if ahead else links.first_wanted[link]
                vertices = links.gives if ahead else links.wants
                sign = 1.0 if ahead else -1.0
                key[: len(labels)] = np.inf
                for option in range(links.first_option[node + 1] - links.first_option[node]):
                    vertex = vertices[first + option]
                    key[vertex] = min(key[vertex], sign * labels[vertex] + (taken[option] - least) / left)
                along(links, link, ahead, room)
                labels[:] = sign * key[: len(labels)]
                settle(links, prices, link)
                left -= 1
    total = 0.0
    for node in range(nodes):
        total += here(links, prices.label, node, taken)
    return total


@compiled
def lend(links: ArcLinks, prices: Prices, link: int, room: Room) -> None:
    """Of each arc's seconds what a link may use, beside the others' use: what it does, and a share of what is left."""
    tensor, begin = links.tensor[link], links.first_hop[link]
    arcs, num_arcs = links.first_arc[tensor], links.first_arc[tensor + 1] - links.first_arc[tensor]
    part = FIRST_SHARE if links.first_of[tensor + 1] - links.first_of[tensor] > 1 else 1.0
    for hop in range(num_arcs):
        left = max(links.arc_seconds[arcs + hop] - prices.used[arcs + hop], 0.0)
        room.seconds[hop] = prices.use[begin + hop] + part * left
    room.seconds[num_arcs : links.first_hop[link + 1] - begin] = 0.0


@compiled
def settle(links: ArcLinks, prices: Prices, link: int) -> None:
    """What of each arc's seconds a link's labels need. Vertices that no end leads to, or that lead to none, need
    nothing."""
    tensor, begin = links.tensor[link], links.first_hop[link]
    arcs, num_arcs = links.first_arc[tensor], links.first_arc[tensor + 1] - links.first_arc[tensor]
    labels = prices.label[links.first_label[link] : links.first_label[link + 1]]
    for hop in range(num_arcs):
        rise = labels[links.hop_target[begin + hop]] - labels[links.hop_source[begin + hop]]
        need = rise if 0.0 < rise < np.inf else 0.0
        prices.used[arcs + hop] += need - prices.use[begin + hop]
        prices.use[begin + hop] = need


@compiled
def suggest(links: ArcLinks, prices: Prices, backward: bool, choice: Ints, room: Room) -> None:
    """Node after node the option that takes least, where shortest ways lead to nodes that have had their turn, and
    labels stand for the others."""
    taken, key, nodes = room.taken, room.key, len(links.first_option) - 1
    for turn in range(nodes):
        node = nodes - 1 - turn if backward else turn
        num = links.first_option[node + 1] - links.first_option[node]
        here(links, prices.label, node, taken)
        for place in range(links.first_link[node], links.first_link[node + 1]):
            link = links.links[place]
            other = links.giver[link] + links.taker[link] - node
            if other == node or not leads_on(links, link, other, backward):
                continue
            labels = prices.label[links.first_label[link] : links.first_label[link + 1]]
            ahead = other == links.giver[link]
            key[: len(labels)] = np.inf
            if ahead:
                key[links.gives[links.first_given[link] + choice[other]]] = 0.0
            else:
                key[links.wants[links.first_wanted[link] + choice[other]]] = 0.0
            tensor = links.tensor[link]
            arcs, num_arcs = links.first_arc[tensor], links.first_arc[tensor + 1] - links.first_arc[tensor]
            room.seconds[:num_arcs] = links.arc_seconds[arcs : arcs + num_arcs]
            room.seconds[num_arcs : links.first_hop[link + 1] - links.first_hop[link]] = 0.0
            along(links, link, ahead, room)
            first = links.first_wanted[link] if ahead else links.first_given[link]
            vertices = links.wants if ahead else links.gives
            sign = 1.0 if ahead else -1.0
            for option in range(num):
                vertex = vertices[first + option]
                taken[option] += key[vertex] - sign * labels[vertex]
        choice[node] = taken[:num].argmin()


@compiled
def ways(links: ArcLinks, choice: Ints, used: Ints, room: Room) -> float:
    """Seconds of a choice; `used` counts its arcs: consumer after consumer by the cheapest way, for nothing along arcs
    that lead to others. Infinite where one cannot be reached."""
    total, key = 0.0, room.key
    for node in range(len(links.first_option) - 1):
        total += links.seconds[links.first_option[node] + choice[node]]
    for link in range(len(links.giver)):
        tensor, begin = links.tensor[link], links.first_hop[link]
        arcs, num_arcs = links.first_arc[tensor], links.first_arc[tensor + 1] - links.first_arc[tensor]
        room.seconds[: links.first_hop[link + 1] - begin] = 0.0
        for hop in range(num_arcs):
            if not used[arcs + hop]:
                room.seconds[hop] = links.arc_seconds[arcs + hop]
        vertex = links.gives[links.first_given[link] + choice[links.giver[link]]]
        end = links.wants[links.first_wanted[link] + choice[links.taker[link]]]
        key[: links.first_label[link + 1] - links.first_label[link]] = np.inf
        key[end] = 0.0
        along(links, link, False, room)
        if key[vertex] == np.inf:
            return np.inf
        total += key[vertex]
        while vertex != end:
            hop = room.last[vertex]
            if hop < num_arcs:
                used[arcs + hop] += 1
            vertex = links.hop_target[begin + hop]
    return float(total)
