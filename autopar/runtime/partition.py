"""What does a compiled graph keep between forward and backward? What the plan keeps, said to torch's partitioner.

AOTAutograd traces forward and backward into one graph and cuts it in two. Results of calls that `again` made, of
gathers with `regather`, and views of either are marked to be made again; for everything else `default_partition` keeps
what autograd would have kept, and min-cut (inductor's) at most as many bytes. In eager mode every use gathers for
itself; a compiled backward pass gathers once for all uses of a parameter.
"""

import operator
from collections.abc import Sequence
from typing import Any

from functorch.compile import default_partition  # type: ignore[import-untyped]
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autopar.ops.recompute import AGAIN
from autopar.ops.traced import exchange

EXCHANGE = exchange._opoverload


def mark(joint: fx.GraphModule) -> None:
    """Set torch's `recompute` on the forward nodes of a joint graph that backward makes again."""
    again: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        # One number for all: torch keeps what crosses from one checkpointed region to another.
        node.meta["ac_graph_id"] = 0
        source = node.args[0] if node.args else None
        follows = _is_view(node) and source in again
        if follows or AGAIN in node.meta.get("custom", {}) or (node.target is EXCHANGE and node.args[3]):
            again.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in again:
        for source in node.all_input_nodes:
            if source not in again and source.op == "call_function":
                source.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def eager_partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Forward and backward; kept is what autograd would keep, the marked aside."""
    mark(joint)
    return default_partition(joint, inputs, **options)
