"""Of what is the loss a mean? The graph of a micro-batch, so that losses and gradients of micro-batches add up.

With M micro-batches of equal size, the loss of the global batch is

    mean over elements              sum of losses / M
    sum over elements               sum of losses
    mean over labels not ignored    sum of S_m / sum of C_m: here each micro-batch divides by all its rows N instead
                                    (finite even if a micro-batch ignores every label) and its count C_m becomes an
                                    output, so the step's is (sum of losses / M) · M N / sum of C_m

Which of them it is, or that it is none, `joined_samples` says: a loss that joins samples has no micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import BatchError
from autopar.ops.cross_entropy import count_labels, cross_entropy
from autopar.passes.graph_tools import output_node, outputs, verify
from autopar.passes.joined_samples import loss_over_samples
from autopar.passes.sample_states import Joined
from autopar.rules.discovered import has_own_backward
from autopar.rules.registry import rule_of
from autopar.values.graph import Accumulation, CapturedModel, operands

ONE = "use one micro-batch, or a loss that is a sum or a mean of terms of single samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How micro-batches make a step: the weight of their losses; of a mean over labels that are not ignored the calls
    that take it, the labels (a node's name) and what is ignored."""

    weight: float
    losses: tuple[str, ...] = ()
    target: str = ""
    ignored: Any = None


def accumulate_gradients(
    captured: CapturedModel, microbatches: int, probe: Callable[[], CapturedModel], *, in_place: bool = False
) -> CapturedModel:
    """`captured` (at the shapes of a micro-batch) as one of `microbatches` of a step.

    probe: captures the global batch.
    in_place: the graph is nobody else's, so that it may be changed.

    Raises:
        BatchError: if the loss of the global batch does not follow from those of its micro-batches.
    """
    if microbatches == 1:
        return captured
    if several := [node.name for node in captured.graph.nodes if node.op == "call_function" and _needs_whole(node)]:
        raise BatchError(
            f"{microbatches} micro-batches were asked, but the backward of {several[0]} is not linear in the gradient "
            "that arrives, of which a micro-batch has a part; use one micro-batch"
        )
    parts = parts_of(captured, microbatches, probe())
    if not parts.losses:
        return replace(captured, accumulation=Accumulation(microbatches=microbatches, weight=parts.weight))
    return _counted(captured if in_place else _copied(captured), microbatches, parts)


def _needs_whole(node: fx.Node) -> bool:
    """Whether a call's backward makes other gradients of summands than their sum."""
    return has_own_backward(node) and rule_of(node).whole_gradient


def parts_of(captured: CapturedModel, microbatches: int, whole: CapturedModel) -> Parts:
    """What `accumulate_gradients` makes of the loss; whole: the graph of the global batch.

    Raises:
        BatchError: as it does.
    """
    found = loss_over_samples(whole, captured)
    if isinstance(found, Joined):
        raise BatchError(f"{microbatches} micro-batches were asked, but {found.why}; {ONE}")
    weight = 1.0 if found.power else 1.0 / microbatches
    if found.labels is None:
        return Parts(weight=weight)
    means = [[n for n in model.graph.nodes if is_mean_over_labels(n)] for model in (whole, captured)]
    if len(means[0]) != len(means[1]):
        raise BatchError(
            f"{microbatches} micro-batches were asked, but a micro-batch has {len(means[1])} means over labels and the "
            f"global batch {len(means[0])}; {ONE}"
        )
    own = [here for there, here in zip(*means, strict=True) if there.name in found.losses]
    ignored = found.labels[1]
    return Parts(weight=weight, losses=tuple(n.name for n in own), target=_target(own[0]).name, ignored=ignored)


def is_mean_over_labels(node: fx.Node) -> bool:
    """Whether a call is a mean over labels that are not ignored."""
    return node.target is cross_entropy and node.kwargs.get("reduction", "mean") == "mean"


def _target(node: fx.Node) -> fx.Node:
    return operands(node)[1]


def _copied(captured: CapturedModel) -> CapturedModel:
    """With a graph of its own."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return replace(captured, graph=graph)


def count_call(graph: fx.Graph, target: fx.Node, ignored: Any, module: str) -> fx.Node:
    """The call that counts labels, at the end of a graph."""
    count = graph.call_function(count_labels, (target,), {"ignore_index": ignored})
    count.meta = {
        "val": torch.empty((), dtype=torch.float64, device="meta"),
        "requires_grad": False,
        "module": module,
    }
    return count


def _counted(captured: CapturedModel, microbatches: int, parts: Parts) -> CapturedModel:
    """Cross entropies divided by all rows, and the number of labels that count as another output; in place."""
    graph, nodes = captured.graph, captured.nodes
    rows = nodes[parts.target].meta["val"].numel()
    for name in parts.losses:
        nodes[name].kwargs = {**nodes[name].kwargs, "count": rows}
    end = output_node(graph)
    with graph.inserting_before(end):
        count = count_call(graph, nodes[parts.target], parts.ignored, nodes[parts.losses[0]].meta["module"])
    end.args = ((*outputs(graph), count),)
    end.meta = {**end.meta, "val": (*end.meta["val"], count.meta["val"])}
    accumulation = Accumulation(
        microbatches=microbatches, weight=parts.weight, count=count.name, rows=float(rows * microbatches)
    )
    done = replace(captured, graph=graph, accumulation=accumulation)
    verify(done)
    return done
