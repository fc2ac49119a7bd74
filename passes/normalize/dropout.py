"""Where is randomness drawn? Every dropout becomes `autopar.ops.dropout`, numbered by its place in the model."""

from typing import Any

import torch

from autopar.graph import CapturedModel
from autopar.ops.dropout import dropout
from autopar.passes.graph_tools import aten, calls, insert, results, substitute

DROPOUTS = (aten.native_dropout.default, aten.dropout.default)


def normalize_dropout(captured: CapturedModel) -> CapturedModel:
    """`native_dropout(x, p, True)` -> `dropout(x, p, site=n)`; nothing where p is 0 or the module is in eval mode."""
    site = 0
    for node in calls(captured.graph, *DROPOUTS):
        x: Any = node.args[0]
        p, training = float(node.args[1]), node.args[2]  # type: ignore[arg-type]
        if training is False or p == 0.0:
            replacement = x
        else:
            replacement = insert(node, dropout, (x, p), {"site": site})
            site += 1
        if isinstance(node.meta["val"], torch.Tensor):
            substitute(node, replacement)
            continue
        by_position = results(node)
        if 0 in by_position:
            substitute(by_position[0], replacement)
    return captured


def next_site(captured: CapturedModel) -> int:
    """First number that no random call of the graph uses."""
    sites = [int(node.kwargs["site"]) for node in captured.graph.nodes if "site" in node.kwargs]
    return max(sites, default=-1) + 1
