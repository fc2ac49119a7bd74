"""How does a step run its micro-batches? Parameters prepared once, gradients summed as they are used, reduced once.

Every parameter is computed on through a leaf of its own: the copy in use if it lives for the step (`step`, `always`),
else what is stored. Autograd sums each leaf's gradients over the micro-batches; afterwards the sums go back the way
that the copies came, one parameter at a time, so that no more than one gradient exists twice. In mixed precision sums
are as wide as what is stored; on their way back they are as narrow as what is computed on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, fx, nn

from autopar.graph import Accumulation
from autopar.passes.hoist_parameters import Hoisted

Run = Callable[[fx.GraphModule, Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]
"""(graph, values of parameters, inputs of a micro-batch) -> its loss and, if labels are counted, how many count."""


class Prepared:
    """The parameters of one step. `used`: the leaf that the body computes on, by its placeholder.

    masters: dtypes of parameters that are stored in another than is computed on; in these gradients add up.
    """

    def __init__(
        self,
        hoisted: Hoisted,
        prologue: fx.GraphModule,
        leaves: Mapping[str, Tensor],
        masters: Mapping[str, torch.dtype],
    ) -> None:
        self.roots, self.leaves = hoisted.roots, leaves
        made = prologue(*(leaves[name] for name in hoisted.reads))
        self.made: dict[str, Tensor] = dict(zip(hoisted.makes, made, strict=True))
        self.used = {
            name: value.detach().requires_grad_(value.requires_grad) for name, value in {**leaves, **self.made}.items()
        }
        self.sums: dict[str, Tensor] = {}
        self._dtypes = {name: masters[root] for name in self.used if (root := self.roots.get(name, name)) in masters}
        for name in self._dtypes:
            if self.used[name].requires_grad:
                self.used[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._add, name)
                )

    def collect(self) -> None:
        """Add gradients that hooks have not seen to their sums; after each part of a backward pass."""
        for name in self._dtypes:
            self._add(name, self.used[name])

    def _add(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            held = self.sums.get(name)
            self.sums[name] = gradient.to(self._dtypes[name]) if held is None else held.add_(gradient)

    def _sum(self, name: str) -> Tensor | None:
        """The sum of a leaf's gradients, which is given away."""
        leaf = self.used.pop(name)
        return self.sums.pop(name, None) if name in self._dtypes else leaf.grad

    def gradients(self, scale: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the leaves (by placeholder), times `scale`, made as they are asked for."""
        for name, leaf in self.leaves.items():
            if not leaf.requires_grad:
                continue
            made = [value for value, root in self.roots.items() if root == name]
            ways = [(self.made.pop(v), g) for v in made if (g := _scaled(self._sum(v), scale)) is not None]
            total = _scaled(self._sum(name), scale)
            if ways:
                gradients = [g.to(value.dtype) for value, g in ways]
                (back,) = torch.autograd.grad([value for value, _ in ways], leaf, gradients)
                back = back.to(self._dtypes.get(name, back.dtype))
                total = back if total is None else total.add_(back)
                del gradients
            del ways
            if total is not None:
                yield name, total


class Accumulator:
    """Runs the micro-batches of one local graph."""

    def __init__(
        self, hoisted: Hoisted, accumulation: Accumulation, masters: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self.hoisted, self.accumulation, self.masters = hoisted, accumulation, masters or {}
        self.prologue = fx.GraphModule(nn.Module(), hoisted.prologue)
        self.body = fx.GraphModule(nn.Module(), hoisted.body)

    def prepare(self, leaves: Mapping[str, Tensor]) -> Prepared:
        """What of a step is done once, before its micro-batches."""
        return Prepared(self.hoisted, self.prologue, leaves, self.masters)

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
