"""A strategy graph whose memory has a price instead of a limit: bytes cost seconds, and nothing is forbidden.

With prices u >= 0, one a moment, in seconds a byte, the least of

    seconds + sum over moments t of u[t] * (bytes at t - limit)

over all choices is a lower bound on the seconds of every choice within the limit (Lagrange; Geoffrion 1974). What is
left has no row that couples everything: its relaxation is nearly integral, and dominance leaves far more out.

A kept tensor becomes a way of its own: from every vertex that may be kept an arc of its price leads to a second vertex,
which those want who keep it. An arc is paid once however many use it, as a kept tensor is.
"""

from dataclasses import replace

import numpy as np

from autopar.search.graph.strategy_graph import Consumer, Floats, Group, Ints, KeptMemory, StrategyGraph


def priced(graph: StrategyGraph, prices: Floats) -> StrategyGraph:
    """The graph without a limit, with `prices[moment]` in seconds a byte; `evaluate` of it leaves out u (base - limit).

    Arcs keep their numbers, those of kept tensors come behind (`original_arcs` drops them).
    """
    memory = graph.memory
    assert memory is not None
    seconds = [node.seconds.copy() for node in graph.nodes]
    for term in memory.nodes:
        seconds[term.node] = seconds[term.node] + term.nbytes * float(term.coefficient @ prices)
    groups = list(graph.groups)
    for arc in memory.arcs:
        group = groups[arc.group]
        groups[arc.group] = replace(group, arc_seconds=group.arc_seconds + arc.nbytes * float(arc.coefficient @ prices))
    kept: dict[int, list[KeptMemory]] = {}
    for keeping in memory.kept:
        kept.setdefault(keeping.group, []).append(keeping)
    for number, terms in kept.items():
        for keeping in terms:
            price = float(keeping.coefficient @ prices)
            groups[number] = _with_kept(groups[number], graph.groups[number], keeping, price)
    nodes = tuple(replace(node, seconds=own) for node, own in zip(graph.nodes, seconds, strict=True))
    return replace(graph, nodes=nodes, groups=tuple(groups), memory=None)


def original_arcs(graph: StrategyGraph, arcs: tuple[Ints, ...]) -> tuple[Ints, ...]:
    """Of arcs used in `priced(graph, ...)`, those of `graph`."""
    return tuple(used[used < len(group.arc_seconds)] for group, used in zip(graph.groups, arcs, strict=True))


def _with_kept(group: Group, plain: Group, keeping: KeptMemory, price: float) -> Group:
    """`price`: seconds a byte, of all moments at which the tensor is kept. plain: the group as it was."""
    vertices = np.arange(len(keeping.nbytes))
    second = group.num_vertices + vertices
    consumers = list(group.consumers)
    for i in keeping.keepers:
        wants = plain.consumers[i].wants
        keeper = Consumer(node=consumers[i].node, wants=np.where(wants >= 0, second[np.maximum(wants, 0)], -1))
        if consumers[i] is plain.consumers[i]:
            consumers[i] = keeper
        else:  # it pays for another kept copy already
            consumers.append(keeper)
    if keeping.keeps_given:
        consumers.append(Consumer(node=group.producer, wants=second[group.gives]))
    return replace(
        group,
        consumers=tuple(consumers),
        num_vertices=group.num_vertices + len(vertices),
        arc_source=np.concatenate([group.arc_source, vertices]),
        arc_target=np.concatenate([group.arc_target, second]),
        arc_seconds=np.concatenate([group.arc_seconds, keeping.nbytes * price]),
    )
