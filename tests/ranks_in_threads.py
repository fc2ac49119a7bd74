"""Collectives between threads of this process: quick enough to try every choice of every body."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops.groups import Groups, names_of, use_groups
from autopar.values.mesh import Mesh

TIMEOUT_SECONDS = 240


@dataclass
class ThreadGroup:
    """Threads that meet: each puts in a tensor, each takes out all of them in rank order."""

    size: int
    barrier: threading.Barrier = field(init=False)
    board: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        self.board[index] = tensor.clone()
        self.barrier.wait(TIMEOUT_SECONDS)
        everyone = [self.board[i] for i in range(self.size)]
        self.barrier.wait(TIMEOUT_SECONDS)
        return everyone


@dataclass(frozen=True)
class Member:
    """A rank's end of a group, given where a process group is expected."""

    group: ThreadGroup
    index: int


class ThreadGroups(Groups):
    """The groups of a mesh whose ranks are threads."""

    rooms: dict[tuple[Any, ...], ThreadGroup]

    def group(self, axis: Any) -> Any:
        names = names_of(axis)
        coordinate = self.mesh.coordinate(self.rank)
        others = tuple(c for n, c in zip(self.mesh.names, coordinate, strict=True) if n not in names)
        return Member(self.rooms[names, others], self.index(names))

    def members(self, axis: Any) -> list[int]:
        mine = self.mesh.coordinate(self.rank)
        fixed = [i for i, name in enumerate(self.mesh.names) if name not in names_of(axis)]
        return [r for r, c in enumerate(self.mesh.coordinates()) if all(c[i] == mine[i] for i in fixed)]


class Done:
    """What an asynchronous collective gives."""

    def wait(self) -> None:
        """It is done."""


def all_reduce(out: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done:
    everyone = torch.stack(group.group.exchange(group.index, out))
    out.copy_(everyone.amax(0) if op == dist.ReduceOp.MAX else everyone.sum(0))
    return Done()


def run_in_threads(mesh: Mesh, one_rank: Callable[[int], Any]) -> tuple[list[Any], list[Groups]]:
    """`one_rank(rank)` on every rank at once; its outcomes, and each rank's groups with what was sent counted."""
    rooms = _rooms(mesh)
    groups = [ThreadGroups(mesh=mesh, rank=r, groups={}, counting=True) for r in range(mesh.size)]
    outcomes: list[Any] = [None] * mesh.size

    def run(rank: int) -> None:
        try:
            with use_groups(groups[rank]):
                outcomes[rank] = one_rank(rank)
        except BaseException as error:
            outcomes[rank] = error
            for room in rooms.values():
                room.barrier.abort()

    for group in groups:
        group.rooms = rooms
    threads = [threading.Thread(target=run, args=(r,)) for r in range(mesh.size)]
    with mock.patch.object(dist, "all_reduce", all_reduce):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failures = [o for o in outcomes if isinstance(o, BaseException)]
    for failure in sorted(failures, key=_is_broken_barrier):
        raise failure
    return outcomes, groups


def _is_broken_barrier(failure: BaseException) -> bool:
    """Whether a rank failed only because another one did."""
    return isinstance(failure, threading.BrokenBarrierError) or isinstance(
        failure.__cause__, threading.BrokenBarrierError
    )


def _rooms(mesh: Mesh) -> dict[tuple[Any, ...], ThreadGroup]:
    rooms = {}
    for mask in range(1, 2**mesh.num_axes):
        names = tuple(n for i, n in enumerate(mesh.names) if mask >> i & 1)
        size = 1
        for name in names:
            size *= mesh.shape[mesh.names.index(name)]
        for coordinate in mesh.coordinates():
            others = tuple(c for n, c in zip(mesh.names, coordinate, strict=True) if n not in names)
            rooms.setdefault((names, others), ThreadGroup(size))
    return rooms
