"""What does batch norm return? In training (y, new mean, new variance); in eval mode only y."""

import operator
from typing import Any

from autopar.ops.batch_norm import batch_norm
from autopar.passes.graph_tools import aten, calls, insert, results, substitute
from autopar.values.graph import CapturedModel


def normalize_batch_norm(captured: CapturedModel) -> CapturedModel:
    """Training: `autopar.ops.batch_norm` with three results; eval: `aten.batch_norm` with the running statistics."""
    for node in calls(captured.graph, aten._native_batch_norm_legit_functional.default):
        x, weight, bias, mean, var, training, momentum, eps = node.args
        by_position = results(node)
        if not training:
            y = insert(node, aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, False))
            replaced: dict[int, Any] = {0: y, 3: mean, 4: var}
        else:
            call = insert(node, batch_norm, (x, weight, bias, mean, var), {"momentum": momentum, "eps": eps})
            kept = [(old, new) for old, new in ((0, 0), (3, 1), (4, 2)) if old in by_position]
            replaced = {old: insert(node, operator.getitem, (call, new)) for old, new in kept}
        for position, result in by_position.items():
            if position in replaced:
                substitute(result, replaced[position])
    for node in calls(captured.graph, aten._native_batch_norm_legit_no_training.default):
        x, weight, bias, mean, var, momentum, eps = node.args
        y = insert(node, aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, False))
        for position, result in results(node).items():
            if position == 0:
                substitute(result, y)
    return captured
