"""Which links does a group of ranks along mesh axes cross, and how many of them side by side?

Two ranks meet at the slowest level at which they are in different children. A group is described level by level: the
ring hops and the peers that cross the level, and the lanes, its ranks that share one child. Lanes send side by side,
each over its own link: nccl-tests on 10 nodes of 1, 2 and 4 H100 show 49, 98 and 197 GB/s.

Every group of an axis runs its collective at the same time, so a link that several devices share gives each its part
only, whichever groups they belong to. A group that is alone shares with its own lanes only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.errors import MeshError
from autopar.values.cluster import Cluster
from autopar.values.link import LinkLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One link level that a group crosses; counts are of one group.

    members: children of one parent that the group occupies (most). hops: of its ring in rank order, those that cross.
    lanes: its ranks in one child (fewest). peers: ranks that a rank reaches over this level (most). share: devices that
    send over one link at the same time.
    """

    level: LinkLevel
    members: int
    lanes: int
    hops: int
    peers: int
    share: float

    @property
    def name(self) -> str:
        return self.level.name

    @property
    def alpha(self) -> float:
        return self.level.alpha

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a device in each direction."""
        return self.level.bandwidth / self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A group of `size` ranks and the levels it crosses, slowest first.

    `regular`: every child that the group occupies holds as many of its ranks, so that it can work level by level; then
    `size` is the product of the crossings' members.
    """

    size: int
    crossings: tuple[Crossing, ...]
    regular: bool
    library: str


@lru_cache(maxsize=4096)
def axis_links(
    cluster: Cluster, mesh_shape: tuple[int, ...], axes: tuple[int, ...], *, is_alone: bool = False
) -> Links:
    """Links of a group along `axes` of a mesh (row-major, the last axis joins neighbouring ranks).

    `is_alone`: no other group sends at the same time. Groups of one mesh may differ when an axis does not fit the
    levels (3 x 2 on two nodes of 3); the answer is then the group that crosses slow levels most, because a step
    waits for it.

    Raises:
        MeshError: if the mesh does not have as many ranks as the cluster has devices, or has no such axes.
    """
    size = math.prod(mesh_shape)
    if size != cluster.num_devices:
        raise MeshError(
            f"mesh {'x'.join(map(str, mesh_shape))} has {size} ranks but cluster {cluster.name} has "
            f"{cluster.num_devices} devices; choose a mesh of {cluster.num_devices} ranks, "
            f"or a cluster of {size} devices"
        )
    if len(set(axes)) != len(axes) or any(not 0 <= axis < len(mesh_shape) for axis in axes):
        raise MeshError(
            f"axes {axes} of mesh {mesh_shape}: give each axis once, as a number from 0 to {len(mesh_shape) - 1}"
        )
    groups = _groups(mesh_shape, axes)
    if groups.shape[1] == 1:
        return Links(size=1, crossings=(), regular=True, library=cluster.library)
    counts = [_level_counts(groups, cluster, depth) for depth in range(len(cluster.levels))]
    worst = _worst(counts)
    crossings = tuple(
        Crossing(
            level=level,
            **{key: int(values[worst]) for key, values in count.items() if key != "uneven"},
            share=_share(cluster, depth, int(count["lanes"][worst]) if is_alone else None),
        )
        for depth, (level, count) in enumerate(zip(cluster.levels, counts, strict=True))
        if count["hops"][worst]
    )
    regular = not any(count["uneven"].any() for count in counts)
    return Links(size=groups.shape[1], crossings=crossings, regular=regular, library=cluster.library)


def _share(cluster: Cluster, depth: int, lanes: int | None) -> float:
    """Devices that send over one link of a level: all that it serves, or what `lanes`, spread over the child's
    links, put
    on each."""
    devices = math.prod(level.size for level in cluster.levels[depth + 1 :])
    served = min(cluster.levels[depth].devices_per_link, devices)
    return served if lanes is None else max(1.0, lanes * served / devices)


def _groups(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Ranks of every group along `axes`, a row a group, in rank order."""
    ranks = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    last = range(len(mesh_shape) - len(axes), len(mesh_shape))
    size = math.prod(mesh_shape[axis] for axis in axes)
    return np.sort(np.moveaxis(ranks, axes, tuple(last)).reshape(-1, size), axis=1)


def _level_counts(groups: npt.NDArray[np.int64], cluster: Cluster, depth: int) -> dict[str, npt.NDArray[np.int64]]:
    """Fields of `Crossing` for each group at the level `depth`, and whether its children hold unequal numbers."""
    stride = math.prod(level.size for level in cluster.levels[depth + 1 :])
    child, parent = groups // stride, groups // (stride * cluster.levels[depth].size)
    in_child, in_parent = _companions(child), _companions(parent)
    crosses = (np.roll(child, -1, axis=1) != child) & (np.roll(parent, -1, axis=1) == parent)
    first_of_child = np.diff(child, axis=1, prepend=-1) != 0
    return {
        "hops": crosses.sum(axis=1),
        "lanes": in_child.min(axis=1),
        "peers": (in_parent - in_child).max(axis=1),
        "members": _companions(parent, weight=first_of_child).max(axis=1),
        "uneven": (in_child.min(axis=1) != in_child.max(axis=1)).astype(np.int64),
    }


def _worst(counts: Sequence[Mapping[str, npt.NDArray[np.int64]]]) -> int:
    """The first group with most hops, then fewest lanes, slowest level first."""
    left = np.arange(len(counts[0]["hops"]))
    for count in counts:
        for values in (count["hops"], -count["lanes"]):
            left = left[values[left] == values[left].max()]
    return int(left[0])


def _companions(unit: npt.NDArray[np.int64], weight: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.int64]:
    """For each rank of each group, how many of its group are in the same unit (or the weight of these).

    unit: a row a group, ascending, as ranks are.
    """
    changes = np.diff(unit, axis=1, prepend=-1) != 0
    first = np.flatnonzero(changes)
    weights = np.ones(unit.size, np.int64) if weight is None else weight.ravel().astype(np.int64)
    sums = np.add.reduceat(weights, first)
    return np.repeat(sums, np.diff(first, append=unit.size)).reshape(unit.shape)
