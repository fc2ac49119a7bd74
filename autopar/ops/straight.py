"""Gradients of weights that are computed straight into their bucket's flat buffer, so that nothing copies them there.

A bucket of gradients that are summed over ranks (`ops.buckets`) has a `Room`: its buffer, made when the first gradient
is computed into it, with a place for each. What comes to the bucket from elsewhere is copied in when all are there.
`passes.compute_straight` says which calls do this.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.collectives import in_parts

LEAST_NBYTES = 1 << 20
"""The smallest gradient that is worth it. What a linear takes more than with a copy, in microseconds, two runs: of
256 KiB 94 and 112, 511 KiB 73 and 62, 1 MiB 9 and -2, 2 MiB -93 and -119, 4 MiB -240 and -292
(six linears in a bucket, 64 rows, one thread, forward and back; 2 cores, 2026-11-26)."""


class Room:
    """The buffer of the gradients of `values`, each padded to `num_parts` equal parts."""

    def __init__(self, values: Sequence[Tensor], num_parts: int) -> None:
        self.shapes = [value.shape for value in values]
        self.like: dict[str, Any] = {"dtype": values[0].dtype, "device": values[0].device}
        self.num_parts = num_parts
        self.flat: Tensor | None = None
        self.places: list[Tensor] = []
        self.free: set[int] = set()

    def take(self, place: int) -> Tensor | None:
        """Where a gradient is to be computed; None if one was, for what is there must not be written over."""
        if self.flat is None:
            self._make()
        if place not in self.free:
            return None
        self.free.remove(place)
        return self.places[place]

    def _make(self) -> None:
        sizes = [math.prod(shape) for shape in self.shapes]
        lengths = [size + -size % self.num_parts for size in sizes]
        make = torch.empty if lengths == sizes else torch.zeros
        self.flat = make(sum(lengths), **self.like)
        parts = [part[:size] for part, size in zip(self.flat.split_with_sizes(lengths), sizes, strict=True)]
        self.places = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        self.free = set(range(len(self.places)))

    def filled(self, places: Sequence[int], gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The buffer with the gradients for these places, and views of them in it.

        After that it is the bucket's, and the next backward pass makes another.
        """
        made, rooms = self.flat, self.places
        self.flat, self.places = None, []
        if made is None or len(places) < len(self.shapes):
            return in_parts(gradients, self.num_parts)
        moved = [(room, g) for room, g in zip(rooms, gradients, strict=True) if room.data_ptr() != g.data_ptr()]
        for room, gradient in moved:
            room.copy_(gradient)
        return made, rooms


class _Linear(torch.autograd.Function):
    """`linear` whose weight's gradient is written to a place of a room: of the weight, or of its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, room: Room, place: int, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.room, ctx.place, ctx.is_transposed = room, place, is_transposed
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        into = ctx.room.take(ctx.place) if to_weight else None
        if into is not None and ctx.is_transposed:
            into = into.t()
        return (
            rows.mm(weight).view(x.shape) if to_x else None,
            torch.mm(rows.t(), x.view(-1, x.shape[-1]), out=into) if to_weight else None,
            rows.sum(0) if to_bias else None,
            None,
            None,
            None,
        )


def linear_straight(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, room: Room, place: int, is_transposed: bool = False
) -> Tensor:
    """`linear`, whose weight (or its transpose) is the value at `place` of a bucket."""
    is_plain = weight.dim() == 2 and weight.requires_grad and not torch.is_autocast_enabled(x.device.type)
    if not (is_plain and x.is_contiguous() and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)  # of what is strided, autograd keeps a copy made in forward
    out: Tensor = _Linear.apply(x, weight, bias, room, place, is_transposed)  # type: ignore[no-untyped-call]
    return out
