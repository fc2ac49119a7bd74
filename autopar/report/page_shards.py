"""Which piece of a tensor does each rank of a mesh hold? A layout as a drawing needs it.

A rank at coordinate c holds piece `sum(c[a] * strides[a])` of each dim that is cut, counted from 0; pieces of a dim are
numbered in its order, whatever order its axes are nested in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from autopar.values.mesh import Mesh
from autopar.values.placement import Invariant, Layout, Partial, Placement, Shard, local_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class DimCut:
    """A dim that is cut. strides: one a mesh axis, 0 for those that do not cut it. ranges: (first element, how many) of
    each piece; empty where the shape is not known."""

    dim: int
    parts: int
    strides: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """A tensor on a mesh. shape: None where it is not known. axes: what each mesh axis does to it, in words."""

    layout: str
    shape: tuple[int, ...] | None
    axes: tuple[str, ...]
    cuts: tuple[DimCut, ...]


class Cuts:
    """The cuts that a page shows, each once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._numbers: dict[tuple[Layout, tuple[int, ...] | None], int] = {}

    def number(self, layout: Layout, shape: Iterable[int] | None) -> int:
        """The number of the cut of a tensor."""
        key = layout, None if shape is None else tuple(shape)
        return self._numbers.setdefault(key, len(self._numbers))

    def all(self) -> tuple[TensorCut, ...]:
        return tuple(tensor_cut(layout, shape, self.mesh) for layout, shape in self._numbers)


def tensor_cut(layout: Layout, shape: tuple[int, ...] | None, mesh: Mesh) -> TensorCut:
    """How a layout cuts a tensor of that shape, or of any, over a mesh."""
    return TensorCut(
        layout=str(layout),
        shape=shape,
        axes=tuple(map(_words, layout.axes)),
        cuts=tuple(_dim_cut(dim, layout, shape, mesh) for dim in layout.sharded_dims()),
    )


def _dim_cut(dim: int, layout: Layout, shape: tuple[int, ...] | None, mesh: Mesh) -> DimCut:
    axes = layout.axes_of(dim)
    strides = [0] * mesh.num_axes
    for place, axis in enumerate(axes):
        strides[axis] = prod(mesh.shape[inner] for inner in axes[place + 1 :])
    parts = prod(mesh.shape[axis] for axis in axes)
    ranges = []
    for piece in range(parts) if shape is not None else ():
        assert shape is not None
        coordinate = tuple(piece // s % n if s else 0 for s, n in zip(strides, mesh.shape, strict=True))
        ranges.append(local_ranges(shape, layout, mesh, coordinate)[dim])
    return DimCut(dim=dim, parts=parts, strides=tuple(strides), ranges=tuple(ranges))


def _words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"cuts dim {placement.dim}"
    if isinstance(placement, Partial):
        return "summands: each rank has one"
    return "whole" if isinstance(placement, Invariant) else "whole; gradients are summands"
