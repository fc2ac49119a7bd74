"""Of what is the loss a mean? The graph of a micro-batch, so that losses and gradients of micro-batches add up.

Walking back from the loss through what is linear in it (scaling by numbers, adding, casts) one meets the reductions
that made it. With M micro-batches of equal size, the loss of the global batch is

    mean over elements              sum of losses / M
    sum over elements               sum of losses
    mean over labels not ignored    sum of S_m / sum of C_m: here each micro-batch divides by all its rows N instead
                                    (finite even if a micro-batch ignores every label) and its count C_m becomes an
                                    output, so the step's is (sum of losses / M) · M N / sum of C_m

What comes before the reduction is taken to treat every sample alone; statistics of a batch (batch norm) are those of a
micro-batch, as everywhere in PyTorch. A loss that adds up terms of several kinds has no common weight and is refused.
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import BatchError
from autopar.graph import Accumulation, CapturedModel, operands, target_name
from autopar.ops.batch_norm import batch_norm
from autopar.ops.cross_entropy import count_labels, cross_entropy
from autopar.ops.own_gradient import is_own
from autopar.passes.graph_tools import output_node, outputs, verify
from autopar.rules.registry import rule_of

MEAN, SUM = 1, 2  # of ATen's `reduction` arguments

_SAME = {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "expand", "_to_copy", "clone", "alias", "neg"}
_SCALED = {"mul", "div"}
_ADDED = {"add", "sub"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """A reduction that the loss is linear in. power: how it grows with the number of samples (0 mean, 1 sum).

    factors: the numbers that scale it on the way to the loss.
    """

    node: fx.Node
    power: int
    counted: bool
    factors: tuple[float, ...]

    @property
    def scale(self) -> float:
        return math.prod(self.factors)


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

    probe: captures the global batch; called only where a number in the graph may stem from the size of the batch.
    in_place: the graph is nobody else's, so that it may be changed.

    Raises:
        BatchError: if the loss of the global batch does not follow from those of its micro-batches.
    """
    if microbatches == 1:
        return captured
    if written := [p.names[0] for p in captured.parameters if p.mutated_by]:
        raise BatchError(
            f"{microbatches} micro-batches were asked, but forward writes the parameter {written[0]}, once a batch; "
            "use one micro-batch"
        )
    if whole := [node.name for node in captured.graph.nodes if node.op == "call_function" and _needs_whole(node)]:
        raise BatchError(
            f"{microbatches} micro-batches were asked, but the backward of {whole[0]} is not linear in the gradient "
            "that arrives, of which a micro-batch has a part; use one micro-batch"
        )
    parts = parts_of(captured, microbatches, probe)
    if not parts.losses:
        return replace(captured, accumulation=Accumulation(microbatches=microbatches, weight=parts.weight))
    return _counted(captured if in_place else _copied(captured), microbatches, parts)


def _needs_whole(node: fx.Node) -> bool:
    """Whether a call's backward makes other gradients of summands than their sum."""
    return is_own(node.target) and rule_of(node).whole_gradient


def parts_of(captured: CapturedModel, microbatches: int, probe: Callable[[], CapturedModel]) -> Parts:
    """What `accumulate_gradients` makes of the loss.

    Raises:
        BatchError: as it does.
    """
    terms = _terms_of(captured)
    powers = _powers(captured, terms, microbatches, probe)
    counts = {(_target(t.node), t.node.kwargs.get("ignore_index", -100)) for t in terms if t.counted}
    if len(powers) > 1 or len(counts) > 1 or (counts and not all(term.counted for term in terms)):
        found = ", ".join(f"{term.node.name} ({_kind(term)})" for term in terms)
        raise BatchError(
            f"{microbatches} micro-batches were asked, but the loss adds up means of several kinds: {found}; their "
            "sums over micro-batches have no common weight; use one micro-batch, or reduce all terms alike (all means "
            "over every element, or all sums)"
        )
    power = powers.pop()
    if power not in (0, 1):
        raise BatchError(f"{microbatches} micro-batches were asked, but the loss grows with the batch to power {power}")
    weight = 1.0 if power else 1.0 / microbatches
    if not counts:
        return Parts(weight=weight)
    ((target, ignored),) = counts
    losses = tuple(term.node.name for term in terms)
    return Parts(weight=weight, losses=losses, target=target.name, ignored=ignored)


def is_unscaled(captured: CapturedModel) -> bool:
    """Whether no number scales a part of the loss, so that none can stem from the size of the batch.

    Raises:
        BatchError: if the loss is not linear in what reduces samples.
    """
    return all(abs(x) == 1 for term in _terms_of(captured) for x in term.factors)


def rows_of_mean(captured: CapturedModel) -> float | None:
    """Over how many labels the loss is a mean, or a multiple of several over the same labels; None if of others too.

    Raises:
        BatchError: if the loss is not linear in what reduces samples.
    """
    terms = _terms_of(captured)
    means = {node for node in captured.graph.nodes if is_mean_over_labels(node)}
    labels = {(_target(node), node.kwargs.get("ignore_index", -100)) for node in means}
    if {term.node for term in terms} != means or len(labels) != 1:
        return None
    ((target, _),) = labels
    return float(target.meta["val"].numel())


def is_mean_over_labels(node: fx.Node) -> bool:
    """Whether a call is a mean over labels that are not ignored."""
    return node.target is cross_entropy and node.kwargs.get("reduction", "mean") == "mean"


def has_batch_statistics(captured: CapturedModel) -> bool:
    """Whether samples of a batch influence each other by its statistics, so that micro-batches are another model."""
    return any(
        node.target is batch_norm or "batch_norm" in target_name(node.target)
        for node in captured.graph.nodes
        if node.op == "call_function"
    )


def _kind(term: _Term) -> str:
    return "mean over labels that are not ignored" if term.counted else "sum" if term.power else "mean"


def _of_inputs(captured: CapturedModel) -> set[fx.Node]:
    """Nodes whose values depend on the batch."""
    found = {captured.nodes[spec.placeholder] for spec in captured.inputs}
    for node in captured.graph.nodes:
        if node.op == "call_function" and any(source in found for source in operands(node)):
            found.add(node)
    return found


def _terms_of(captured: CapturedModel) -> tuple[_Term, ...]:
    return tuple(_terms(captured.nodes[captured.loss], _of_inputs(captured), ()))


def _terms(node: fx.Node, batch: set[fx.Node], factors: tuple[float, ...]) -> Iterator[_Term]:
    def term(power: int, counted: bool = False) -> _Term:
        return _Term(node=node, power=power, counted=counted, factors=factors)

    name = target_name(node.target).removeprefix("aten.").split(".")[0]
    sources = operands(node)
    dependent = [source for source in sources if source in batch]
    if node not in batch:
        yield term(0)  # weight decay and the like: the same in every micro-batch
    elif name in _SAME or node.target is operator.getitem:
        yield from _terms(sources[0], batch, factors)
    elif name in _ADDED:
        if any(not isinstance(a, fx.Node) and a for a in node.args[:2]):
            yield term(0)
        for source in sources:
            yield from _terms(source, batch, factors)
    elif name in _SCALED and len(dependent) == 1 and (name == "mul" or dependent[0] is node.args[0]):
        numbers = [float(a) for a in node.args[:2] if isinstance(a, (int, float))]
        scales = [x if name == "mul" or x == 0 else 1 / x for x in numbers]
        yield from _terms(dependent[0], batch, (*factors, *scales))
    elif is_mean_over_labels(node):
        yield term(0, counted=True)
    elif node.target is cross_entropy and node.kwargs["reduction"] == "sum":
        yield term(1)
    elif name in ("mean", "sum") and sources[0].meta["val"].dim():
        yield term(int(name == "sum"))
    elif (reduction := _reduction(node)) is not None:
        yield term(int(reduction == SUM))
    else:
        raise BatchError(
            f"the loss depends on the batch by {node.name} = {target_name(node.target)}, of which no part over "
            "micro-batches makes the whole; use one micro-batch, or end the loss in a mean or sum over elements or "
            "F.cross_entropy over class indices"
        )


def _reduction(node: fx.Node) -> int | None:
    """The reduction of ATen's own losses, None for what is none or weighs samples by their labels."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    arguments = {a.name: (i, a.default_value) for i, a in enumerate(node.target._schema.arguments)}
    if "reduction" not in arguments:
        return None
    position, default = arguments["reduction"]
    value: Any = node.args[position] if position < len(node.args) else node.kwargs.get("reduction", default)
    labelled = "ignore_index" in arguments and not operands(node)[1].meta["val"].is_floating_point()
    return int(value) if value in (MEAN, SUM) and not (labelled and value == MEAN) else None


def _powers(
    captured: CapturedModel, terms: tuple[_Term, ...], microbatches: int, probe: Callable[[], CapturedModel]
) -> set[int]:
    """By which powers of the batch the terms grow, the numbers that scale them included.

    A number may be the size of the batch; that of one sample leaves no trace in a graph at all. Then the global batch
    is captured too, and the numbers are compared.
    """
    batch = min((spec.shape[0] for spec in captured.inputs if spec.shape), default=1)
    sizes = (abs(x) != 1 and (t.power or _may_be_size(x, batch)) for t in terms for x in t.factors)
    if not any(sizes) and (batch > 1 or all(term.counted for term in terms)):
        return {term.power for term in terms}
    whole = _terms_of(probe())
    powers = set()
    for here, there in zip(terms, whole, strict=False):
        ratio = there.scale / here.scale if here.scale else 1.0
        growth = round(math.log(ratio, microbatches)) if ratio > 0 else 2
        if len(terms) != len(whole) or abs(ratio - microbatches**growth) > 1e-9 * ratio:
            raise BatchError(
                f"the loss scales {here.node.name} by {here.scale:g} for a micro-batch and by {there.scale:g} for the "
                f"global batch of {microbatches} micro-batches; use one micro-batch, or scale by a number or the size "
                "of the batch"
            )
        powers.add(there.power + growth)
    return powers


def _may_be_size(number: float, batch: int) -> bool:
    sizes = [x / batch for x in (abs(number), 1 / abs(number) if number else 0.0)]
    return any(x >= 1 - 1e-9 and abs(x - round(x)) <= 1e-9 * x for x in sizes)


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
