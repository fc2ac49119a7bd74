"""Which process group does a mesh axis stand for? A registry that the runtime fills and collectives read.

Rewritten graphs name axes (`axis="data"` or several at once, `axis=("data", "model")`); which processes those are is
known only at run time. Group members are in rank order, so a flattened group numbers its members row-major.

A tracer reads attributes of a module, but no ContextVar: `bound` says beforehand what `active_groups` and
`random.active_draws` answer in traced code. Groups get a number, a constant of the compiled graph; draws are a tensor
among its inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.values.mesh import Mesh

Axis = str | tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Groups:
    """The process groups of a mesh on this rank, and a log of what was sent through them.

    `groups` maps an axis name, or a tuple of names in mesh order, to the group of this rank along it.
    `sent` counts, per (collective, axis), calls and payload bytes while `counting`.
    """

    mesh: Mesh
    rank: int
    groups: dict[tuple[str, ...], dist.ProcessGroup]
    counting: bool = False
    sent: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = field(default_factory=dict)

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        size = 1
        for name in names_of(axis):
            size *= self.mesh.shape[self.mesh.names.index(name)]
        return size

    def index(self, axis: Axis) -> int:
        """Position of this rank along `axis`, row-major over several axes."""
        coordinate = self.mesh.coordinate(self.rank)
        index = 0
        for name in names_of(axis):
            position = self.mesh.names.index(name)
            index = index * self.mesh.shape[position] + coordinate[position]
        return index

    def group(self, axis: Axis) -> dist.ProcessGroup:
        return self.groups[names_of(axis)]

    def members(self, axis: Axis) -> list[int]:
        """Ranks of this rank's group along `axis`."""
        return dist.get_process_group_ranks(self.group(axis))

    def count(self, kind: str, axis: Axis, nbytes: int) -> None:
        if self.counting:
            key = (kind, names_of(axis))
            calls, total = self.sent.get(key, (0, 0))
            self.sent[key] = (calls + 1, total + nbytes)


def names_of(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


@dataclass(slots=True)
class Bound:
    """`draw`: int64 seed and step, then pairs of a call site in the code and its number in the whole graph."""

    groups: Groups | None = None
    number: int = -1
    draw: Tensor | None = None
    exact: bool = False


BOUND = Bound()
KNOWN: list[Groups] = []


def number_of(groups: Groups) -> int:
    """The number by which compiled code finds `groups`, which stay known from now on."""
    for number, known in enumerate(KNOWN):
        if known is groups:
            return number
    KNOWN.append(groups)
    return len(KNOWN) - 1


@contextmanager
def bound(groups: Groups, draw: Tensor, exact: bool) -> Iterator[None]:
    """Compiled calls inside are for these groups and draws."""
    before = BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact
    BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact = groups, number_of(groups), draw, exact
    try:
        yield
    finally:
        BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact = before


_active: ContextVar[Groups | None] = ContextVar("autopar_groups", default=None)


def active_groups() -> Groups:
    """The groups bound by `use_groups`.

    Raises:
        RuntimeError: if a rewritten graph runs outside a distributed module.
    """
    groups = BOUND.groups if torch.compiler.is_compiling() else _active.get()
    if groups is None:
        raise RuntimeError("a collective ran outside autopar.runtime: call the module that autopar.distribute returned")
    return groups


_functional: ContextVar[bool] = ContextVar("autopar_functional", default=False)


def is_functional() -> bool:
    """Whether collectives are to be torch's functional ones (`autopar.ops.functional`)."""
    return _functional.get()


@contextmanager
def use_functional() -> Iterator[None]:
    """Inside, collectives are those that any tracer can follow."""
    token = _functional.set(True)
    try:
        yield
    finally:
        _functional.reset(token)


@contextmanager
def use_groups(groups: Groups) -> Iterator[None]:
    """Bind axis names to process groups for the calls inside."""
    token = _active.set(groups)
    try:
        yield
    finally:
        _active.reset(token)
