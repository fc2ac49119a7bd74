"""The law of placements on a simulated mesh: whole tensors cut into what ranks hold, and joined again.

Values: Shard slice, Replicate and Invariant the whole, Partial summands. Gradients: Shard slice, Replicate summands,
Invariant and Partial the whole. `cut` and `join` take the one or the other by saying what has summands.
"""

import torch
from torch import Tensor

from autopar.values.mesh import Mesh
from autopar.values.placement import PARTIAL, REPLICATE, Layout, Placement, Shard, chunk_size

VALUE_SUMMANDS, GRADIENT_SUMMANDS = PARTIAL, REPLICATE


def cut(
    whole: Tensor, layout: Layout, mesh: Mesh, summands: Placement, generator: torch.Generator, garbage: bool
) -> list[Tensor]:
    """What each rank holds of `whole`, in rank order; padding is random garbage or zeros."""
    assert not layout.order
    parts = [whole]
    for axis, placement in enumerate(layout.axes):
        n = mesh.shape[axis]
        parts = [part for t in parts for part in _cut(t, placement, n, summands, generator, garbage)]
    return parts


def _cut(
    t: Tensor, placement: Placement, n: int, summands: Placement, generator: torch.Generator, garbage: bool
) -> list[Tensor]:
    if isinstance(placement, Shard):
        chunk = chunk_size(t.shape[placement.dim], n)
        shape = list(t.shape)
        shape[placement.dim] = n * chunk - t.shape[placement.dim]
        padding = _noise(tuple(shape), t, generator) if garbage else t.new_zeros(shape)
        return list(torch.cat([t, padding], placement.dim).split(chunk, placement.dim))
    if placement == summands and t.dtype.is_floating_point:
        parts = [_noise(tuple(t.shape), t, generator) for _ in range(n - 1)]
        return [*parts, t - sum(parts)]
    return [t] * n


def _noise(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)


def join(
    parts: list[Tensor], shape: tuple[int, ...], layout: Layout, mesh: Mesh, summands: Placement, tolerance: float
) -> Tensor:
    """The whole tensor of `shape` that `parts` (in rank order) say; whole parts must agree within `tolerance`."""
    sizes = [shape]
    for axis, placement in enumerate(layout.axes):
        local = list(sizes[-1])
        if isinstance(placement, Shard):
            local[placement.dim] = chunk_size(local[placement.dim], mesh.shape[axis])
        sizes.append(tuple(local))
    for axis in reversed(range(mesh.num_axes)):
        placement, n = layout.axes[axis], mesh.shape[axis]
        groups = [parts[i : i + n] for i in range(0, len(parts), n)]
        parts = [_join(group, sizes[axis], placement, summands, tolerance) for group in groups]
    (whole,) = parts
    return whole


def _join(
    parts: list[Tensor], shape: tuple[int, ...], placement: Placement, summands: Placement, tolerance: float
) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim).narrow(placement.dim, 0, shape[placement.dim])
    if placement == summands and parts[0].dtype.is_floating_point:
        return torch.stack(parts).sum(0)
    for other in parts[1:]:
        torch.testing.assert_close(other, parts[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    return parts[0]
