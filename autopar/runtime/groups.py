"""Which processes does each mesh axis join? Process groups for a mesh, made once a process and shared by all modules.

Every rank must make the same groups in the same order, so what is made follows from the mesh and the graphs alone: one
family of groups an axis, then one for each set of axes that a collective of a graph names together. The ranks of a
pipeline are several meshes of one shape, one after the other; groups across join ranks at one place of their meshes.
"""

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.ops.groups import Groups
from autopar.runtime.launch import collective_timeout
from autopar.runtime.lost_ranks import among_ranks
from autopar.values.mesh import Mesh

_Key = tuple[int, Mesh, tuple[str, ...]]
_made: dict[_Key, dist.ProcessGroup | None] = {}
_device_meshes: dict[tuple[int, Mesh, str], DeviceMesh] = {}


def build_groups(
    mesh: Mesh, device_type: str, flattened: Iterable[tuple[str, ...]] = (), *, pipeline: int = 1
) -> tuple[DeviceMesh, Groups]:
    """This rank's mesh as torch knows it, and its groups in it; `flattened` lists axes that collectives use together.

    All ranks of the default group call this in the same order with the same arguments. pipeline: how many meshes there
    are.

    Raises:
        MeshError: if the meshes have another number of ranks than there are processes.
    """
    check_world(mesh, pipeline, dist.get_world_size())
    _forget_destroyed_groups()
    rank = dist.get_rank() % mesh.size
    groups: dict[tuple[str, ...], dist.ProcessGroup] = {(name,): _group(mesh, (name,)) for name in mesh.names}
    for names in sorted({tuple(sorted(set(axes), key=mesh.names.index)) for axes in flattened}):
        groups.setdefault(names, _group(mesh, names))
    key = (_default_group_id(), mesh, device_type)
    if key not in _device_meshes:
        ranks = torch.arange(mesh.size).view(mesh.shape) + dist.get_rank() - rank
        _device_meshes[key] = DeviceMesh.from_group(
            [groups[(name,)] for name in mesh.names], device_type, mesh=ranks, mesh_dim_names=mesh.names
        )
    return _device_meshes[key], Groups(mesh=mesh, rank=rank, groups=groups)


def check_world(mesh: Mesh, pipeline: int, world: int) -> None:
    """Raises MeshError if `world` processes are not the ranks of so many meshes."""
    if mesh.size * pipeline == world:
        return
    needed = mesh.size * pipeline
    what = f"mesh {mesh}" if pipeline == 1 else f"a pipeline of {pipeline} stage meshes {mesh}"
    raise MeshError(
        f"{what} has {needed} ranks but {world} processes were started; start {needed} "
        f"(torchrun --nproc-per-node {needed}) or plan for {world} ranks"
    )


def flattened_axes(graph: fx.Graph, mesh: Mesh) -> set[tuple[str, ...]]:
    """Sets of several axes that any call of the graph names in its arguments."""
    found: set[tuple[str, ...]] = set()

    def visit(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            names = [v for v in value if isinstance(v, str) and v in mesh.names]
            shards = [v[0] for v in value if _is_shard(v, mesh)]  # ops.random.Shards
            for axes in (names, shards):
                if len(axes) > 1 and len(axes) == len(value):
                    found.add(tuple(sorted(axes, key=mesh.names.index)))
            for item in value:
                visit(item)

    for node in graph.nodes:
        visit((node.args, tuple(node.kwargs.values())))
    return found


def _is_shard(value: Any, mesh: Mesh) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in mesh.names and isinstance(value[1], int)


def _group(mesh: Mesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """This rank's group along `names`; made with those of all other ranks if it is not there yet."""
    key = (_default_group_id(), mesh, names)
    if key not in _made:
        world = dist.get_world_size()
        sets = _rank_sets(mesh, names)
        _made[key] = _own_group([[r + first for r in s] for first in range(0, world, mesh.size) for s in sets])
    group = _made[key]
    assert group is not None
    return group


def group_across(mesh: Mesh, members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The ranks at this rank's place in the meshes `members` of a pipeline, None if its own is not among them.

    All ranks of the default group call this in the same order with the same arguments.
    """
    key = (_default_group_id(), mesh, ("pipeline", *map(str, members)))
    if key not in _made:
        _made[key] = _own_group([[m * mesh.size + place for m in members] for place in range(mesh.size)])
    return _made[key]


def _own_group(sets: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of the set that has this rank, if one has; all are made, by all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = None
    with among_ranks("making process groups"):
        for ranks in sets:
            group = dist.group.WORLD if len(ranks) == world else dist.new_group(ranks, timeout=_timeout())
            own = group if rank in ranks else own
    return own


def _timeout() -> timedelta:
    return timedelta(seconds=collective_timeout())


def _rank_sets(mesh: Mesh, names: tuple[str, ...]) -> list[list[int]]:
    """The groups along `names`, each with its ranks in order."""
    inside = [mesh.names.index(name) for name in names]
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh.shape))):
        outside = tuple(c for axis, c in enumerate(coordinate) if axis not in inside)
        sets.setdefault(outside, []).append(rank)
    return list(sets.values())


def _default_group_id() -> int:
    return id(dist.group.WORLD)


def _forget_destroyed_groups() -> None:
    """Groups of a default group that was destroyed are of no use."""
    current = _default_group_id()
    for made in [key for key in _made if key[0] != current]:
        del _made[made]
    for seen in [key for key in _device_meshes if key[0] != current]:
        del _device_meshes[seen]
