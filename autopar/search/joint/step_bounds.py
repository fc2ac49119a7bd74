"""What does a step take at least by its work alone, and by a bound on some of its rounds?"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program
from autopar.search.costs.folding import fold_program
from autopar.search.costs.paid import stages_of
from autopar.search.costs.work_bound import again_seconds, ops_work, saved_nbytes, work_seconds
from autopar.search.joint.candidates import Candidate, in_flight
from autopar.search.joint.questions import Setup
from autopar.search.joint.relaxing import Pricers
from autopar.search.known.baselines import memory_limit
from autopar.search.staged.rounds import PipelineRounds, interleaved_rounds, least_uneven, rounds
from autopar.search.staged.stages import even_starts, start_positions

AGAIN = 1 / 3
"""What running all of forward again adds to forward and backward."""


@dataclass(slots=True, kw_only=True)
class StepBounds:
    """The work of the fewest micro-batches bounds all: more parts do the same work, and launch it more often."""

    program: Callable[[int], Program]
    pricers: Pricers
    setup: Setup
    _work: dict[int, tuple[float, float]] = field(default_factory=dict)
    _rounds: dict[tuple[str, int, int, int], PipelineRounds] = field(default_factory=dict)
    _blocks: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    _uneven: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _saved: NDArray[np.float64] | None = None
    _replayed: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def work_seconds(self, key: Candidate) -> tuple[float, float]:
        """All work of a step, and that of the optimizer, on the devices of one stage."""
        p = key.arrangement.pipeline
        if p not in self._work:
            self._work[p] = work_seconds(
                self.program(min(self.setup.counts)), self.pricers.of(key.arrangement, key.microbatches)
            )
        return self._work[p]

    def with_bubble(self, key: Candidate, seconds: float) -> float:
        """A bound for the candidate from one for as many rounds as there are micro-batches."""
        once = self.rounds(key, key.microbatches).once
        return once * seconds + self.more_rounds(key, once * key.microbatches)

    def more_rounds(self, key: Candidate, rounds: float) -> float:
        """What the rounds beyond so many take at least: their work."""
        p = key.arrangement.pipeline
        return (self.rounds(key, key.microbatches).passing - rounds) * self.work_seconds(key)[0] / key.microbatches / p

    def rounds(self, key: Candidate, microbatches: int) -> PipelineRounds:
        """Of the candidate's schedule with so many micro-batches."""
        p, v = key.arrangement.pipeline, key.chunks
        if v == 1 or not self.setup.options.fold:
            return rounds(key.schedule, p, microbatches)
        known = (key.schedule, p, v, microbatches)
        if known not in self._rounds:
            program = self.program(min(self.setup.counts))
            passing, update = self.work_seconds(key)
            shares = passing / microbatches, update
            begins = even_starts(program, p, v)
            folding = fold_program(program, pins=self.setup.config.pins)
            self._rounds[known] = interleaved_rounds(program, folding, begins, p, microbatches, shares)
        return self._rounds[known]

    def times(self, key: Candidate) -> int:
        """Micro-batches that are paid for in the rounds of the candidate's own."""
        return int(self.rounds(key, key.microbatches).passing) if key.microbatches > 1 else 1

    def work_bound(self, key: Candidate, microbatches: int) -> float:
        """What the candidate's work alone takes with so many micro-batches."""
        return self.even_work(key, microbatches) * self.uneven(key, microbatches)

    def even_work(self, key: Candidate, microbatches: int) -> float:
        """The same of stages that share all of it evenly."""
        passing, update = self.work_seconds(key)
        r, g = self.rounds(key, microbatches)
        return (passing * r / microbatches + g * update) / key.arrangement.pipeline

    def uneven(self, key: Candidate, microbatches: int) -> float:
        """How many times that, at least, as stages are of whole blocks. (Of interleaved ones rounds know it.)"""
        p = key.arrangement.pipeline
        if p == 1 or key.chunks > 1:
            return 1.0
        known = key.schedule, p, microbatches
        if known not in self._uneven:
            if p not in self._blocks:
                fewest = min(self.setup.counts)
                program, pricer = self.program(fewest), self.pricers.of(key.arrangement, key.microbatches)
                block = stages_of(start_positions(program), len(program.ops))
                work = fewest * ops_work(program, pricer).sum(axis=1)
                self._blocks[p] = np.bincount(block, weights=work).astype(np.float64)
            passing = least_uneven(self._blocks[p] / microbatches, key.schedule, p, microbatches)
            least = passing + self.work_seconds(key)[1] / p
            self._uneven[known] = max(least / self.even_work(key, microbatches), 1.0)
        return self._uneven[known]

    def again(self, key: Candidate) -> float:
        """By how much about the work grows if what does not fit of all that backward needs is made again there."""
        devices = key.arrangement.mesh.size * key.arrangement.pipeline
        kept = float(self._kept().sum()) / key.microbatches / devices * in_flight(key)
        room = memory_limit(key.arrangement.cluster, self.setup.config)
        return 1.0 + (AGAIN * max(1.0 - room / kept, 0.0) if kept else 0.0)

    def recomputation(self, key: Candidate) -> float:
        """Seconds of a step, at least, in which what does not fit is made again. Only without stages: all that is kept
        of a micro-batch is there at the turn; and 0 where memory would do if everything else took none."""
        if key.arrangement.pipeline > 1:
            return 0.0
        size, fewest = key.arrangement.mesh.size, min(self.setup.counts)
        if size not in self._replayed:
            pricer = self.pricers.of(key.arrangement, key.microbatches)
            self._replayed[size] = fewest * ops_work(self.program(fewest), pricer)[:, 0]
        room = memory_limit(key.arrangement.cluster, self.setup.config)
        return again_seconds(self._kept() / key.microbatches / size, self._replayed[size], room)

    def _kept(self) -> NDArray[np.float64]:
        """Bytes that backward needs of the whole batch, all ranks together, by op."""
        if self._saved is None:
            fewest = min(self.setup.counts)
            self._saved = fewest * saved_nbytes(self.program(fewest))
        return self._saved
