"""Which mesh, how many stages and micro-batches? All meshes that follow the levels, all divisors of the batch.

Bounds, from cheap to dear, each of them proved; t and o are seconds of a micro-batch and once a step of the whole model
on the mesh of one of p stages, m the number of micro-batches:

    work           all work split evenly over all devices, nothing sent (`work_bound`)
    of a divisor   what d micro-batches take at least without a memory limit holds for every multiple of d (with fewer
                   samples at a time nothing gets faster, see `microbatches`)
    its own        the strategy graph without a memory limit, which has neither recompute nor lifetimes that save bytes:
                   the least r t + o, shared out over p stages, with r the rounds of the schedule (`search.rounds`)
    its plan's     the mixed program's, memory and recompute included; it stops once that reaches the best plan known.
                   Of stages the memory is the fullest rank's, with all that it has in flight

`best_first` solves no more than it must. Equal blocks are split alike in all stages, and dealt to them evenly.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import BatchError, InfeasibleError, SearchTimeoutError
from autopar.graph import CapturedModel
from autopar.plan import Plan
from autopar.search.costs.folding import Folding, fold_program
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program, make_program
from autopar.search.costs.work_bound import saved_nbytes, work_seconds
from autopar.search.exact.ilp import CutoffError
from autopar.search.graph.moments import Share
from autopar.search.joint.ahead import Ahead
from autopar.search.joint.best_staged import best_staged, way_before_planning
from autopar.search.joint.candidates import INTERLEAVED, Candidate, in_flight
from autopar.search.joint.critical_path import Way, way_seconds
from autopar.search.joint.helpers import Helpers
from autopar.search.joint.questions import Answer, Setup, Solved, Solving, Tightening
from autopar.search.joint.relaxing import Asked, Pricers, relaxed_seconds
from autopar.search.known.baselines import memory_limit
from autopar.search.meshes import Arrangement, divisors
from autopar.search.planner import plan_program
from autopar.search.staged.rounds import Rounds, interleaved_rounds, rounds
from autopar.search.staged.stages import even_starts

MANY = 32
"""Problems from which on a good first answer is looked for on purpose, and other processes are worth their start."""
PLAN_SECONDS = 15.0
"""Bound on solving one problem, which then gives the best plan found and its true gap."""
FIRST_SECONDS = 20.0
"""The same while no plan is known: a good one saves more time than it takes."""
AGAIN_SECONDS, LEAST_SECONDS = 10.0, 0.1
"""Given at least to planning it again, within less memory; and when the time of all problems is over."""
UNEVEN = 1.15
"""What a step in stages took beside its bound where both were known (Llama-3-8B and 405B, H100)."""
AGAIN = 1 / 3
"""What running all of forward again adds to forward and backward."""
IDLE = (1.25, 1.05)
"""How much longer than the least work a step may take for what a pipeline idles, to be tried first."""


@dataclass(slots=True, kw_only=True)
class Joint:
    """The problems of `best_first`. `graph`: the captured model of one of so many micro-batches, for each of `counts`.

    The work of the fewest micro-batches bounds all: more parts do the same work, and launch it more often. helpers: run
    `joint.helper` and answer beside this process.
    """

    graph: Callable[[int], CapturedModel]
    setup: Setup
    tell: Callable[[str], None] = lambda _: None
    helpers: Helpers | None = None
    _graphs: dict[int, CapturedModel] = field(default_factory=dict)
    _programs: dict[int, Program] = field(default_factory=dict)
    _work: dict[int, tuple[float, float]] = field(default_factory=dict)
    _own: dict[Candidate, float] = field(default_factory=dict)
    _least: dict[tuple[Arrangement, int], float] = field(default_factory=dict)
    _rounds: dict[tuple[str, int, int, int], Rounds] = field(default_factory=dict)
    _folding: Folding | None = None
    _best: float = math.inf
    _saved: float | None = None
    _prices_of_memory: dict[int, dict[int, float]] = field(default_factory=dict)
    _ways: dict[Candidate, Way | None] = field(default_factory=dict)
    _pricers: Pricers = field(init=False)
    _ahead: Ahead = field(init=False)

    def __post_init__(self) -> None:
        self._pricers = Pricers(self.setup.config)
        self._ahead = Ahead(
            here=self.answer,
            fresh=self._fresh,
            graph=self.captured,
            needs=self._needs,
            setup=self.setup,
            helpers=self.helpers,
        )

    def captured(self, microbatches: int) -> CapturedModel:
        """The graph of one of so many micro-batches."""
        if microbatches not in self._graphs:
            self._graphs[microbatches] = self.graph(microbatches)
        return self._graphs[microbatches]

    def _needs(self, question: Asked | Solving | Tightening) -> set[int]:
        """The numbers of micro-batches whose graphs a question is about."""
        if isinstance(question, Solving | Tightening):
            return {question.key.microbatches, min(self.setup.counts)}
        return {question[1]}

    def _fresh(self, question: Asked | Solving | Tightening) -> Asked | Solving | Tightening:
        """A plan that was found since lowers the cutoff."""
        if isinstance(question, Solving):
            return replace(question, cutoff=min(question.cutoff, self._best * (1 - self.setup.relative_gap)))
        return question

    def answer(self, question: Asked | Solving | Tightening) -> Any:
        """Seconds that something takes at least, or a `Solved`."""
        if isinstance(question, Solving):
            return self._solved(question)
        if isinstance(question, Tightening):
            self._remember(question.key, question.prices)
            return self._way_seconds(question.key, question.way, question.cutoff, exact=True)
        arrangement, m, times = question
        return relaxed_seconds(self.program(m), self._pricers.of(arrangement, m), times, self.setup.fold)

    def program(self, microbatches: int) -> Program:
        """The program of one of so many micro-batches.

        Raises InfeasibleError where the loss of the whole batch is no sum over so many parts.
        """
        if microbatches not in self._programs:
            try:
                self._programs[microbatches] = make_program(self.captured(microbatches))
            except BatchError as error:
                if microbatches == 1:
                    raise
                raise InfeasibleError(str(error)) from error
        return self._programs[microbatches]

    def pricer(self, key: Candidate) -> Pricer:
        """Prices of the candidate's program."""
        return self._pricers.of(key.arrangement, key.microbatches)

    def bound(self, key: Candidate) -> float:
        known = [self._work_bound(key, key.microbatches), self._own.get(key, 0.0)]
        least = [self._least.get((key.arrangement, n), 0.0) for n in divisors(key.microbatches)]
        return max([*known, self._with_bubble(key, max(least))])

    def _work_seconds(self, key: Candidate) -> tuple[float, float]:
        """All work of a step, and that of the optimizer, on the devices of one stage."""
        p = key.arrangement.pipeline
        if p not in self._work:
            self._work[p] = work_seconds(self.program(min(self.setup.counts)), self.pricer(key))
        return self._work[p]

    def _with_bubble(self, key: Candidate, seconds: float) -> float:
        """A bound for the candidate from one for as many rounds as there are micro-batches."""
        once = self.rounds(key, key.microbatches).once
        return once * seconds + self._more_rounds(key, once * key.microbatches)

    def _more_rounds(self, key: Candidate, rounds: float) -> float:
        """What the rounds beyond so many take at least: their work."""
        p = key.arrangement.pipeline
        return (self.rounds(key, key.microbatches).passing - rounds) * self._work_seconds(key)[0] / key.microbatches / p

    def rounds(self, key: Candidate, microbatches: int) -> Rounds:
        """Of the candidate's schedule with so many micro-batches."""
        p, v = key.arrangement.pipeline, key.chunks
        if v == 1 or not self.setup.fold:
            return rounds(key.schedule, p, microbatches)
        known = (key.schedule, p, v, microbatches)
        if known not in self._rounds:
            program = self.program(min(self.setup.counts))
            self._folding = self._folding or fold_program(program)
            passing, update = self._work_seconds(key)
            shares = passing / microbatches, update
            begins = even_starts(program, p, v)
            self._rounds[known] = interleaved_rounds(program, self._folding, begins, p, microbatches, shares)
        return self._rounds[known]

    def expected(self, key: Candidate) -> float:
        """Bounds of stages know neither messages nor what uneven stages cost; and what does not fit is run again."""
        return self.bound(key) * (1.0 if key.arrangement.pipeline == 1 else UNEVEN) * self._again(key)

    def _again(self, key: Candidate) -> float:
        """By how much about the work grows if what does not fit of all that backward needs is made again there."""
        if self._saved is None:
            fewest = min(self.setup.counts)
            self._saved = fewest * saved_nbytes(self.program(fewest))
        devices = key.arrangement.mesh.size * key.arrangement.pipeline
        kept = self._saved / key.microbatches / devices * in_flight(key)
        room = memory_limit(key.arrangement.cluster, self.setup.config)
        return 1.0 + (AGAIN * max(1.0 - room / kept, 0.0) if kept else 0.0)

    def effort(self, key: Candidate) -> float:
        """Tables grow with the power of the axes; stages are planned as a whole, then each is priced."""
        return max(key.arrangement.mesh.num_axes, 2) + (key.arrangement.pipeline > 1) / 2

    def scouts(self, keys: Sequence[Candidate]) -> Sequence[Candidate]:
        """Of many problems, for each number of stages those on a mesh of fewest axes whose pipeline idles little, or
        hardly, and runs little again, with as few micro-batches as can be."""
        if len(keys) < MANY:
            return ()
        out: list[Candidate] = []
        for p in sorted({key.arrangement.pipeline for key in keys}):
            own = [key for key in keys if key.arrangement.pipeline == p]
            axes = min(key.arrangement.mesh.num_axes for key in own)
            own = [key for key in own if key.arrangement.mesh.num_axes == axes]
            work = {key: self._work_bound(key, key.microbatches) * self._again(key) for key in own}
            for idle in IDLE:
                near = [key for key in own if work[key] <= idle * min(work.values())]
                out.append(min(near, key=lambda key: (key.microbatches, -key.chunks)))
        return sorted(dict.fromkeys(out), key=self.bound)

    def foresee(
        self, keys: Iterable[tuple[Candidate, bool]], cutoff: float, seconds: float | None, solve: bool
    ) -> None:
        with suppress(BatchError, InfeasibleError):  # a batch that does not divide: said when its turn comes
            self._ahead.foresee(self._questions(keys, cutoff, seconds, solve))

    def _questions(
        self, keys: Iterable[tuple[Candidate, bool]], cutoff: float, seconds: float | None, solve: bool
    ) -> Iterator[Asked | Solving]:
        for key, is_bounded in keys:
            while not is_bounded and self._ahead.knows(self._wanted(key, cutoff)):
                is_bounded = self.sharpen(key, cutoff)
            if self.bound(key) < cutoff and not is_bounded:
                yield self._wanted(key, cutoff)
            elif self.bound(key) < cutoff and solve:
                yield self._solving(key, cutoff, seconds)

    def sharpen(self, key: Candidate, cutoff: float) -> bool:
        """First what the fewest micro-batches that may be below the cutoff take, which holds for their multiples, then
        more by steps that double, and last its own rounds: many candidates share these steps. (With few samples at a
        time the batch splits no more; from there on all are far above.)"""
        arrangement, m, times = wanted = self._wanted(key, cutoff)
        own = self.rounds(key, key.microbatches)
        is_own = (arrangement, m) in self._least or own == (m, 1.0)
        found = self._ahead.of(wanted) / arrangement.pipeline
        # r t + o is concave in r: of fewer rounds at least their share
        self._least[arrangement, m] = max(self._least.get((arrangement, m), 0.0), found * min(m / times, 1.0))
        if m != key.microbatches or not is_own:
            return False
        self._own[key] = own.once * found + self._more_rounds(key, own.once * times)
        return True

    def _cut_off_by_guessed_way(self, key: Candidate, cutoff: float) -> None:
        """Of evenly dealt stages a bound needs no plan: a way through the step memory aside, then within it.

        Raises CutoffError if it reaches the cutoff, InfeasibleError if nothing fits.
        """
        least = self._way_seconds(key, self._guessed(key), cutoff)
        if least == math.inf:
            raise InfeasibleError(f"{key}: nothing fits in the memory of the fullest rank")
        if least >= cutoff:
            raise CutoffError(least)

    def _guessed(self, key: Candidate) -> Way:
        program, pricer, p = self.program(key.microbatches), self.pricer(key), key.arrangement.pipeline
        return way_before_planning(program, pricer, self.setup.cluster, p, key.schedule, key.chunks)

    def _way_seconds(self, key: Candidate, way: Way, cutoff: float, exact: bool = False) -> float:
        """What the way takes at least, worked at as long as it does not reach the cutoff: memory aside, within it and,
        if that is asked for, `exact`ly."""
        program, pricer, fold = self.program(key.microbatches), self.pricer(key), self.setup.fold
        limit = memory_limit(key.arrangement.cluster, self.setup.config)
        prices = self._prices(key.arrangement.pipeline)
        least = way_seconds(program, pricer, way, fold)
        for work in (False, True)[: 1 + exact]:
            if least < cutoff:
                found = way_seconds(program, pricer, way, fold, limit=limit, cutoff=cutoff, prices=prices, exact=work)
                least = max(least, found)
        return least

    def _wanted(self, key: Candidate, cutoff: float) -> Asked:
        """The relaxation that comes next for this candidate."""
        shared = [n for n in divisors(key.microbatches) if n in self.setup.counts]
        first = next((n for n in shared if self._work_bound(key, n) < cutoff), key.microbatches)
        shared = [n for n in shared if n >= first]
        known = [i for i, n in enumerate(shared) if (key.arrangement, n) in self._least]
        following = max(known) + 2 ** (len(known) - 1) if known else 0
        if not known or following < len(shared) - 1:
            return key.arrangement, shared[following], shared[following]
        times = int(self.rounds(key, key.microbatches).passing) if key.microbatches > 1 else 1
        return key.arrangement, key.microbatches, times

    def _work_bound(self, key: Candidate, microbatches: int) -> float:
        """What the candidate's work alone takes with so many micro-batches."""
        p = key.arrangement.pipeline
        passing, update = self._work_seconds(key)
        r, g = self.rounds(key, microbatches)
        return (passing * r / microbatches + g * update) / p

    def solve(self, key: Candidate, cutoff: float, seconds: float | None) -> tuple[Answer, float, float]:
        came: Solved = self._ahead.of(self._solving(key, cutoff, seconds))
        self._own[key] = max(self._own.get(key, 0.0), came.own)
        self._ways[key] = came.way or self._ways.get(key)
        self._remember(key, came.prices)
        if isinstance(came.found, Exception):
            raise came.found
        self._best = min(self._best, came.found[1])
        return came.found

    def _solving(self, key: Candidate, cutoff: float, seconds: float | None) -> Solving:
        deadline = None if seconds is None else time.time() + seconds
        return Solving(key=key, cutoff=cutoff, deadline=deadline, prices=dict(self._prices(key.arrangement.pipeline)))

    def _remember(self, key: Candidate, prices: dict[int, float]) -> None:
        if prices:
            self._prices_of_memory[key.arrangement.pipeline] = dict(prices)

    def _prices(self, pipeline: int) -> dict[int, float]:
        """Of memory, for the whole model on one of so many stages; at first those of another number, scaled: the whole
        model on fewer devices takes longer, and has no more room."""
        if not self._prices_of_memory.get(pipeline):
            known = [p for p, prices in self._prices_of_memory.items() if prices]
            near = min(known, key=lambda p: abs(math.log(p / pipeline)), default=pipeline)
            prices = {moment: price * pipeline / near for moment, price in self._prices_of_memory.get(near, {}).items()}
            self._prices_of_memory[pipeline] = prices
        return self._prices_of_memory[pipeline]

    def _solved(self, asked: Solving) -> Solved:
        key = asked.key
        self._remember(key, asked.prices)
        found: tuple[Answer, float, float] | CutoffError | InfeasibleError | SearchTimeoutError
        try:
            found = self._solve(asked)
            self._best = min(self._best, found[1])
        except (CutoffError, InfeasibleError, SearchTimeoutError) as error:
            found = error
        return Solved(
            found=found,
            own=self._own.get(key, 0.0),
            way=self._ways.get(key),
            prices=dict(self._prices(key.arrangement.pipeline)),
        )

    def _solve(self, asked: Solving) -> tuple[Answer, float, float]:
        key, cutoff = asked.key, asked.cutoff
        p = key.arrangement.pipeline
        program = self.program(key.microbatches)
        once, bubble = self.rounds(key, key.microbatches).once, self._with_bubble(key, 0.0)
        if key.schedule == INTERLEAVED and cutoff < math.inf:  # those of 1f1b may be cut unevenly, which pays
            self._cut_off_by_guessed_way(key, cutoff)
        began, most = time.monotonic(), PLAN_SECONDS if cutoff < math.inf else FIRST_SECONDS

        def whole(pricer: Pricer, share: Share | None = None) -> Plan:
            left = most - (time.monotonic() - began)
            if left < 0.0:
                raise SearchTimeoutError(f"{key}: no plan was found that fits in {most:g} s")
            left = max(left, AGAIN_SECONDS)
            if asked.deadline is not None:
                left = min(left, max(asked.deadline - time.time(), LEAST_SECONDS))
            return plan_program(
                program,
                pricer,
                relative_gap=self.setup.relative_gap / 4,  # a better plan leaves fewer bounds to be found
                seconds=left,
                with_baselines=False,
                fold=self.setup.fold,
                progress=lambda text: self.tell(f"{key}: {text}"),
                cutoff=(cutoff - bubble) / once * p,
                say_least=False,
                share=share,
                prices=self._prices(p),
            )

        if p == 1:
            plan = whole(self.pricer(key))
            return plan, plan.estimate.step_seconds, plan.estimate.bound
        try:
            pricer, cluster = self.pricer(key), self.setup.cluster
            found = best_staged(program, pricer, cluster, p, key.schedule, key.chunks, whole, cutoff)
        except CutoffError as error:
            raise CutoffError(self._with_bubble(key, error.bound / p)) from error
        self._ways[key] = found.way
        self._own[key] = max(self._own.get(key, 0.0), self._with_bubble(key, found.bound))
        if found.plan is None:
            raise SearchTimeoutError(f"{key}: no plan was found that fits, which proves nothing")
        return found.plan, found.plan.estimate.step_seconds, self._own[key]

    def tighten(self, key: Candidate, cutoff: float) -> None:
        """By a way through its step; a guessed one without a plan."""
        if key.schedule:
            self._own[key] = max(self._own.get(key, 0.0), self._ahead.of(self._tightening(key, cutoff)))

    def foresee_tightening(self, keys: Sequence[Candidate], cutoff: float) -> None:
        self._ahead.foresee(self._tightening(key, cutoff) for key in keys if key.schedule)

    def _tightening(self, key: Candidate, cutoff: float) -> Tightening:
        way, prices = self._ways.get(key) or self._guessed(key), dict(self._prices(key.arrangement.pipeline))
        return Tightening(key=key, way=way, cutoff=cutoff, prices=prices)
