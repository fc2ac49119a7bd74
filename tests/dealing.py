"""The law of placements over real ranks: whole tensors dealt out to ranks in any layout, and collected again.

Values: Shard slice, Replicate and Invariant the whole, Partial summands. Gradients: Shard slice, Replicate summands,
Invariant and Partial the whole. Padding is garbage. All numbers are whole, so that sums and quotients are exact.
"""

import itertools
import math

import torch
from torch import Tensor

from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, Placement, Shard, local_ranges, local_shape

Parts = list[Tensor]


def whole_numbers(shape: tuple[int, ...], generator: torch.Generator, multiple: int = 1) -> Tensor:
    return torch.randint(-9, 10, shape, generator=generator).double() * multiple


def deal(whole: Tensor, layout: Layout, mesh: Mesh, summands: Placement, generator: torch.Generator) -> Parts:
    """What each rank holds of `whole`, in rank order."""
    parts = []
    shares: dict[tuple[int, ...], Tensor] = {}
    adding = [axis for axis, placement in enumerate(layout.axes) if placement == summands]
    all_shares = list(itertools.product(*(range(mesh.shape[axis]) for axis in adding)))
    for share in all_shares[1:]:
        shares[share] = whole_numbers(tuple(whole.shape), generator)
    shares[all_shares[0]] = whole - sum(shares.values(), torch.zeros_like(whole))
    for coordinate in mesh.coordinates():
        own = shares[tuple(coordinate[axis] for axis in adding)]
        part = whole_numbers(local_shape(tuple(whole.shape), layout, mesh), generator)
        ranges = local_ranges(tuple(whole.shape), layout, mesh, coordinate)
        own = own[tuple(slice(start, start + length) for start, length in ranges)]
        part[tuple(slice(length) for _, length in ranges)] = own
        parts.append(part)
    return parts


def collect(parts: Parts, shape: tuple[int, ...], layout: Layout, mesh: Mesh, summands: Placement) -> Tensor:
    """The whole that `parts` say, in rank order; parts that should be equal must be."""
    copies: dict[tuple[int, ...], Tensor] = {}
    for coordinate, part in zip(mesh.coordinates(), parts, strict=True):
        assert tuple(part.shape) == local_shape(shape, layout, mesh)
        same = tuple(
            c
            for c, placement in zip(coordinate, layout.axes, strict=True)
            if not isinstance(placement, Shard) and placement != summands
        )
        whole = copies.setdefault(same, torch.zeros(shape, dtype=part.dtype))
        ranges = local_ranges(shape, layout, mesh, coordinate)
        window = tuple(slice(start, start + length) for start, length in ranges)
        whole[window] += part[tuple(slice(length) for _, length in ranges)]
    first, *others = copies.values()
    assert all(torch.equal(first, other) for other in others)
    return first


def axis_product(mesh: Mesh) -> int:
    """A multiple of this stays whole when divided over all axes."""
    return math.prod(mesh.shape)
