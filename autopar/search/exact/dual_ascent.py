"""What do labels on vertices prove about the cost of every solution of a strategy graph, memory aside?

The dual of the linear relaxation (`formulation`): each consumer i of a tensor has a label d_i(v) for every vertex, what
the tensor is worth there, and for every arc a share of its seconds, all shares together no more than these. Where
d_i(w) - d_i(v) is at most the share of arc v -> w, labels only move cost from the producer to its consumers,

    here(option) = seconds(option) - sum of d(gives) of what it gives + sum of d(wants) of what it reads,

so that the leasts of all nodes add up to a bound on every solution, fractional ones included. Sweeps to and fro raise
it (`dual_kernel.sweep`): a node hands what its options take above the least to the links to nodes whose turn is still
to come, and Dijkstra from there finds the highest labels (backward the lowest) that shares allow. That is message
passing on a graph of nodes whose pairs cost the shortest ways between vertices (TRW-S: Kolmogorov, PAMI 2006), on a
chain dynamic programming; a share that labels do not need is free for other consumers. Where every option has a partner
(`reduction`) the bound never falls. It may stand still below the relaxation's optimum, as block coordinate ascent does,
the further the more consumers a tensor has (`relaxation` asks a program then).

An edge is a tensor from options to options whose arcs are its pairs. Every other arc takes a little more than its
seconds (`TIE`), so that of ways that take as long the one of fewer arcs is suggested: an input is split as it is read,
not read whole and split then. The bound is less by what all arcs that one solution may need take more.
"""

import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.exact.dual_kernel import ArcLinks, Prices, Room, here, suggest, sweep, ways
from autopar.search.graph.strategy_graph import Consumer, Floats, Group, Ints, StrategyGraph
from autopar.search.graph.ways_kernel import desk, leaving

MOST_SWEEPS = 100
"""To and fro are two."""
TIE = 1e-12
"""What an arc takes beyond its seconds, as a part of what the cheapest options take together."""
STANDS = 1e-7
"""Part of the bound that two sweeps have to add."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dual:
    """`bound`: seconds of every solution, at least. extra: options[node] and arcs[group], how much more one takes that
    uses them, at least. found: what the labels suggest, choice and arcs of each group; None where the bound is enough
    or nothing compatible came of it. seconds: what that takes."""

    bound: float
    extra: tuple[list[Floats], list[Floats]]
    found: tuple[Ints, tuple[Ints, ...]] | None
    seconds: float


def dual_ascent(graph: StrategyGraph, enough: float = np.inf, seconds: float | None = None) -> Dual | None:
    """A bound on every solution, no better than it takes to reach `enough`. seconds: of time, about.

    None where nothing is proved: arcs of less than no seconds, or labels that are no numbers where options have no
    partner.
    """
    deadline = np.inf if seconds is None else time.monotonic() + seconds
    tie = TIE * _size(graph)
    tensors, shift = _tensors(graph, tie)
    if any((tensor.arc_seconds < 0.0).any() for tensor in tensors):
        return None
    links, room = _laid(graph, tensors)
    prices = Prices(
        label=np.zeros(links.first_label[-1]),
        use=np.zeros(links.first_hop[-1]),
        used=np.zeros(links.first_arc[-1]),
    )
    bound = -np.inf
    for _ in range(MOST_SWEEPS // 2):
        sweep(links, prices, False, room)
        reached = sweep(links, prices, True, room) + shift
        if not np.isfinite(reached):
            return None
        is_still = reached - bound <= STANDS * abs(reached)
        bound = reached  # labels and what they leave over are those of the last sweep
        if bound >= enough or is_still or time.monotonic() >= deadline:
            break
    found = None if bound >= enough else _suggested(links, prices, room, len(graph.groups))
    least = np.inf if found is None else _seconds(graph, *found)
    return Dual(bound=bound, extra=_extra(links, prices, len(graph.groups)), found=found, seconds=least)


def _size(graph: StrategyGraph) -> float:
    """Of seconds: what the cheapest options take, or where these take nothing the dearest arc."""
    cheapest = sum(abs(float(node.seconds.min())) for node in graph.nodes)
    arcs = [group.arc_seconds[np.isfinite(group.arc_seconds)] for group in graph.groups]
    return cheapest or max((float(part.max(initial=0.0)) for part in arcs), default=0.0)


def _tensors(graph: StrategyGraph, tie: float) -> tuple[list[Group], float]:
    """Groups, their arcs by `tie` dearer, and then edges, with pairs of no less than nothing; and what is to be added
    to a bound for that."""
    tensors = [replace(group, arc_seconds=group.arc_seconds + tie) for group in graph.groups]
    shift = -tie * sum(group.num_vertices - 1 for group in graph.groups)
    for edge in graph.edges:
        a, b = np.nonzero(np.isfinite(edge.seconds))
        pairs = edge.seconds[a, b]
        least = float(pairs.min(initial=0.0))
        shift += least
        num_a, num_b = edge.seconds.shape
        wants = num_a + np.arange(num_b)
        tensors.append(
            Group(
                name="",
                producer=edge.a,
                gives=np.arange(num_a),
                consumers=(Consumer(node=edge.b, wants=wants),),
                num_vertices=num_a + num_b,
                arc_source=a,
                arc_target=wants[b],
                arc_seconds=pairs - least,
            )
        )
    return tensors, shift


def _laid(graph: StrategyGraph, tensors: Sequence[Group]) -> tuple[ArcLinks, Room]:
    links: list[tuple[int, Group, Consumer]] = []
    first_of = [0]
    for i, tensor in enumerate(tensors):
        distinct = {(c.node, c.wants.tobytes()): c for c in tensor.consumers if (c.wants >= 0).any()}
        links += [(i, *_closed(tensor, consumer)) for consumer in distinct.values()]
        first_of.append(len(links))
    giver, taker = [tensor.producer for _, tensor, _ in links], [consumer.node for _, _, consumer in links]
    of_node: list[list[int]] = [[] for _ in graph.nodes]
    for link, ends in enumerate(zip(giver, taker, strict=True)):
        for node in set(ends):
            of_node[node].append(link)
    ahead = [leaving(tensor.num_vertices, tensor.arc_source) for _, tensor, _ in links]
    back = [leaving(tensor.num_vertices, tensor.arc_target) for _, tensor, _ in links]
    most = max((tensor.num_vertices + len(tensor.arc_source) for _, tensor, _ in links), default=0)
    most = max(most, *(len(node.seconds) for node in graph.nodes))
    laid = ArcLinks(
        first_option=_first([node.seconds for node in graph.nodes]),
        seconds=_floats([node.seconds for node in graph.nodes]),
        first_link=_first(of_node),
        links=_ints([np.array(own, np.int64) for own in of_node]),
        first_arc=_first([tensor.arc_seconds for tensor in tensors]),
        arc_seconds=_floats([tensor.arc_seconds for tensor in tensors]),
        first_of=np.array(first_of, np.int64),
        giver=np.array(giver, np.int64),
        taker=np.array(taker, np.int64),
        tensor=np.array([i for i, _, _ in links], np.int64),
        first_given=_first([tensor.gives for _, tensor, _ in links]),
        gives=_ints([tensor.gives for _, tensor, _ in links]),
        first_wanted=_first([consumer.wants for _, _, consumer in links]),
        wants=_ints([consumer.wants for _, _, consumer in links]),
        first_label=_first([range(tensor.num_vertices) for _, tensor, _ in links]),
        first_hop=_first([tensor.arc_source for _, tensor, _ in links]),
        hop_source=_ints([tensor.arc_source for _, tensor, _ in links]),
        hop_target=_ints([tensor.arc_target for _, tensor, _ in links]),
        first_leaving=_ints([first for first, _ in ahead]),
        leaving=_ints([order for _, order in ahead]),
        first_entering=_ints([first for first, _ in back]),
        entering=_ints([order for _, order in back]),
    )
    taken, seconds, key = np.zeros((3, most))
    return laid, Room(taken=taken, seconds=seconds, key=key, last=np.zeros(most, np.int64), desk=desk(most))


def _closed(tensor: Group, consumer: Consumer) -> tuple[Group, Consumer]:
    """With one vertex more, where all that is given comes for nothing, for options that do not read it."""
    reads = consumer.wants >= 0
    if reads.all():
        return tensor, consumer
    given = np.unique(tensor.gives)
    nowhere = tensor.num_vertices
    wider = replace(
        tensor,
        num_vertices=nowhere + 1,
        arc_source=np.concatenate([tensor.arc_source, given]),
        arc_target=np.concatenate([tensor.arc_target, np.full(len(given), nowhere)]),
    )
    return wider, replace(consumer, wants=np.where(reads, consumer.wants, nowhere))


def _first(parts: Sequence[Sized]) -> Ints:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _floats(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _ints(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _suggested(links: ArcLinks, prices: Prices, room: Room, groups: int) -> tuple[Ints, tuple[Ints, ...]] | None:
    """The better of what the labels suggest from the first node on and from the last."""
    best, least = None, np.inf
    for backward in (False, True):
        choice = np.zeros(len(links.first_option) - 1, np.int64)
        used = np.zeros(links.first_arc[-1], np.int64)
        suggest(links, prices, backward, choice, room)
        if (seconds := ways(links, choice, used, room)) < least:
            arcs = tuple(np.flatnonzero(part) for part in np.split(used, links.first_arc[1:-1])[:groups])
            best, least = (choice, arcs), seconds
    return best


def _seconds(graph: StrategyGraph, choice: Ints, arcs: tuple[Ints, ...]) -> float:
    """What `evaluate` says of arcs that lead where they have to."""
    total = sum(float(node.seconds[option]) for node, option in zip(graph.nodes, choice, strict=True))
    total += sum(float(edge.seconds[choice[edge.a], choice[edge.b]]) for edge in graph.edges)
    return total + sum(float(group.arc_seconds[used].sum()) for group, used in zip(graph.groups, arcs, strict=True))


def _extra(links: ArcLinks, prices: Prices, groups: int) -> tuple[list[Floats], list[Floats]]:
    """How much more than the bound a solution takes that uses an option, or an arc: some consumer uses it then, for
    what of its share the labels do not need."""
    options, taken = [], np.zeros(int(np.diff(links.first_option).max()))
    for node, num in enumerate(np.diff(links.first_option)):
        least = here(links, prices.label, node, taken)
        options.append(taken[:num] - least)
    arcs = []
    for i in range(groups):
        begin, end = links.first_arc[i : i + 2]
        spare = np.full(end - begin, np.inf)
        for link in range(links.first_of[i], links.first_of[i + 1]):
            hops = slice(links.first_hop[link], links.first_hop[link] + end - begin)
            labels = prices.label[links.first_label[link] : links.first_label[link + 1]]
            with np.errstate(invalid="ignore"):
                own = prices.use[hops] - labels[links.hop_target[hops]] + labels[links.hop_source[hops]]
            spare = np.fmin(spare, own)  # no number: no end is reached from there
        arcs.append(spare + links.arc_seconds[begin:end] - prices.used[begin:end])
    return options, arcs
