"""Which faults are tried? Each rank of several plans killed or stopped in steps and saves; disks that are full."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks import fault_saves
from benchmarks.fault_cases import ALIKE, KINDS, POINTS, STAGES, WIDE_STAGES, Fault

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
BESIDE = "asynchronous, slow"
"""Saves that last longer than a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A fault to be tried. room: of the disk for checkpoints, in sizes of one; 0 for a plain folder."""

    saving: str
    fault: Fault
    room: float = 0.0

    @property
    def group(self) -> tuple[str, str, str, str]:
        """The row of the table it is counted in: plan, saving, what happened, point."""
        if self.room:
            return self.fault.kind, self.saving, "disk full", "somewhere in the save"
        return self.fault.kind, self.saving, self.fault.how, self.fault.point

    @property
    def label(self) -> str:
        return "; ".join(self.group) + f"; rank {self.fault.rank}" + (f"; room {self.room}" if self.room else "")


ROOMS = (1.02, 1.2, 1.45, 1.7, 1.9)
SPOKEN = {
    "ddp": tuple(POINTS["ddp"]),
    "fsdp": tuple(name for name in POINTS["fsdp"] if name not in ("before forward", "between steps", "in clipping")),
    STAGES: tuple(POINTS[STAGES]),
    WIDE_STAGES: (
        "in the middle of passes forward",
        "at the first collective of a stage",
        "a message to another stage begun",
        "at the loss for all stages",
        "in clipping",
    ),
    ALIKE: tuple(POINTS[ALIKE])[::2],
}
"""Where ranks are killed in a step."""

SAVED = tuple(name for name in fault_saves.EVERY_RANK if not name.startswith("after ") or "naming" in name)
"""Where each rank is killed in a save."""

STOPPED = {
    "ddp": ("in the middle of forward",),
    "fsdp": ("a collective of backward begun", "before the optimizer"),
    STAGES: ("in the middle of passes forward", "at the loss for all stages"),
    WIDE_STAGES: ("a message to another stage begun",),
    ALIKE: ("in the middle of forward", "between steps"),
}
STOPPED_IN_SAVES = (
    "in the middle of writing tensors",
    "before ranks meet: writing the manifest of step",
    "after ranks meet: naming step",
)
READ_ONLY = (
    "before ranks meet: copying step",
    "after ranks meet: beginning step",
    "after ranks meet: checking step",
)
BESIDE_A_SAVE = ("in the middle of forward", "in the middle of backward", "before the optimizer")


def all_runs() -> Iterator[Run]:
    """Every fault of the table."""
    for kind, points in STOPPED.items():
        yield from _each_rank(kind, SYNCHRONOUS, "stopped", points)
    for saving in (SYNCHRONOUS, ASYNCHRONOUS):
        yield from _each_rank("fsdp", saving, "stopped", STOPPED_IN_SAVES)
        for room in ROOMS:
            yield Run(saving=saving, fault=Fault(rank=0, how="noted", point="before copying", kind="fsdp"), room=room)
        for point in READ_ONLY:
            yield Run(saving=saving, fault=Fault(rank=0, how="read-only", point=point, kind="fsdp"))
        yield from _each_rank("fsdp", saving, "killed", SAVED)
        for point in fault_saves.FIRST_RANK:
            yield Run(saving=saving, fault=Fault(rank=0, how="killed", point=point, kind="fsdp"))
    yield from _each_rank(STAGES, ASYNCHRONOUS, "killed", SAVED[1::4])
    yield from _each_rank("fsdp", BESIDE, "killed", (*fault_saves.BESIDE, *BESIDE_A_SAVE))
    for kind, points in SPOKEN.items():
        yield from _each_rank(kind, SYNCHRONOUS, "killed", points)


def _each_rank(kind: str, saving: str, how: str, points: Iterable[str]) -> Iterator[Run]:
    for point in points:
        for rank in range(KINDS[kind][0]):
            yield Run(saving=saving, fault=Fault(rank=rank, how=how, point=point, kind=kind))
