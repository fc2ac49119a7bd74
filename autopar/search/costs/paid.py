"""How often is each op and each tensor of a pipeline's stages paid for, on some ranks or on some way through a step?

An op counts as often as its stage does. A tensor is brought to its readers in every stage that reads it, each paying
for itself: where a stage reads it in all the ways in which it is read at all, at least what its one group would cost.
So it counts as often as those stages together, or, where there is none, as the stage that counts least.

Where only one run of ops is known to be in one stage (`Around`), it pays for what it reads; before and after it lie
parts of stages, nobody knows which, that pay for what none of the run reads at least once together.

Forward and backward may count differently. What is decided alike costs alike: F f + B b, with F and B the counts of
all instances. On ways through interleaved schedules they do (Llama 70B on 4 ranks, 8 stages each: 231 and 259).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program
from autopar.lower.redistributions import SINK
from autopar.search.costs.folding import Folding

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Times(NamedTuple):
    """How often passages forward and back are paid for, and what is paid once a step: no more often than either."""

    forward: float
    backward: float
    once: float

    @property
    def both(self) -> float:
        """Passages forward and back that are paid for at least."""
        return min(self.forward, self.backward)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Everywhere:
    """Each op and tensor in each of `microbatches`; what is paid once a step, once."""

    microbatches: int

    def of_ops(self, instances: Ints) -> tuple[float, float]:
        number = self.microbatches * len(instances)
        return number, number

    def of_tensors(self, names: tuple[str, ...], program: Program, folding: Folding) -> Times:
        number = self.microbatches * len(names)
        return Times(number, number, len(names))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paid:
    """`stage_of[position]` of each op; `forward[stage]`, `backward[stage]`: how often a passage there counts; `once`,
    how often what is paid once a step does."""

    stage_of: Ints
    forward: Floats
    backward: Floats
    once: Floats

    def of_ops(self, instances: Ints) -> tuple[float, float]:
        """Of a cluster, by positions of the ops of every instance: forward and back."""
        stages = self.stage_of[instances]
        return float(self.forward[stages].min(axis=1).sum()), float(self.backward[stages].min(axis=1).sum())

    def of_tensors(self, names: tuple[str, ...], program: Program, folding: Folding) -> Times:
        """Of a kind."""
        every = program.form.setdefault(("readers by stage", self.stage_of.tobytes()), {})
        if names not in every:
            every[names] = _readers_by_stage(names, program, folding, self.stage_of)
        found: _Readers = every[names]
        forward, backward = (
            float(side[found.whole].sum()) + sum(float(side[stages].min()) for stages in found.parted)
            for side in (self.forward, self.backward)
        )
        return Times(forward, backward, min(float(self.once[found.reading].sum()), forward, backward))


class _Readers(NamedTuple):
    """Stages that read tensors of a kind in all ways, each as often as it does; of tensors without one, the stages that
    read it; and all that read any."""

    whole: Ints
    parted: list[list[int]]
    reading: Ints


def _readers_by_stage(names: Sequence[str], program: Program, folding: Folding, stage_of: Ints) -> _Readers:
    whole, parted, every = list[int](), list[list[int]](), list[int]()
    for name in names:
        reading = reading_stages(program, stage_of, name)
        every += reading
        if (found := whole_readers(program, folding, stage_of, name)) is None:
            parted.append(reading)
        else:
            whole += found
    return _Readers(np.array(whole, dtype=np.int64), parted, np.array(every, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Around:
    """`part_of[position]` of each op: 0 before a run that is in one stage, 1 in it, 2 after it; `passing[part]`: how
    often a passage there counts, forward and back; what is paid once a step counts in the run."""

    part_of: Ints
    passing: Floats

    def of_ops(self, instances: Ints) -> tuple[float, float]:
        """Of a cluster, by positions of the ops of every instance."""
        number = float(self.passing[self.part_of[instances]].min(axis=1).sum())
        return number, number

    def of_tensors(self, names: tuple[str, ...], program: Program, folding: Folding) -> Times:
        """Of a kind."""
        read = _readers_of(names, program)
        if not read.names:
            return Times(0.0, 0.0, 0.0)
        parts = self.part_of[read.positions]
        before, inside, after = (np.logical_or.reduceat(parts == part, read.begins) for part in range(3))
        passing = np.where(np.stack([before, inside, after]), self.passing[:, None], np.inf).min(axis=0)
        once = inside & ~before & ~after
        for i in np.flatnonzero(inside & ~once):
            if 1 in (whole_readers(program, folding, self.part_of, read.names[i]) or ()):
                passing[i], once[i] = self.passing[1], True
        whole = float(passing.sum())
        return Times(whole, whole, min(float(once.sum()), whole))


class _ReadersOf(NamedTuple):
    """Those tensors of a kind that ops read, and positions of their readers, of tensor i from `begins[i]` on."""

    names: list[str]
    positions: Ints
    begins: Ints


def _readers_of(names: tuple[str, ...], program: Program) -> _ReadersOf:
    every = program.form.setdefault("readers of kinds", {})
    if names not in every:
        read = [name for name in names if program.readers[name]]
        positions = [[p for p, _ in program.readers[name]] for name in read]
        begins = np.cumsum([0, *map(len, positions)])[:-1]
        every[names] = _ReadersOf(read, np.array([p for one in positions for p in one], dtype=np.int64), begins)
    found: _ReadersOf = every[names]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Fewest:
    """Each op and tensor as often as where it counts least."""

    among: tuple[Around, ...]

    def of_ops(self, instances: Ints) -> tuple[float, float]:
        found = np.array([one.of_ops(instances) for one in self.among]).min(axis=0)
        return float(found[0]), float(found[1])

    def of_tensors(self, names: tuple[str, ...], program: Program, folding: Folding) -> Times:
        found = np.array([one.of_tensors(names, program, folding) for one in self.among]).min(axis=0)
        return Times(*map(float, found))


PaidFor = Everywhere | Paid | Around | Fewest


def stages_of(begins: Sequence[int], num_ops: int) -> Ints:
    """The stage of each op, by the positions of the ops with which stages after the first begin."""
    return np.searchsorted(np.asarray(begins), np.arange(num_ops), side="right")


def reading_stages(program: Program, stage_of: Ints, name: str) -> list[int]:
    """The stages with an op that reads the tensor."""
    return sorted({int(stage_of[p]) for p, _ in program.readers[name]})


def whole_readers(program: Program, folding: Folding, stage_of: Ints, name: str) -> list[int] | None:
    """Stages in which the tensor is read in every way in which it is read at all; None if there is none such."""
    ways: dict[int, set[int]] = {}
    for position, _ in program.readers[name]:
        ways.setdefault(int(stage_of[position]), set()).add(folding.class_of[position])
    producer = program.tensors[name].producer
    if name == program.loss or name in program.mutated:
        ways.setdefault(int(stage_of[producer]) if producer is not None else 0, set()).add(SINK)
    if not ways:
        return []
    every: set[int] = set().union(*ways.values())
    return [stage for stage, seen in ways.items() if seen == every] or None
