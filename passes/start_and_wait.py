"""Which collectives run beside what stands between them and their reader? Those of values of a batch, in two calls.

Each starts where it stood and is waited for just before the first call that reads it. Those whose reader follows at
once stay as they are. Parameters' collectives, and calls that are made again for backward, are no part of this.
"""

from collections.abc import Container

from torch import fx

from autopar.ops.started import start_collective, wait_collective
from autopar.passes.weave_copies import of_batch, sends


def start_and_wait(graph: fx.Graph, inputs: Container[str]) -> fx.Graph:
    """A copy of the graph with these collectives in two calls; `inputs`: placeholders of the batch."""
    batch = of_batch(graph, inputs)
    place = {node: number for number, node in enumerate(graph.nodes)}
    waits: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if sends(node) and node in batch and node.users:
            reader = min(node.users, key=place.__getitem__)
            if place[reader] > place[node] + 1:
                waits.setdefault(reader, []).append(node)
    split = {node for nodes in waits.values() for node in nodes}
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        for sent in waits.get(node, ()):
            made[sent] = copy.create_node("call_function", wait_collective, (made[sent],), {}, sent.name)
            made[sent].meta = dict(sent.meta)
        if node in split:
            source = made[node.all_input_nodes[0]]
            name = node.target.__name__
            made[node] = copy.call_function(start_collective, (source, name), dict(node.kwargs))
        else:
            made[node] = copy.node_copy(node, made.__getitem__)
    copy.lint()
    return copy
