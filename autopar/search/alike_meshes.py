"""Which meshes differ in the order of their axes alone? Axes of one link level may change places.

Where all links stay the same, a plan costs the same with its axes renamed, except for what the order of axes is good
for: axes that share a dim are nested in mesh order, so that only the last of them can be gathered alone. With every
such order allowed (`loose`, see `graph.lattice`), one strategy graph bounds them all.
"""

import itertools
from dataclasses import replace
from functools import lru_cache

from autopar.cost_models.links import axis_links
from autopar.search.meshes import Arrangement
from autopar.values.mesh import make_mesh

Orders = tuple[tuple[int, ...], ...]
"""Axes of a mesh in the order in which another one has them, for all that are like it."""


@lru_cache(maxsize=4096)
def first_alike(arrangement: Arrangement) -> Arrangement:
    """Of all arrangements like this one the same."""
    shapes = [tuple(arrangement.mesh.shape[axis] for axis in order) for order in _orders(arrangement)]
    least = min(shapes)
    return arrangement if least == arrangement.mesh.shape else replace(arrangement, mesh=make_mesh(least))


@lru_cache(maxsize=4096)
def loose_orders(arrangement: Arrangement) -> Orders:
    """Orders of its axes that make other meshes like it, its own first; none where there are no others."""
    found = _orders(arrangement)
    shapes = {tuple(arrangement.mesh.shape[axis] for axis in order) for order in found}
    return found if len(shapes) > 1 else ()


@lru_cache(maxsize=4096)
def _orders(arrangement: Arrangement) -> Orders:
    """Orders in which groups along every set of axes have the same links."""
    shape, cluster = arrangement.mesh.shape, arrangement.cluster
    if len(shape) == 1 or arrangement.is_named:
        return (tuple(range(len(shape))),)
    sets = [axes for count in range(1, len(shape) + 1) for axes in itertools.combinations(range(len(shape)), count)]
    found = []
    for order in itertools.permutations(range(len(shape))):
        other = tuple(shape[axis] for axis in order)
        places = {axis: place for place, axis in enumerate(order)}
        if all(
            axis_links(cluster, shape, axes) == axis_links(cluster, other, tuple(sorted(places[axis] for axis in axes)))
            for axes in sets
        ):
            found.append(order)
    return tuple(found)
