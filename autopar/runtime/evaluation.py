"""What does a module compute in eval mode? The training graph without dropout and without statistics of the batch.

Noise that is no dropout stays: a model that adds some draws it in both modes.
"""

import inspect
from typing import Any

from torch import Tensor, fx
from torch.nn import functional as F

from autopar.ops import attention
from autopar.ops.batch_norm import batch_norm
from autopar.ops.drawn import drawn, overload
from autopar.ops.dropout import alpha_dropout, dropout, rrelu


def evaluation_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a local graph in which nothing is dropped and batch norm uses its running statistics.

    Every rank does less than in training: collectives of batch statistics are gone, all others stay.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if node.op != "call_function":
            continue
        if node.target in (dropout, alpha_dropout):
            node.replace_all_uses_with(node.args[0])
            copy.erase_node(node)
        elif node.target is rrelu:
            node.target = evaluated_rrelu
        elif node.target is drawn:
            _switch_off(node)
        elif node.target is batch_norm:
            node.target = evaluated_batch_norm
            node.kwargs = {"eps": node.kwargs["eps"]}
        elif getattr(node.target, "__module__", "") == attention.__name__:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            if "dropout_p" in bound.arguments:
                bound.arguments["dropout_p"] = 0.0
            node.args, node.kwargs = bound.args, bound.kwargs
    return copy


def evaluated_rrelu(x: Tensor, lower: float, upper: float, **_: Any) -> Tensor:
    """rrelu with the mean slope."""
    return F.leaky_relu(x, (lower + upper) / 2)


def _switch_off(node: fx.Node) -> None:
    """A recurrent layer drops nothing in eval mode."""
    op: Any = node.args[0]
    names = [argument.name for argument in overload(op)._schema.arguments]
    if "dropout" in names:
        args = list(node.args)
        args[1 + names.index("dropout")] = 0.0
        node.args = tuple(args)


def evaluated_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, *, eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with the statistics of training, which stay as they are."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps), running_mean, running_var
