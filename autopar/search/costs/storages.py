"""How may a parameter be stored, and an input be handed over? Every layout that needs no collective to be made.

A parameter lies, on each axis, whole (Invariant; Replicate if it is frozen) or as shards of one of its dims. One axis
may shard a dim that it does not divide, if every rank holds something; several axes on one dim only where everything
divides.
"""

import itertools
from functools import lru_cache

from autopar.values.mesh import Mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Placement, Shard, chunk_size, divides, is_even


def is_storable(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every rank holds a part, and dims that several axes shard divide evenly."""
    for dim in layout.sharded_dims():
        axes = layout.axes_of(dim)
        n = mesh.shape[axes[0]]
        if len(axes) == 1 and chunk_size(shape[dim], n) * (n - 1) >= shape[dim]:
            return False
        if len(axes) > 1 and not divides(shape, layout, mesh, dim):
            return False
    return True


@lru_cache(maxsize=4096)
def storages(shape: tuple[int, ...], mesh: Mesh, trainable: bool, nested: bool) -> tuple[Layout, ...]:
    """All storages; with `nested` every order of several axes on one dim, else only the mesh's."""
    whole: Placement = INVARIANT if trainable else REPLICATE
    dims = [d for d, size in enumerate(shape) if size > 1]
    out: dict[Layout, None] = {}
    options = [(whole, *(Shard(d) for d in dims)) if n > 1 else (whole,) for n in mesh.shape]
    for axes in itertools.product(*options):
        for layout in orders(axes) if nested else (Layout(axes),):
            if is_storable(shape, layout, mesh):
                out[layout] = None
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def orders(axes: tuple[Placement, ...]) -> tuple[Layout, ...]:
    """The layouts with these placements: one for each nesting of axes that share a dim, the mesh's order first."""
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(axes):
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    nestings = itertools.product(*(itertools.permutations(a) for a in by_dim.values()))
    return tuple(dict.fromkeys(Layout(axes, tuple(a for group in nesting for a in group)) for nesting in nestings))


@lru_cache(maxsize=4096)
def input_layouts(shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts in which an input may be handed over: whole or evenly split, in the mesh's order."""
    options: list[tuple[Placement, ...]] = [
        (REPLICATE, *(Shard(d) for d, size in enumerate(shape) if size > 1)) if n > 1 else (REPLICATE,)
        for n in mesh.shape
    ]
    return tuple(layout for axes in itertools.product(*options) if is_even(shape, layout := Layout(axes), mesh))
