"""How long do collectives take, by kind, message size and link level? Measured on the operations that plans run.

Inside a level all groups of a size send at once, as the groups of a mesh axis do. Two group sizes are measured where
the level has them, all of it and pairs, because a model that fits one size alone may be wrong about the number of hops.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.calibration.samples import CollectiveSample
from autopar.calibration.timing import Tell, TimedRounds
from autopar.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.ops.groups import Groups, use_groups
from autopar.runtime.groups import build_groups
from autopar.values.mesh import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
ELEMENT_SIZE = 4


class Place(NamedTuple):
    """Mesh axes along which groups of `size` lie; level as in `CollectiveSample`."""

    level: int | None
    axes: tuple[str, ...]
    size: int


def sizes_between(least: int, most: int, count: int) -> tuple[int, ...]:
    """`count` message sizes, log-spaced, whole multiples of 1 KiB."""
    steps = max(count - 1, 1)
    sizes = {max(1024, round(least * (most / least) ** (k / steps) / 1024) * 1024) for k in range(count)}
    return tuple(sorted(sizes))


def measuring_mesh(level_sizes: Sequence[int]) -> tuple[Mesh, tuple[Place, ...]]:
    """A mesh of all ranks whose axes, alone and together, are the groups to measure."""
    names: list[str] = []
    shape: list[int] = []
    places: list[Place] = []
    for level, size in enumerate(level_sizes):
        parts = (size // 2, 2) if size > 2 and size % 2 == 0 else (size,)
        own = [f"level{level}{'ab'[part]}" for part in range(len(parts))]
        names += own
        shape += parts
        places.append(Place(level, tuple(own), size))
        if len(parts) == 2:
            places.append(Place(level, (own[1],), 2))
    if len(level_sizes) > 1:
        places.append(Place(None, tuple(names), math.prod(level_sizes)))
    return Mesh(shape=tuple(shape), names=tuple(names)), tuple(places)


class CollectiveRounds:
    """Every kind, size and place, round by round; all ranks make and call this together."""

    def __init__(
        self,
        level_sizes: Sequence[int],
        *,
        kinds: Sequence[str],
        sizes: Sequence[int],
        device: torch.device,
        tell: Tell,
    ) -> None:
        mesh, places = measuring_mesh(level_sizes)
        _, self.groups = build_groups(mesh, device.type, [place.axes for place in places])
        self.wanted = _wanted(places, kinds, sizes)
        source = torch.ones(max(nbytes for _, _, nbytes in self.wanted) // ELEMENT_SIZE, device=device)
        calls = [collective_call(kind, place.axes, nbytes, source, self.groups) for place, kind, nbytes in self.wanted]
        with use_groups(self.groups), torch.no_grad():
            self.rounds = TimedRounds(calls, device, tell, "collectives")

    def run(self, tell: Tell) -> None:
        with use_groups(self.groups), torch.no_grad():
            self.rounds.run(tell)

    def samples(self) -> tuple[CollectiveSample, ...]:
        return tuple(
            CollectiveSample(kind=kind, level=place.level, group_size=place.size, nbytes=nbytes, seconds=seconds)
            for (place, kind, nbytes), seconds in zip(self.wanted, self.rounds.typical(), strict=True)
        )


def _wanted(places: Sequence[Place], kinds: Sequence[str], sizes: Sequence[int]) -> list[tuple[Place, str, int]]:
    # Every rank's part has whole elements, and every group the same sizes.
    unit = math.lcm(*(place.size for place in places)) * ELEMENT_SIZE
    rounded = dict.fromkeys(max(1, nbytes // unit) * unit for nbytes in sizes)
    return [(place, kind, nbytes) for place in places for kind in kinds for nbytes in rounded]


def collective_call(
    kind: str, axes: tuple[str, ...], nbytes: int, source: torch.Tensor, groups: Groups
) -> Callable[[], object]:
    """A call of the collective on values of `source`; inside `use_groups`."""
    elements, n = nbytes // ELEMENT_SIZE, groups.size(axes)
    whole, part = source[:elements], source[: elements // n]
    group, index = groups.group(axes), groups.index(axes)
    if kind == "send_recv":
        members = groups.members(axes)
        after, before = members[(index + 1) % n], members[index - 1]
        received = torch.empty_like(whole)

        def pass_on() -> None:
            operations = [
                dist.P2POp(dist.isend, whole, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return pass_on
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, axis=axes),
        "all_gather": lambda: all_gather(part, dim=0, axis=axes),
        "reduce_scatter": lambda: reduce_scatter(whole, dim=0, axis=axes),
        "all_to_all": lambda: all_to_all(whole, split_dim=0, concat_dim=0, axis=axes),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
    }
    return calls[kind]
