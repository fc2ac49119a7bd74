"""Cross entropy over the last dim of the logits, whole or split over mesh axes."""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`logits[..., C]`, `target[...]` (class indices) -> scalar (mean, sum) or `[...]` (none)."""
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss
