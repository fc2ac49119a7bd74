"""Which gathers begin before they are read? Those of buckets: each when the one before it is there.

So a bucket travels while what reads the one before computes. In backward, where buckets are gathered again the last one
first, each begins when the one after it is there (`ops.buckets.Prefetched`). Buckets of what is padded or gathered
already wait for another call, and stay where they are.
"""

import itertools

from torch import fx

from autopar.ops.buckets import all_gather_bucket, prefetched


def prefetch(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in buckets (`passes.fuse_collectives`) whose gathers of parameters begin one bucket ahead."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    waiting = [node for node in graph.nodes if _is_direct(node)]
    following = dict(itertools.pairwise(waiting))
    begun: dict[fx.Node, fx.Node] = {}

    def begin(node: fx.Node, before: fx.Node | None) -> None:
        values = tuple(made[source] for source in node.all_input_nodes)
        begun[node] = copy.call_function(prefetched, values, {"axis": node.kwargs["axis"], "before": before})

    for node in graph.nodes:
        if waiting and node is waiting[0]:
            begin(node, None)
        made[node] = copy.node_copy(node, made.__getitem__)
        if node in begun:
            made[node].kwargs = {**made[node].kwargs, "begun": begun[node]}
            if node in following:
                begin(following[node], begun[node])
    copy.lint()
    return copy


def _is_direct(node: fx.Node) -> bool:
    return node.target is all_gather_bucket and all(source.op == "placeholder" for source in node.all_input_nodes)
