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
    return first if isinstance(first, fx.Node) and _only_told(first) else None


def _only_told(node: fx.Node) -> bool:
    is_sum = node.target is collectives.all_reduce and node.kwargs.get("backward", "none") == "none"
    return is_sum and len(node.users) == 1
