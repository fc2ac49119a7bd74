"""What is a cross entropy of weighted classes or of probabilities? Each row's loss and what divides it.

    rows     -sum of weight * target * log probability, over classes
    mean     sum of rows / sum of the weights of their labels; of probabilities: / number of rows

A likelihood of a log-softmax that nothing else reads is the cross entropy of what the softmax is of.
"""

from typing import Any

from torch import fx

from autopar.passes.graph_tools import aten, calls, insert, substitute
from autopar.passes.normalize.cross_entropy import unflatten
from autopar.passes.normalize.losses import MEAN, NONE
from autopar.values.graph import CapturedModel, dtype_of, requires_grad, shape_of

LIKELIHOODS = (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
DEFAULTS = (None, MEAN, -100, 0.0)
"""Of weight, reduction, label to ignore, smoothing."""


def part_weighted_losses(captured: CapturedModel) -> CapturedModel:
    """Calls in which `ops.cross_entropy` does not do, as calls on rows."""
    for node in calls(captured.graph, *LIKELIHOODS, aten.cross_entropy_loss.default):
        given: tuple[Any, ...] = (*node.args, *DEFAULTS[len(node.args) - 2 :])
        scores, target, weight, reduction, ignored, smoothing = given
        rank, of_likelihood = len(shape_of(scores)), node.target in LIKELIHOODS
        plain = weight is None and not dtype_of(target).is_floating_point
        if rank < 2 or (weight is not None and requires_grad(weight)):
            continue
        if of_likelihood and plain and _is_softmax(scores):
            args = (scores.args[0], target, None, reduction, ignored)
            substitute(node, insert(node, aten.cross_entropy_loss.default, args))
        elif of_likelihood or not plain:
            loss = _loss(node, scores, target, weight, reduction, ignored, smoothing)
            substitute(node, loss)
    return captured


def _is_softmax(node: Any) -> bool:
    softmax = node.target is aten.log_softmax.int and len(node.args) == 2 and not node.kwargs
    return bool(softmax and node.args[1] in (1, 1 - len(shape_of(node))) and len(node.users) == 1)


def _loss(
    node: fx.Node, scores: Any, target: Any, weight: Any, reduction: int, ignored: int, smoothing: float
) -> fx.Node:
    rank, probable = len(shape_of(scores)), dtype_of(target).is_floating_point
    classes_last = [0, *range(2, rank), 1]
    if rank > 2:
        scores = insert(node, aten.permute.default, (scores, classes_last))
        target = insert(node, aten.permute.default, (target, classes_last)) if probable else target
    elif not probable:
        scores, target = unflatten(node, scores, target)
    logs = scores if node.target in LIKELIHOODS else insert(node, aten.log_softmax.int, (scores, -1))
    if probable:
        rows, weights = _of_probabilities(node, logs, target, weight, smoothing), None
    else:
        rows, weights = _of_labels(node, logs, target, weight, ignored, smoothing)
    if reduction == NONE:
        made = rows
    elif reduction == MEAN and weights is None:
        made = insert(node, aten.mean.default, (rows,))
    else:
        made = insert(node, aten.sum.default, (rows,))
        if reduction == MEAN:
            made = insert(node, aten.div.Tensor, (made, insert(node, aten.sum.default, (weights,))))
    same = shape_of(made) == shape_of(node)
    return made if same else insert(node, aten.reshape.default, (made, list(shape_of(node))))


def _negative_sum(node: fx.Node, terms: fx.Node) -> fx.Node:
    return insert(node, aten.neg.default, (insert(node, aten.sum.dim_IntList, (terms, [-1])),))


def _of_probabilities(node: fx.Node, logs: fx.Node, target: fx.Node, weight: Any, smoothing: float) -> fx.Node:
    if smoothing:
        target = insert(node, aten.mul.Tensor, (target, 1 - smoothing))
        target = insert(node, aten.add.Tensor, (target, smoothing / shape_of(logs)[-1]))
    terms = insert(node, aten.mul.Tensor, (logs, target))
    return _negative_sum(node, terms if weight is None else insert(node, aten.mul.Tensor, (terms, weight)))


def _of_labels(
    node: fx.Node, logs: fx.Node, target: fx.Node, weight: Any, ignored: int, smoothing: float
) -> tuple[fx.Node, fx.Node]:
    """Rows' losses and the weights of their labels, both zero where a label is ignored."""

    def kept(value: fx.Node) -> fx.Node:
        return insert(node, aten.masked_fill.Scalar, (value, beside, 0))

    beside = insert(node, aten.eq.Scalar, (target, ignored))
    label = kept(target)
    places = insert(node, aten.unsqueeze.default, (label, len(shape_of(label))))
    picked = insert(node, aten.gather.default, (logs, len(shape_of(label)), places))
    rows = insert(node, aten.neg.default, (insert(node, aten.squeeze.dim, (picked, len(shape_of(label)))),))
    if weight is None:
        counted = insert(node, aten.ones_like.default, (rows,))
    else:
        counted = insert(node, aten.index.Tensor, (weight, [label]))
        rows = insert(node, aten.mul.Tensor, (rows, counted))
    if smoothing:
        terms = logs if weight is None else insert(node, aten.mul.Tensor, (logs, weight))
        smooth = insert(node, aten.mul.Tensor, (_negative_sum(node, terms), smoothing / shape_of(logs)[-1]))
        rows = insert(node, aten.add.Tensor, (insert(node, aten.mul.Tensor, (rows, 1 - smoothing)), smooth))
    return kept(rows), kept(counted)
