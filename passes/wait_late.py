"""Which collective does nothing in the step wait for? The last one of the loss: its sum over ranks is only told.

The gradient of that sum is the gradient of every summand, so backward can begin while the sum travels.
"""

from torch import fx

from autopar.ops import collectives
from autopar.ops.buckets import all_reduce_told


def wait_late(graph: fx.Graph) -> fx.Graph:
    """The graph with the loss's last all-reduce waited for when the step is over (a copy, where there is one)."""
    if last_sum(graph) is None:
        return graph
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    told = last_sum(copy)
    assert told is not None
    told.target = all_reduce_told
    told.kwargs = {"axis": told.kwargs["axis"]}
    return copy


def last_sum(graph: fx.Graph) -> fx.Node | None:
    """The all-reduce without a backward pass that makes the first result, if nothing else reads it."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = output.args[0]
    first = next(iter(results), None) if isinstance(results, tuple | list) else results  # a stage may have none
    if not isinstance(first, fx.Node) or first.target is not collectives.all_reduce or len(first.users) > 1:
        return None
    return first if first.kwargs.get("backward", "none") == "none" else None
