"""What does a candidate's step take at least within the memory of a rank? Bounds of relaxations of strategy graphs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.lower.program import Program
from autopar.search.alike_meshes import first_alike
from autopar.search.costs.pricing import Pricer
from autopar.search.joint.best_staged import way_before_planning
from autopar.search.joint.candidates import INTERLEAVED, Candidate
from autopar.search.joint.critical_path import SECONDS, CriticalWay, way_seconds
from autopar.search.joint.fullest_rank import fullest_share
from autopar.search.joint.known_prices import KnownPrices
from autopar.search.joint.questions import Setup
from autopar.search.joint.relaxing import Pricers, seconds_within
from autopar.search.joint.step_bounds import StepBounds
from autopar.search.joint.uneven_stages import uneven_seconds
from autopar.search.known.baselines import memory_limit
from autopar.search.meshes import Arrangement
from autopar.search.search_options import SearchAim
from autopar.search.staged.stages import even_starts

PLAN_SECONDS = 15.0
"""Bound on solving one problem, which then gives the best plan found and its true gap."""
BRIEF_SECONDS = 2.0
"""Of a bound while no plan is known: without a cutoff prices climb on; which problem comes first is known by then."""
SURELY_BINDS = 2
"""Candidates one after another that memory alone excludes, after which it comes first."""


@dataclass(slots=True, kw_only=True)
class MemoryBounds:
    """program: of a number of micro-batches. alike: seconds that no candidate takes less than with this schedule and
    number on any mesh like the first one; uneven: those of its stages, memory aside, however they are cut."""

    program: Callable[[int], Program]
    pricers: Pricers
    setup: Setup
    step: StepBounds
    prices: KnownPrices
    alike: dict[tuple[Arrangement, str, int], float] = field(default_factory=dict)
    uneven: dict[tuple[Arrangement, str, int], float] = field(default_factory=dict)
    _binding: dict[int, int] = field(default_factory=dict)
    """How many candidates of as many pipeline ranks, one after another, were not excluded with memory aside."""

    def within_memory(self, key: Candidate, cutoff: float, seconds: float = PLAN_SECONDS, most: int = 0) -> float:
        """What a step takes at least within the memory of a rank, worked at until it reaches the cutoff, and for
        about so many seconds. most: of all that are in one `shared_bounds.Group`, if not 0.

        Of evenly dealt stages a way through the step needs no plan; those of 1f1b may be cut unevenly, which pays.
        """
        m, p = key.microbatches, key.arrangement.pipeline
        program, pricer = self.program(m), self.pricers.of(key.arrangement, m, loose=most > 0)
        if key.schedule == INTERLEAVED:
            return self.way_seconds(key, self.guessed(key), cutoff)
        share = None
        if p > 1:
            if (least := self._uneven_seconds(key, cutoff)) >= cutoff:
                return least
            begins = even_starts(program, p, key.chunks)
            share = fullest_share(program, pricer.mesh.size, key.schedule, p, key.chunks, begins)
        once, more = self.step.rounds(key, m).once, self.step.with_bubble(key, 0.0)
        with self.prices.at(p, max(m, most)) as prices:
            asked = SearchAim(cutoff=(cutoff - more) / once * p, prices=prices)
            fold, part = self.setup.options.fold, m / max(m, most)
            found = seconds_within(program, pricer, share, fold, asked, _given(seconds, cutoff), part)
        return self.step.with_bubble(key, found / p)

    def _uneven_seconds(self, key: Candidate, cutoff: float) -> float:
        """Memory aside, of stages however they are cut; 0 where that is below the cutoff, or as much as if they were
        even."""
        m, p = key.microbatches, key.arrangement.pipeline
        if not self.setup.options.fold or self.step.uneven(key, m) <= 1.0:
            return 0.0
        first = first_alike(key.arrangement)
        known = first, key.schedule, m
        if known not in self.uneven:
            pricer = self.pricers.of(first, m, loose=True)
            self.uneven[known] = uneven_seconds(self.program(m), pricer, key.schedule, p, m, cutoff)
        return self.uneven[known]

    def pricer(self, key: Candidate) -> Pricer:
        """Prices of the candidate's program."""
        return self.pricers.of(key.arrangement, key.microbatches)

    def guessed(self, key: Candidate) -> CriticalWay:
        """The way through a step that is longest where each stage takes what its work takes."""
        program, pricer = self.program(key.microbatches), self.pricer(key)
        return way_before_planning(program, pricer, self.setup.cluster, key)

    def way_seconds(self, key: Candidate, way: CriticalWay, cutoff: float, *, exact: bool = False) -> float:
        """What the way takes at least, worked at as long as it does not reach the cutoff: memory aside, within it and,
        if that is asked for, `exact`ly. Where memory was what excluded the last of as many ranks it comes first."""
        program, pricer, fold = self.program(key.microbatches), self.pricer(key), self.setup.options.fold
        limit, p = memory_limit(key.arrangement.cluster, self.setup.config), key.arrangement.pipeline
        works = [None, False, True][: 2 + exact]
        if self._binding.get(p, 0) >= SURELY_BINDS:
            works = [*works[1:], None]
        least = 0.0
        for work in works:
            if least >= cutoff:
                return least
            if work is None:
                found = way_seconds(program, pricer, way, fold)
                self._binding[p] = 0 if found >= cutoff else self._binding.get(p, 0) + 1
            else:
                with self.prices.at(p, key.microbatches) as prices:
                    asked = SearchAim(cutoff=cutoff, prices=prices)
                    given = _given(SECONDS, cutoff)
                    found = way_seconds(program, pricer, way, fold, limit=limit, asked=asked, seconds=given, exact=work)
            least = max(least, found)
        return least


def _given(seconds: float, cutoff: float) -> float:
    return seconds if cutoff < math.inf else min(seconds, BRIEF_SECONDS)
