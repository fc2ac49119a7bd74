"""Which problems make up the joint space? A mesh, a number of stages, of micro-batches, and a schedule for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.errors import ArgumentError
from autopar.search.meshes import Arrangement, arrangements
from autopar.values.choices import near
from autopar.values.cluster import Cluster
from autopar.values.mesh import Mesh

INTERLEAVED = "interleaved-1f1b"
SEARCHED = ("gpipe", "1f1b", INTERLEAVED)
CHUNKS = (2, 4, 8, 16)
"""Stages a rank of interleaved schedules."""
FEWEST = 4
"""Numbers of micro-batches for which interleaved stages are tried beside 1f1b."""
IDLE = (1.25, 1.05)
"""How much longer than the least work a step may take for what a pipeline idles, to be tried first."""
PLAIN_IDLE = 1.15
"""The same among those of one stage a rank, of which few are in flight, so that their plans are found at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One problem of the joint space; `chunks`: stages a pipeline rank."""

    arrangement: Arrangement
    microbatches: int
    schedule: str = ""
    chunks: int = 1

    def __str__(self) -> str:
        text = f"{self.arrangement}, {self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        text += f", {self.schedule}" if self.schedule else ""
        return text + (f" of {self.chunks} stages a rank" if self.chunks > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSpace:
    """Which candidates are searched.

    microbatches: their number; None for every divisor of the batch.
    pipelines: numbers of pipeline ranks; None for all that the cluster's levels allow, from `least_pipeline` on.
    mesh: that of each pipeline rank; None for all that follow the cluster's levels.
    schedule: one of `SEARCHED`, or auto.
    """

    microbatches: int | None = None
    pipelines: tuple[int, ...] | None = (1,)
    least_pipeline: int = 1
    mesh: Mesh | None = None
    schedule: str = "auto"


EVERY_MESH = CandidateSpace()
"""Every mesh and number of micro-batches, without stages."""


def candidates(
    cluster: Cluster, counts: tuple[int, ...], pipelines: tuple[int, ...], schedule: str, num_blocks: int
) -> list[Candidate]:
    """All problems of a schedule. Of auto those of 1f1b (gpipe takes as long and more memory), and those of interleaved
    stages that fill the pipeline with fewest micro-batches on a mesh of fewest axes."""
    if schedule not in ("auto", *SEARCHED):
        raise ArgumentError(
            f"schedule {schedule!r} is not searched; choose auto or one of {', '.join(SEARCHED)}"
            f"{near(schedule, ('auto', *SEARCHED))}"
        )
    out = []
    every = arrangements(cluster, pipelines)
    for arrangement in every:
        p = arrangement.pipeline
        if p == 1:
            out += [Candidate(arrangement=arrangement, microbatches=count) for count in counts]
        elif p <= num_blocks:
            name = "1f1b" if schedule == "auto" else schedule
            if name != INTERLEAVED:
                out += [Candidate(arrangement=arrangement, microbatches=count, schedule=name) for count in counts]
            axes = min(other.mesh.num_axes for other in every if other.pipeline == p)
            if name == INTERLEAVED or (schedule == "auto" and arrangement.mesh.num_axes == axes):
                filling = [count for count in counts if count % p == 0]
                out += [
                    Candidate(arrangement=arrangement, microbatches=count, schedule=INTERLEAVED, chunks=chunks)
                    for count in (filling if name == INTERLEAVED else filling[:FEWEST])
                    for chunks in CHUNKS
                    if chunks * p <= num_blocks
                ]
    return out


def num_devices(key: Candidate) -> int:
    """Of all its pipeline ranks."""
    return key.arrangement.pipeline * key.arrangement.mesh.size


def in_flight(key: Candidate) -> float:
    """Micro-batches of whole stages that the first rank keeps at most."""
    p, m, v = key.arrangement.pipeline, key.microbatches, key.chunks
    if key.schedule == INTERLEAVED:
        return min(2 * (p - 1) + (v - 1) * p + 1, m * v) / v
    return min(p, m) if key.schedule == "1f1b" else m


def first_tried(keys: Sequence[Candidate], work: Callable[[Candidate], float]) -> list[Candidate]:
    """For each number of stages those on a mesh of fewest axes whose pipeline idles little, or hardly, and runs little
    again, with as few micro-batches as can be. work: seconds a step, at least, with what memory makes run again."""
    out: list[Candidate] = []
    for p in sorted({key.arrangement.pipeline for key in keys}):
        own = [key for key in keys if key.arrangement.pipeline == p]
        axes = min(key.arrangement.mesh.num_axes for key in own)
        seconds = {key: work(key) for key in own if key.arrangement.mesh.num_axes == axes}
        for idle in IDLE:
            near = [key for key in seconds if seconds[key] <= idle * min(seconds.values())]
            out.append(min(near, key=lambda key: (key.microbatches, -key.chunks)))
        plain = {key: value for key, value in seconds.items() if key.chunks == 1}
        near = [key for key, value in plain.items() if value <= PLAIN_IDLE * min(plain.values())]
        out += sorted(near, key=lambda key: key.microbatches)[:1]
    return out
