"""How is the demo's model trained? One plain loop, the same for the whole model and for the distributed one."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from examples.demo.data import Batch

NUM_STEPS = 40
LEARNING_RATE = 1e-3


def train(
    model: nn.Module, batches: Iterable[Batch], lr: float, report: Callable[[int, float], None] | None = None
) -> list[float]:
    """Train with AdamW, one step a batch; returns the loss of every step, taken before its update.

    `report(step, loss)` is called after each step, steps counted from 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step, batch in enumerate(batches, start=1):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if report is not None:
            report(step, losses[-1])
    return losses
