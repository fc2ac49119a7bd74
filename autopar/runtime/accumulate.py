"""How does a step run its micro-batches? Parameters prepared once, gradients summed as they are used, reduced once.

Every parameter is computed on through a leaf of its own: the copy in use if it lives for the step (`step`, `always`),
else what is stored. Autograd sums each leaf's gradients over the micro-batches; afterwards the sums go back the way
that the copies came, one parameter at a time, so that no more than one gradient exists twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from autopar.graph import Accumulation
from autopar.passes.hoist_parameters import Hoisted

Run = Callable[[fx.GraphModule, Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]
"""(graph, values of parameters, inputs of a micro-batch) -> its loss and, if labels are counted, how many count."""


class Accumulator:
    """Runs the micro-batches of one local graph."""

    def __init__(self, hoisted: Hoisted, accumulation: Accumulation) -> None:
        self.hoisted, self.accumulation = hoisted, accumulation
        self.prologue = fx.GraphModule(nn.Module(), hoisted.prologue)
        self.body = fx.GraphModule(nn.Module(), hoisted.body)

    def step(
        self, leaves: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]], run: Run
    ) -> tuple[Tensor, Iterator[tuple[str, Tensor]]]:
        """The loss of the step and, made as they are asked for, the gradients of `leaves` (by placeholder)."""
        prepared = dict(zip(self.hoisted.makes, self.prologue(*(leaves[n] for n in self.hoisted.reads)), strict=True))
        used = {
            name: value.detach().requires_grad_(value.requires_grad) for name, value in {**leaves, **prepared}.items()
        }
        losses, counts = [], []
        for inputs in batches:
            loss, count = run(self.body, used, inputs)
            (loss * self.accumulation.weight).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            counts += [] if count is None else [count.detach()]
        scale = None if not counts else self.accumulation.rows / torch.stack(counts).sum()
        return total_loss(self.accumulation, losses, counts), self._gradients(leaves, prepared, used, scale)

    def _gradients(
        self, leaves: Mapping[str, Tensor], prepared: dict[str, Tensor], used: dict[str, Tensor], scale: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, leaf in leaves.items():
            if not leaf.requires_grad:
                continue
            made = [value for value, root in self.hoisted.roots.items() if root == name]
            ways = [(prepared.pop(v), g) for v in made if (g := _scaled(used.pop(v).grad, scale)) is not None]
            total = _scaled(used.pop(name).grad, scale)
            if ways:
                (back,) = torch.autograd.grad([value for value, _ in ways], leaf, [g for _, g in ways])
                total = back if total is None else total.add_(back)
            del ways
            if total is not None:
                yield name, total


def total_loss(accumulation: Accumulation, losses: list[Tensor], counts: list[Tensor]) -> Tensor:
    """The loss of a step from those of its micro-batches."""
    loss = torch.stack(losses).sum() * accumulation.weight
    return loss * (accumulation.rows / torch.stack(counts).sum()).to(loss.dtype) if counts else loss


def _scaled(gradient: Tensor | None, scale: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or scale is None else gradient.mul_(scale.to(gradient.dtype))
