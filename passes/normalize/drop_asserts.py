"""Which calls only check? Metadata and range assertions: shapes are fixed once a graph is captured."""

import torch

from autopar.passes.graph_tools import calls
from autopar.values.graph import CapturedModel

aten = torch.ops.aten

ASSERTS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._functional_assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)


def drop_asserts(captured: CapturedModel) -> CapturedModel:
    """Remove assertion calls."""
    for node in calls(captured.graph, *ASSERTS):
        captured.graph.erase_node(node)
    return captured
