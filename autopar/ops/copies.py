"""What makes one loss of the micro-batches that run at once? Their sum, weighed as `graph.Accumulation` says."""

from collections.abc import Sequence

from torch import Tensor

from autopar.ops.random import COPY


def added(values: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def step_loss(losses: Sequence[Tensor], counts: Sequence[Tensor], *, weight: float, rows: float) -> Tensor:
    """`weight` times the sum of losses and, where labels are counted, times rows / labels that count."""
    loss = added(losses) * weight
    return loss * (rows / added(counts)).to(loss.dtype) if counts else loss


def site_of(site: int, copy: int) -> int:
    """The site of a call in a copy: it draws as it would in that micro-batch alone."""
    return site + copy * COPY
