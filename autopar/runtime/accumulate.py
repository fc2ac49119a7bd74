"""How does a step run its micro-batches? Parameters prepared once, gradients summed as they are used, reduced once.

Every parameter is computed on through a leaf of its own: the copy in use if it lives for the step (`step`, `always`),
else what is stored. Autograd sums each leaf's gradients over the micro-batches; afterwards the sums go back the way
that the copies came, one parameter at a time, so that no more than one gradient exists twice. In mixed precision sums
are as wide as what is stored; on their way back they are as narrow as what is computed on.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from autopar.ops.buckets import Finish, use_sink
from autopar.passes.call_natively import call_natively
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.hoist_parameters import Hoisted, hoist_parameters
from autopar.passes.prefetch import prefetch
from autopar.passes.start_and_wait import start_and_wait
from autopar.runtime.reductions import Late
from autopar.values.graph import Accumulation
from autopar.values.local_model import LocalModel

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
        buckets: Sequence[Sequence[str]] = (),
    ) -> None:
        self.roots, self.leaves = hoisted.roots, leaves
        self.buckets = buckets
        self.late = Late(self.add)
        self._reduced: dict[str, Tensor] = {}
        self._waiting: list[Finish] = []
        with use_sink(_Prologue(self._reduced, self._waiting)):
            made = prologue(*(leaves[name] for name in hoisted.reads))
        self.made: dict[str, Tensor] = dict(zip(hoisted.makes, made, strict=True))
        self.used = {
            name: value.detach().requires_grad_(value.requires_grad) for name, value in {**leaves, **self.made}.items()
        }
        self.sums: dict[str, Tensor] = {}
        self._dtypes = {name: masters[root] for name in self.used if (root := self.roots.get(name, name)) in masters}
        for name in self._dtypes:
            if self.used[name].requires_grad:
                self.used[name].register_post_accumulate_grad_hook(_adder(self, name))  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Add gradients that hooks have not seen to their sums; after each part of a backward pass."""
        for name in self._dtypes:
            self._add(name, self.used[name])

    def _add(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            self._add_wide(name, gradient)

    def _add_wide(self, name: str, gradient: Tensor) -> None:
        held = self.sums.get(name)
        self.sums[name] = gradient.to(self._dtypes[name]) if held is None else held.add_(gradient)

    def _sum(self, name: str) -> Tensor | None:
        """The sum of a leaf's gradients, which is given away."""
        leaf = self.used.pop(name)
        return self.sums.pop(name, None) if name in self._dtypes else leaf.grad

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that did not come through autograd to a leaf's sum."""
        leaf = self.used[name]
        if name in self._dtypes:
            self._add_wide(name, gradient)
        else:
            leaf.grad = gradient.to(leaf.dtype) if leaf.grad is None else leaf.grad.add_(gradient)

    def gradients(self, scale: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the leaves (by placeholder), times `scale`, made as they are asked for.

        One bucket after the other is sent; each is waited for when the next is on its way.
        """
        before: list[tuple[str, Tensor | None]] = []
        finishes: list[Finish] = []
        for names in self._together():
            found = self._back(names, scale)
            started, self._waiting[:] = list(self._waiting), ()
            yield from self._finished(before, finishes)
            before, finishes = found, started
            if not started:
                yield from self._finished(before, finishes)
        yield from self._finished(before, finishes)

    def _together(self) -> Iterator[list[str]]:
        """Leaves whose gradients go back together."""
        trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        bucket = {name: names for names in self.buckets for name in names}
        seen: set[str] = set()
        for name in trained:
            if name not in seen:
                own = [other for other in bucket.get(name, (name,)) if other in trained]
                seen.update(own)
                yield own

    def _back(self, names: Sequence[str], scale: Tensor | None) -> list[tuple[str, Tensor | None]]:
        """Send sums the way that copies came; what of the gradients did not come that way, or is there already."""
        own = {name: [value for value, root in self.roots.items() if root == name] for name in names}
        values = [v for made in own.values() for v in made]
        ways = [(self.made.pop(v), g) for v in values if (g := _scaled(self._sum(v), scale)) is not None]
        totals = [_scaled(self._sum(name), scale) for name in names]
        if not ways:
            return list(zip(names, totals, strict=True))
        gradients = [g.to(value.dtype) for value, g in ways]
        leaves = [self.leaves[name] for name in names]
        backs = torch.autograd.grad([value for value, _ in ways], leaves, gradients, allow_unused=True)
        return [
            (name, _added(total, back, self._dtypes.get(name)))
            for name, total, back in zip(names, totals, backs, strict=True)
        ]

    def _finished(self, found: list[tuple[str, Tensor | None]], finishes: list[Finish]) -> Iterator[tuple[str, Tensor]]:
        for finish in finishes:
            finish()
        for name, total in found:
            total = _added(total, self._reduced.pop(name, None), self._dtypes.get(name, self.leaves[name].dtype))
            if total is not None:
                yield name, total
        found.clear()


class _Prologue:
    """Takes reduced gradients of parameters when the buckets that they are in are waited for."""

    def __init__(self, reduced: dict[str, Tensor], waiting: list[Finish]) -> None:
        self.reduced, self.waiting = reduced, waiting
        self.told: list[Finish] | None = None

    def make_room(self) -> None:
        """Buckets go one after the other, and each is finished when the next is on its way."""

    def later(self, finish: Finish, *, holds: bool) -> None:
        self.waiting.append(finish)

    def add(self, placeholder: str, gradient: Tensor) -> None:
        held = self.reduced.get(placeholder)
        self.reduced[placeholder] = gradient if held is None else held.add_(gradient)


class Accumulator:
    """Runs the micro-batches of a local graph as it is written (`again_graph`, `evaluation_graph`).

    fuse_body: not where backward is in two parts, which buckets would tie together, or where it is compiled by block.
    eager: calls are made natively, and what copies of a micro-batch send is started and waited for apart.
    """

    def __init__(
        self,
        local: LocalModel,
        written: fx.Graph,
        accumulation: Accumulation,
        masters: Mapping[str, torch.dtype] | None = None,
        *,
        fuse_body: bool = True,
        eager: bool = True,
    ) -> None:
        self.accumulation, self.masters, self.buckets = accumulation, masters or {}, local.plan.buckets
        self.hoisted = hoisted = hoist_parameters(written, local.plan.lifetimes)
        prologue = fuse_collectives(hoisted.prologue, local.captured.parameters, local.plan)
        body = hoisted.body
        if fuse_body:
            body = fuse_collectives(body, local.captured.parameters, local.plan)
            body = prefetch(body) if local.plan.prefetch and eager else body
            if local.captured.copies > 1 and eager:
                body = start_and_wait(body, {spec.placeholder for spec in local.captured.inputs})
        self.prologue = fx.GraphModule(nn.Module(), prologue)
        self.body = fx.GraphModule(nn.Module(), call_natively(body) if eager else body)

    def prepare(self, leaves: Mapping[str, Tensor]) -> Prepared:
        """What of a step is done once, before its micro-batches."""
        return Prepared(self.hoisted, self.prologue, leaves, self.masters, self.buckets)

    def step(
        self, leaves: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]], run: Run
    ) -> tuple[Tensor, Iterator[tuple[str, Tensor]]]:
        """The loss of the step and, made as they are asked for, the gradients of `leaves` (by placeholder)."""
        prepared = self.prepare(leaves)
        losses, counts = [], []
        for inputs in batches:
            with use_sink(prepared.late):
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


def _added(total: Tensor | None, gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Their sum, as wide as `dtype` if it is given."""
    if gradient is None:
        return total
    gradient = gradient if dtype is None else gradient.to(dtype)
    return gradient if total is None else total.add_(gradient)


def _adder(prepared: Prepared, name: str) -> Callable[[Tensor], None]:
    """A leaf's hook that adds its gradient to a sum; it holds the sums weakly, for hooks are never collected."""
    held = weakref.ref(prepared)

    def add(leaf: Tensor) -> None:
        if (own := held()) is not None:
            own._add(name, leaf)

    return add
