"""Which meshes can a cluster, or one stage of a pipeline on it, be arranged in?

The pipeline axis is the outermost: p stages take p equal parts of the cluster, neighbours in its levels, so that p is a
product of whole levels from the slowest on and a divisor of the next. A stage's mesh follows the levels that are left:
every level is one axis or, as long as there are at most `SEARCHED_AXES`, a product of several. An axis over two levels
is no mesh of its own: tensors may be split by both axes alike, and collectives over both are priced as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.values.cluster import Cluster
from autopar.values.divisors import divisors
from autopar.values.mesh import Mesh, make_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """`pipeline` stages side by side, each on a mesh over `cluster`, a part of the whole.

    is_named: pins speak of axes by name, so that no mesh with others is like it (`alike_meshes`).
    """

    pipeline: int
    cluster: Cluster
    mesh: Mesh
    is_named: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh.shape))
        return shape if self.pipeline == 1 else f"{self.pipeline} stages of {shape}"


def parts(cluster: Cluster) -> dict[int, Cluster]:
    """Number of pipeline ranks -> the part of the cluster that each has, from one on."""
    out = {1: cluster}
    whole = 1
    for depth, level in enumerate(cluster.levels):
        for left in reversed(divisors(level.size)):
            levels = (replace(level, size=left), *cluster.levels[depth + 1 :])
            out[whole * level.size // left] = replace(cluster, levels=levels)
        whole *= level.size
    return out


def meshes(cluster: Cluster, num_axes: int = SEARCHED_AXES) -> tuple[Mesh, ...]:
    """All meshes of a cluster that follow its levels, those of few axes first."""
    sizes = [level.size for level in cluster.levels if level.size > 1]
    if len(sizes) > num_axes:
        shapes = set(_factorisations(cluster.num_devices, num_axes))
    else:
        split = product(*(_factorisations(size, num_axes) for size in sizes))
        shapes = {shape for axes in split if len(shape := tuple(n for part in axes for n in part)) <= num_axes}
    return tuple(make_mesh(shape or (1,)) for shape in sorted(shapes, key=lambda shape: (len(shape), shape)))


def arrangements(cluster: Cluster, pipelines: tuple[int, ...] = (1,)) -> tuple[Arrangement, ...]:
    """All meshes for each number of pipeline ranks that the cluster's levels allow."""
    return tuple(
        Arrangement(pipeline=number, cluster=part, mesh=mesh)
        for number, part in parts(cluster).items()
        if number in pipelines
        for mesh in meshes(part)
    )


def _factorisations(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factors above 1 whose product is the number, at most so many; none for 1."""
    if number == 1:
        yield ()
    elif most:
        for first in divisors(number)[1:]:
            for rest in _factorisations(number // first, most - 1):
                yield (first, *rest)
