"""Which processes does each mesh axis join? Process groups for a mesh, made once a process and shared by all modules.

Every rank must make the same groups in the same order, so what is made follows from the mesh and the graph alone: one
family of groups an axis, then one for each set of axes that a collective of the graph names together.
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
from autopar.mesh import Mesh
from autopar.ops.groups import Groups
from autopar.runtime.launch import collective_timeout

_Key = tuple[int, Mesh, tuple[str, ...]]
_made: dict[_Key, dist.ProcessGroup] = {}
_device_meshes: dict[tuple[int, Mesh, str], DeviceMesh] = {}


def build_groups(mesh: Mesh, device_type: str, flattened: Iterable[tuple[str, ...]] = ()) -> tuple[DeviceMesh, Groups]:
    """The mesh as torch knows it, and this rank's groups; `flattened` lists axes that collectives use together.

    All ranks of the default group call this in the same order with the same arguments.

    Raises:
        MeshError: if the mesh has another number of ranks than there are processes.
    """
    world = dist.get_world_size()
    if mesh.size != world:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} ranks but {world} processes were started; start {mesh.size} "
            f"(torchrun --nproc-per-node {mesh.size}) or plan for a mesh of {world} ranks"
        )
    _forget_destroyed_groups()
    rank = dist.get_rank()
    groups: dict[tuple[str, ...], dist.ProcessGroup] = {(name,): _group(mesh, (name,)) for name in mesh.names}
    for names in sorted({tuple(sorted(set(axes), key=mesh.names.index)) for axes in flattened}):
        groups.setdefault(names, _group(mesh, names))
    key = (_default_group_id(), mesh, device_type)
    if key not in _device_meshes:
        ranks = torch.arange(world).view(mesh.shape)
        _device_meshes[key] = DeviceMesh.from_group(
            [groups[(name,)] for name in mesh.names], device_type, mesh=ranks, mesh_dim_names=mesh.names
        )
    return _device_meshes[key], Groups(mesh=mesh, rank=rank, groups=groups)


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
        rank = dist.get_rank()
        for ranks in _rank_sets(mesh, names):
            group = dist.group.WORLD if len(ranks) == mesh.size else dist.new_group(ranks, timeout=_timeout())
            if rank in ranks:
                assert group is not None
                _made[key] = group
    return _made[key]


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
