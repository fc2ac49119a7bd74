"""Which mesh, how many stages and micro-batches? All meshes that follow the levels, all divisors of the batch.

Bounds, from cheap to dear, each of them proved; t and o are seconds of a micro-batch and once a step of the whole model
on the mesh of one of p stages, m the number of micro-batches:

    work           all work split evenly over all devices, nothing sent (`work_bound`)
    of a divisor   what d micro-batches take at least without a memory limit holds for every multiple of d (with fewer
                   samples at a time nothing gets faster, see `microbatches`)
    its own        the strategy graph without a memory limit, which has neither recompute nor lifetimes that save bytes:
                   the least r t + o, shared out over p stages, with r the rounds of the schedule (`search.rounds`);
                   without stages beside it what has to be run again (`work_bound.again_seconds`)
    within memory  the same with recompute, and lifetimes, within the memory of a rank: of stages that of the fullest,
                   with all that it has in flight; of interleaved ones along a way through the step (`critical_path`)
    its plan's     the mixed program's; it stops once that reaches the best plan known

`best_first` solves no more than it must. Equal blocks are split alike in all stages, and dealt to them evenly.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import BatchError, InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.passes.batch_line import BatchLine
from autopar.search.alike_meshes import first_alike
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.ilp import CutoffError
from autopar.search.joint.best_first import Known
from autopar.search.joint.candidates import INTERLEAVED, Candidate, first_tried
from autopar.search.joint.critical_path import CriticalWay
from autopar.search.joint.known_prices import KnownPrices
from autopar.search.joint.memory_bounds import MemoryBounds
from autopar.search.joint.prefetch import Prefetch
from autopar.search.joint.programs import Programs
from autopar.search.joint.questions import (
    Question,
    Refined,
    Refining,
    Relaxing,
    Setup,
    Solved,
    Solving,
    Tightening,
)
from autopar.search.joint.quick_plans import quick_plans
from autopar.search.joint.relaxing import Pricers, relaxed_seconds
from autopar.search.joint.shared_bounds import SharedBounds
from autopar.search.joint.solving import Solver
from autopar.search.joint.step_bounds import StepBounds
from autopar.search.joint.workers import Workers
from autopar.search.meshes import Arrangement
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan, one_stage

MANY = 32
"""Problems from which on a good first answer is looked for on purpose, and other processes are worth their start."""
MESSAGES = 1.1
"""What a step in stages took beside its bound for uneven stages (Llama 70B, 1f1b of 8 to 64 stages: 1.08 to 1.12)."""


@dataclass(slots=True, kw_only=True)
class Joint:
    """The problems of `best_first`: one search over meshes, stages, micro-batches and schedules.

    graph: the captured model of one of so many micro-batches, for each of `counts`.
    line: what gives them, where something does, though it may have to be captured for that; line_at_hand: if it need
        not.
    improved: told the number of a plan that is better than the best before it, which was not the first.
    workers: run `joint.worker` and answer beside this process.
    """

    graph: Callable[[int], CapturedModel]
    setup: Setup
    tell: Callable[[str], None] = lambda _: None
    line: Callable[[], BatchLine | None] = lambda: None
    line_at_hand: Callable[[], BatchLine | None] = lambda: None
    workers: Workers | None = None
    improved: Callable[[int], None] = lambda _: None
    programs: Programs = field(init=False)
    _own: dict[Candidate, float] = field(default_factory=dict)
    _least: dict[tuple[Arrangement, int], float] = field(default_factory=dict)
    _best: float = math.inf
    _told: float = math.inf
    _prices: KnownPrices = field(default_factory=KnownPrices)
    _refined: set[Candidate] = field(default_factory=set)
    _scouts: set[Candidate] = field(default_factory=set)
    _settled: set[Candidate] = field(default_factory=set)
    _shared: SharedBounds = field(init=False)
    _ways: dict[Candidate, CriticalWay | None] = field(default_factory=dict)
    _pricers: Pricers = field(init=False)
    _step: StepBounds = field(init=False)
    _bounds: MemoryBounds = field(init=False)
    _solver: Solver = field(init=False)
    _prefetch: Prefetch = field(init=False)

    def __post_init__(self) -> None:
        self.programs = Programs(graph=self.graph, line=self.line)
        self._shared = SharedBounds(counts=self.setup.counts)
        self._pricers = Pricers(self.setup.config, self.setup.options.buckets)
        self._step = StepBounds(program=self.program, pricers=self._pricers, setup=self.setup)
        self._bounds = MemoryBounds(
            program=self.program, pricers=self._pricers, setup=self.setup, step=self._step, prices=self._prices
        )
        self._solver = Solver(bounds=self._bounds, tell=self.tell)
        self._prefetch = Prefetch(
            here=self.answer,
            fresh=self._fresh,
            graph=self.programs.captured,
            needs=self._needs,
            setup=self.setup,
            line=self.line,
            line_at_hand=self.line_at_hand,
            workers=self.workers,
        )

    def _needs(self, question: Question) -> set[int]:
        """The numbers of micro-batches whose graphs a question is about."""
        if isinstance(question, Refining | Solving | Tightening):
            return {question.key.microbatches, min(self.setup.counts)}
        return {question.microbatches}

    def _fresh(self, question: Question) -> Question:
        """A plan that was found since lowers the cutoff."""
        if isinstance(question, Relaxing | Refining | Solving):
            return replace(question, cutoff=min(question.cutoff, self._best * (1 - self.setup.options.relative_gap)))
        return question

    def answer(self, question: Question) -> Any:
        """Seconds that something takes at least, or a `Refined`, or a `Solved`."""
        if isinstance(question, Solving):
            return self._solved(question)
        if isinstance(question, Refining):
            p = question.key.arrangement.pipeline
            self._prices.remember(p, question.prices)
            bound = self._bounds.within_memory(question.key, question.cutoff, most=question.most)
            uneven = self._bounds.uneven.get(_alike(question.key))
            return Refined(bound=bound, uneven=uneven, prices=dict(self._prices.of(p)))
        if isinstance(question, Tightening):
            self._prices.remember(question.key.arrangement.pipeline, question.prices)
            return self._bounds.way_seconds(question.key, question.way, question.cutoff, exact=True)
        m, pricer = question.microbatches, self._pricers.of(question.arrangement, question.microbatches, loose=True)
        return relaxed_seconds(self.program(m), pricer, question.times, self.setup.options.fold, question.enough())

    def program(self, microbatches: int) -> Program:
        """The program of one of so many micro-batches.

        Raises InfeasibleError where the loss of the whole batch is no sum over so many parts.
        """
        return self.programs.of(microbatches)

    def pricer(self, key: Candidate) -> Pricer:
        """Prices of the candidate's program."""
        return self._pricers.of(key.arrangement, key.microbatches)

    def bound(self, key: Candidate) -> float:
        return max(self._step.work_bound(key, key.microbatches), self._found(key))

    def _found(self, key: Candidate) -> float:
        """What solving something showed; of stages that share the work evenly."""
        first = first_alike(key.arrangement)
        least = [self._least.get((first, n), 0.0) for n in divisors(key.microbatches)]
        alike = _alike(key)
        own = max(self._own.get(key, 0.0), self._bounds.alike.get(alike, 0.0), self._bounds.uneven.get(alike, 0.0))
        return max(own, self._step.with_bubble(key, max(least)))

    def expected(self, key: Candidate) -> float:
        """Bounds of stages know neither messages nor that stages of whole blocks are uneven, but those along a way do;
        and those memory aside not that what does not fit is run again."""
        is_refined = key in self._refined
        is_near = key.arrangement.pipeline == 1 or (is_refined and key.schedule == INTERLEAVED)
        found = self._found(key) * self._step.uneven(key, key.microbatches)
        least = max(self.bound(key), found) * (1.0 if is_near else MESSAGES)
        return least * (1.0 if is_refined else self._step.again(key))

    def effort(self, key: Candidate) -> float:
        """Tables grow with the power of the axes; stages are planned as a whole, then each is priced; of interleaved
        ones more is in flight, so that memory mostly binds."""
        p, axes = key.arrangement.pipeline, max(key.arrangement.mesh.num_axes, 2)
        return axes + (0.0 if p == 1 else 0.5 if key.chunks == 1 else 0.75)

    def scouts(self, keys: Sequence[Candidate]) -> Sequence[Candidate]:
        if len(keys) < MANY:
            return ()
        self._scouts.update(
            first_tried(keys, lambda key: self._step.work_bound(key, key.microbatches) * self._step.again(key))
        )
        return sorted(self._scouts, key=self.bound)

    def quick_plans(self, keys: Sequence[Candidate], seconds: float | None) -> Iterator[tuple[Candidate, Plan, float]]:
        for key, plan in quick_plans(keys, self.program, self.pricer, seconds, self.setup.options):
            self._best = min(self._best, plan.estimate.in_turn_seconds)
            yield key, one_stage(plan), plan.estimate.in_turn_seconds

    def foresee(
        self, keys: Iterable[tuple[Candidate, Known]], cutoff: float, seconds: float | None, solve: bool
    ) -> None:
        with suppress(BatchError, InfeasibleError):  # a batch that does not divide: said when its turn comes
            self._prefetch.foresee(self._questions(keys, cutoff, seconds, solve))

    def _questions(
        self, keys: Iterable[tuple[Candidate, Known]], cutoff: float, seconds: float | None, solve: bool
    ) -> Iterator[Question]:
        for key, known in keys:
            is_bounded = known != Known.LITTLE
            while not is_bounded and self._prefetch.knows(self._wanted(key, cutoff)):
                is_bounded = self.sharpen(key, cutoff)
            with suppress(InfeasibleError):  # said when its turn comes
                while is_bounded and known != Known.REFINED and self._may_refine(key, cutoff):
                    if not self._prefetch.knows(refining := self._refining(key, cutoff)):
                        break
                    self._refine(refining)
            if self.bound(key) < cutoff and not is_bounded:
                yield self._wanted(key, cutoff)
            elif known != Known.REFINED and self._may_refine(key, cutoff):
                yield self._refining(key, cutoff)
            elif self.bound(key) < cutoff and solve:
                yield self._solving(key, cutoff, seconds)

    def sharpen(self, key: Candidate, cutoff: float) -> bool:
        """First what the fewest micro-batches that may be below the cutoff take, which holds for their multiples, then
        more, and last its own rounds: many candidates share these steps. (With few samples at a time the batch splits
        no more; from there on all are far above.)"""
        if self.bound(key) >= cutoff:  # what was foreseen has been answered since
            return True
        wanted = self._wanted(key, cutoff)
        arrangement, m, times = wanted.arrangement, wanted.microbatches, wanted.times
        own = self._step.rounds(key, key.microbatches)
        is_own = (arrangement, m) in self._least or own == (m, 1.0)
        found = self._prefetch.of(wanted) / arrangement.pipeline
        # r t + o is concave in r: of fewer rounds at least their share
        self._least[arrangement, m] = max(self._least.get((arrangement, m), 0.0), found * min(m / times, 1.0))
        if m != key.microbatches or not is_own:
            return False
        self._own[key] = (
            own.once * found + self._step.more_rounds(key, own.once * times) + self._step.recomputation(key)
        )
        return True

    def refine(self, key: Candidate, cutoff: float) -> None:
        """Within memory; while no plan is known only where that surely binds: else the plan is found as fast."""
        while self._may_refine(key, cutoff) and (cutoff < math.inf or self._step.again(key) > 1.0):
            self._refine(self._refining(key, cutoff))

    def _may_refine(self, key: Candidate, cutoff: float) -> bool:
        return key not in self._refined and self.bound(key) < cutoff

    def _refine(self, question: Refining) -> None:
        key, came = question.key, self._prefetch.of(question)
        if came.uneven is not None:
            self._bounds.uneven[_alike(key)] = came.uneven
        if question.most:
            is_of_use = came.bound >= self._best * (1 - self.setup.options.relative_gap)
            for one in self._shared.answered((key, question.most), self._best, is_of_use):
                if came.bound < math.inf:  # where nothing fits each says so itself
                    self._bounds.alike[_alike(one)] = max(self._bounds.alike.get(_alike(one), 0.0), came.bound)
            return
        if came.bound == math.inf:
            raise InfeasibleError(f"{key}: nothing fits in the memory of a rank")
        self._own[key] = max(self._own.get(key, 0.0), came.bound)
        self._prices.remember(key.arrangement.pipeline, came.prices)
        self._refined.add(key)

    def _refining(self, key: Candidate, cutoff: float) -> Refining:
        """Once a plan is known, of all that may be excluded together."""
        prices = dict(self._prices.of(key.arrangement.pipeline))
        group = None
        if self._best < math.inf:
            group = self._shared.of(key, self._best, lambda other: self._is_open(other, cutoff))
        if group is not None:
            return Refining(key=group[0], most=group[1], cutoff=cutoff, prices=prices)
        return Refining(key=key, cutoff=cutoff, prices=prices)

    def _is_open(self, key: Candidate, cutoff: float) -> bool:
        """Whether one without stages may be better, memory aside."""
        return (key.arrangement, key.microbatches) in self._least and self.bound(key) < cutoff

    def _wanted(self, key: Candidate, cutoff: float) -> Relaxing:
        """The relaxation that comes next for this candidate; of a scout its own. While no plan is known those of its
        divisors by steps that double."""
        is_scout = key in self._scouts
        if cutoff < math.inf and not is_scout:
            return self._first_open(key, cutoff)
        shared = [n for n in divisors(key.microbatches) if n in self.setup.counts and not is_scout]
        first = next((n for n in shared if self._step.work_bound(key, n) < cutoff), key.microbatches)
        shared = [n for n in shared if n >= first]
        alike = first_alike(key.arrangement)
        known = [i for i, n in enumerate(shared) if (alike, n) in self._least]
        following = max(known) + 2 ** (len(known) - 1) if known else 0
        if shared and (not known or following < len(shared) - 1):
            return self._relaxing(key, shared[following], shared[following])
        return self._relaxing(key, key.microbatches, self._step.times(key))

    def _relaxing(self, key: Candidate, microbatches: int, times: int) -> Relaxing:
        cutoff = self._best * (1 - self.setup.options.relative_gap)
        return Relaxing(arrangement=first_alike(key.arrangement), microbatches=microbatches, times=times, cutoff=cutoff)

    def _first_open(self, key: Candidate, cutoff: float) -> Relaxing:
        """That of the fewest micro-batches which may be below the cutoff themselves, by all that is known: theirs has
        to be found in any case, in the rounds that they take, and bounds their multiples. Last the candidate's own."""
        alike = first_alike(key.arrangement)
        for n in divisors(key.microbatches)[:-1]:
            fewer = replace(key, microbatches=n)
            is_open = n in self.setup.counts and (alike, n) not in self._least
            if is_open and self.bound(fewer) < cutoff:
                return self._relaxing(key, n, self._step.times(fewer) if key.chunks == 1 else n)
        return self._relaxing(key, key.microbatches, self._step.times(key))

    def solve(self, key: Candidate, cutoff: float, seconds: float | None) -> tuple[Plan, float, float]:
        return self._taken(key, self._prefetch.of(self._solving(key, cutoff, seconds)))

    def _taken(self, key: Candidate, came: Solved) -> tuple[Plan, float, float]:
        self._own[key] = max(self._own.get(key, 0.0), came.own)
        self._ways[key] = came.way or self._ways.get(key)
        self._prices.remember(key.arrangement.pipeline, came.prices)
        if isinstance(came.found, Exception):
            raise came.found
        plan, _, bound = came.found
        searched = plan.estimate.search.searched_seconds
        if searched is not None and searched * (1 - self.setup.options.relative_gap) <= bound:
            self._settled.add(key)
        if came.found[1] < self._told < math.inf:
            self.improved(key.microbatches)
        self._told = min(self._told, came.found[1])
        self._best = min(self._best, came.found[1])
        return came.found

    def _solving(self, key: Candidate, cutoff: float, seconds: float | None) -> Solving:
        deadline = None if seconds is None else time.time() + seconds
        return Solving(
            key=key,
            cutoff=cutoff,
            deadline=deadline,
            is_refined=key in self._refined,
            prices=dict(self._prices.of(key.arrangement.pipeline)),
        )

    def _solved(self, asked: Solving) -> Solved:
        key = asked.key
        self._prices.remember(key.arrangement.pipeline, asked.prices)
        came = self._solver.solved(asked)
        if not isinstance(came.found, Exception):
            self._best = min(self._best, came.found[1])
        return came

    def tighten(self, key: Candidate, cutoff: float, seconds: float | None) -> tuple[Plan, float, float] | None:
        """By a way through its step; a guessed one without a plan. Without stages it is solved with more time, unless
        nothing but starts that buckets do not share is between its plan and its bound."""
        if key.schedule:
            self._own[key] = max(self._own.get(key, 0.0), self._prefetch.of(self._tightening(key, cutoff)))
            return None
        if key in self._settled:
            return None
        patient = replace(self._solving(key, cutoff, seconds), patient=True, is_refined=False)
        try:
            return self._taken(key, self._prefetch.of(patient))
        except CutoffError as error:
            self._own[key] = max(self._own.get(key, 0.0), error.bound)
        except InfeasibleError:
            self._own[key] = math.inf
        except SearchTimeoutError:
            pass  # what was proved by then is kept
        return None

    def foresee_tightening(self, keys: Sequence[Candidate], cutoff: float) -> None:
        self._prefetch.foresee(self._tightening(key, cutoff) for key in keys if key.schedule)

    def _tightening(self, key: Candidate, cutoff: float) -> Tightening:
        way, prices = self._ways.get(key) or self._bounds.guessed(key), dict(self._prices.of(key.arrangement.pipeline))
        return Tightening(key=key, way=way, cutoff=cutoff, prices=prices)


def _alike(key: Candidate) -> tuple[Arrangement, str, int]:
    """Candidates for which one bound holds (`shared_bounds`)."""
    return first_alike(key.arrangement), key.schedule, key.microbatches
