"""How does a tensor lie on a mesh? One of four placements on every mesh axis (docs/theory.md has the table).

| placement    | forward value on each rank | its gradient                         |
|--------------|----------------------------|--------------------------------------|
| Shard(dim)   | its slice                  | its slice                            |
| Replicate    | the whole                  | Partial: each rank has one summand   |
| Invariant    | the whole                  | the whole, the same on every rank    |
| Partial      | one summand of the whole   | the whole, the same on every rank    |

Several axes may shard one dim: they are then nested, `axes_of(dim)` listing them from the outermost split to the
innermost. A dim whose size does not divide is cut into equal chunks of ceil(size / n), the last ones padded: every rank
computes on equal local shapes, and what lies beyond the true size is garbage that no redistribution lets through.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from autopar.values.mesh import Mesh

_made: dict[tuple[type, tuple[int, ...]], Any] = {}


class _Single:
    """Equal values are one object: a search compares placements by the million, and so compares addresses.

    Hashes are the same in every process, as the order of sets follows from them.
    """

    __slots__ = ()

    def __new__(cls, *values: int) -> Self:
        key = cls, values
        if key not in _made:
            _made[key] = object.__new__(cls)
        made: Self = _made[key]
        return made

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        values: tuple[int, ...] = dataclasses.astuple(self)  # type: ignore[call-overload]
        return type(self), values


@dataclass(frozen=True, slots=True, eq=False)
class Shard(_Single):
    """Each rank holds its slice along tensor dim `dim` (never negative)."""

    dim: int

    def __hash__(self) -> int:
        return 3 + self.dim

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(_Single):
    """Each rank holds the whole; the gradient is a sum over ranks."""

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Invariant(_Single):
    """Each rank holds the whole, and the whole gradient."""

    def __hash__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(_Single):
    """Each rank holds one summand of the whole."""

    def __hash__(self) -> int:
        return 2

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Invariant | Partial
REPLICATE, INVARIANT, PARTIAL = Replicate(), Invariant(), Partial()


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's placement on every axis of a mesh.

    `order` lists the sharding axes from the outermost split to the innermost; it is kept only where some dim is split
    by several axes in another order than that of the mesh, so that equal layouts compare equal.
    """

    axes: tuple[Placement, ...]
    order: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.order:
            nested = _nesting(self.axes, self.order)
            plain = all(list(axes) == sorted(axes) for axes in nested.values())
            canonical = () if plain else tuple(axis for dim in sorted(nested) for axis in nested[dim])
            object.__setattr__(self, "order", canonical)
        # A search looks layouts up by the million.
        object.__setattr__(self, "_hash", hash((self.axes, self.order)))

    def __hash__(self) -> int:
        return self._hash

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Mesh axes that shard `dim`, outermost split first."""
        axes = [axis for axis, placement in enumerate(self.axes) if placement == Shard(dim)]
        return tuple(sorted(axes, key=self.order.index)) if self.order else tuple(axes)

    def sharded_dims(self) -> tuple[int, ...]:
        return tuple(sorted({p.dim for p in self.axes if isinstance(p, Shard)}))

    def replace(self, axis: int, placement: Placement) -> "Layout":
        """The layout with `axis` changed; a new shard becomes the innermost split of its dim."""
        axes = (*self.axes[:axis], placement, *self.axes[axis + 1 :])
        nested = [a for dim in self.sharded_dims() for a in self.axes_of(dim) if a != axis]
        if isinstance(placement, Shard):
            nested.append(axis)
        return Layout(axes, tuple(nested))

    def is_innermost(self, axis: int) -> bool:
        """Whether `axis` is the last split of the dim it shards (only then one collective can undo it)."""
        placement = self.axes[axis]
        return not isinstance(placement, Shard) or self.axes_of(placement.dim)[-1] == axis

    def __str__(self) -> str:
        text = ",".join(map(str, self.axes))
        return text + (":" + "".join(map(str, self.order)) if self.order else "")


def _nesting(axes: tuple[Placement, ...], order: tuple[int, ...]) -> dict[int, list[int]]:
    nested: dict[int, list[int]] = {}
    for axis in order:
        placement = axes[axis]
        if not isinstance(placement, Shard):
            raise ValueError(f"axis {axis} of {axes} is in the nesting order but does not shard")
        nested.setdefault(placement.dim, []).append(axis)
    if sum(map(len, nested.values())) != sum(isinstance(p, Shard) for p in axes):
        raise ValueError(f"the nesting order {order} misses an axis of {axes}")
    return nested


@lru_cache(maxsize=65536)
def parse_layout(text: str) -> Layout:
    """The inverse of `str(layout)`.

    Raises:
        ValueError: if the text is not a layout such as `S0,R` or `S0,S0:10`.
    """
    body, _, order = text.partition(":")
    named: dict[str, Placement] = {"R": REPLICATE, "I": INVARIANT, "P": PARTIAL}
    axes: list[Placement] = []
    for part in body.split(","):
        if part in named:
            axes.append(named[part])
        elif part.startswith("S") and part[1:].isdigit():
            axes.append(Shard(int(part[1:])))
        else:
            raise ValueError(f"layout {text!r}: {part!r} is none of S<dim>, R, I, P")
    return Layout(tuple(axes), tuple(int(a) for a in order))


def chunk_size(size: int, parts: int) -> int:
    """Elements of one of `parts` equal chunks of a dim, padding included."""
    return -(-size // parts)


@lru_cache(maxsize=1 << 18)
def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape on every rank, padding included."""
    out = list(shape)
    for dim in layout.sharded_dims():
        for axis in layout.axes_of(dim):
            out[dim] = chunk_size(out[dim], mesh.shape[axis])
    return tuple(out)


def is_even(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether no rank holds padding."""
    return all(divides(shape, layout, mesh, dim) for dim in layout.sharded_dims())


def divides(shape: tuple[int, ...], layout: Layout, mesh: Mesh, dim: int) -> bool:
    """Whether the axes that shard `dim` cut it into equal parts."""
    return shape[dim] % math.prod(mesh.shape[axis] for axis in layout.axes_of(dim)) == 0


@lru_cache(maxsize=1 << 12)
def local_ranges(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Per dim, `(start, length)` of the true elements that the rank at `coordinate` holds (length 0 for none)."""
    out = []
    for dim, size in enumerate(shape):
        start, padded, true = 0, size, size
        for axis in layout.axes_of(dim):
            padded = chunk_size(padded, mesh.shape[axis])
            offset = coordinate[axis] * padded
            start += offset
            true = max(0, min(true - offset, padded))
        out.append((min(start, size), true))
    return tuple(out)


def without_gradient(layout: Layout) -> Layout:
    """Invariant and Replicate are the same for a tensor that needs no gradient: written Replicate."""
    return Layout(tuple(REPLICATE if p == INVARIANT else p for p in layout.axes), layout.order)
