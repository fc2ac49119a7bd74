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


class Prepared:
    """The parameters of one step. `used`: the leaf that the body computes on, by its placeholder."""

    def __init__(self, hoisted: Hoisted, prologue: fx.GraphModule, leaves: Mapping[str, Tensor]) -> None:
        self.roots, self.leaves = hoisted.roots, leaves
        made = prologue(*(leaves[name] for name in hoisted.reads))
        self.made: dict[str, Tensor] = dict(zip(hoisted.makes, made, strict=True))
        self.used = {
            name: value.detach().requires_grad_(value.requires_grad) for name, value in {**leaves, **self.made}.items()
        }

    def gradients(self, scale: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the leaves (by placeholder), times `scale`, made as they are asked for."""
        for name, leaf in self.leaves.items():
            if not leaf.requires_grad:
                continue
            made = [value for value, root in self.roots.items() if root == name]
            ways = [(self.made.pop(v), g) for v in made if (g := _scaled(self.used.pop(v).grad, scale)) is not None]
            total = _scaled(self.used.pop(name).grad, scale)
            if ways:
                (back,) = torch.autograd.grad([value for value, _ in ways], leaf, [g for _, g in ways])
                total = back if total is None else total.add_(back)
            del ways
            if total is not None:
                yield name, total


class Accumulator:
    """Runs the micro-batches of one local graph."""

    def __init__(self, hoisted: Hoisted, accumulation: Accumulation) -> None:
        self.hoisted, self.accumulation = hoisted, accumulation
        self.prologue = fx.GraphModule(nn.Module(), hoisted.prologue)
        self.body = fx.GraphModule(nn.Module(), hoisted.body)

    def prepare(self, leaves: Mapping[str, Tensor]) -> Prepared:
        """What of a step is done once, before its micro-batches."""
        return Prepared(self.hoisted, self.prologue, leaves)

    def step(
        self, leaves: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]], run: Run
    ) -> tuple[Tensor, Iterator[tuple[str, Tensor]]]:
        """The loss of the step and, made as they are asked for, the gradients of `leaves` (by placeholder)."""
        prepared = self.prepare(leaves)
        losses, counts = [], []
        for inputs in batches:
            loss, count = run(self.body, prepared.used, inputs)
            (loss * self.accumulation.weight).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            counts += [] if count is None else [count.detach()]
        scale = gradient_scale(self.accumulation, counts)
        return total_loss(self.accumulation, losses, counts), prepared.gradients(scale)


def gradient_scale(accumulation: Accumulation, counts: list[Tensor]) -> Tensor | None:
    """What the summed gradients of a step are multiplied by, None for 1."""
    return None if not counts else accumulation.rows / torch.stack(counts).sum()


def total_loss(accumulation: Accumulation, losses: list[Tensor], counts: list[Tensor]) -> Tensor:
    """The loss of a step from those of its micro-batches."""
    loss, scale = torch.stack(losses).sum() * accumulation.weight, gradient_scale(accumulation, counts)
    return loss if scale is None else loss * scale.to(loss.dtype)


def _scaled(gradient: Tensor | None, scale: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or scale is None else gradient.mul_(scale.to(gradient.dtype))
