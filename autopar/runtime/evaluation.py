"""What does a module compute in eval mode? The training graph without dropout and without statistics of the batch."""

import inspect
from typing import Any

from torch import Tensor, fx
from torch.nn import functional as F

from autopar.ops import attention
from autopar.ops.batch_norm import batch_norm
from autopar.ops.dropout import dropout


def evaluation_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a local graph in which nothing is dropped and batch norm uses its running statistics.

    Every rank does less than in training: collectives of batch statistics are gone, all others stay.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if node.op != "call_function":
            continue
        if node.target is dropout:
            node.replace_all_uses_with(node.args[0])
            copy.erase_node(node)
        elif node.target is batch_norm:
            node.target = evaluated_batch_norm
            node.kwargs = {"eps": node.kwargs["eps"]}
        elif getattr(node.target, "__module__", "") == attention.__name__:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            if "dropout_p" in bound.arguments:
                bound.arguments["dropout_p"] = 0.0
            node.args, node.kwargs = bound.args, bound.kwargs
    return copy


def evaluated_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, *, eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with the statistics of training, which stay as they are."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps), running_mean, running_var
