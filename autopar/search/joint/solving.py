"""What is the best plan of one problem of the joint space? Solved within the time it may take, below a cutoff."""

import math
import time
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.ilp import CutoffError
from autopar.search.find_exactly import Exact
from autopar.search.graph.moments import Share
from autopar.search.in_buckets import best_in_buckets
from autopar.search.joint.best_staged import best_staged
from autopar.search.joint.candidates import INTERLEAVED, Candidate
from autopar.search.joint.critical_path import CriticalWay
from autopar.search.joint.memory_bounds import PLAN_SECONDS, MemoryBounds
from autopar.search.joint.questions import Solved, Solving
from autopar.search.known.baselines import memory_limit
from autopar.search.planner import plan_program, plan_rank
from autopar.search.search_options import SearchAim, Tell
from autopar.values.plan import Plan, one_stage

FIRST_SECONDS = 20.0
"""As `PLAN_SECONDS`, while no plan is known: a good one saves more time than it takes."""
FIRST_PART = 0.6
"""Part of that for interleaved stages as they are first planned: most do not fit yet."""
PATIENT_SECONDS = 60.0
"""The same for problems that are left to prove in the end."""
AGAIN_SECONDS, LEAST_SECONDS = 10.0, 0.1
"""Given at least to planning it again, within less memory; and when the time of all problems is over."""


@dataclass(slots=True, kw_only=True)
class Solver:
    """`solved` answers; what it proved on the way is in the answer, whatever was found."""

    bounds: MemoryBounds
    tell: Tell
    _own: dict[Candidate, float] = field(default_factory=dict)
    _ways: dict[Candidate, CriticalWay | None] = field(default_factory=dict)

    def solved(self, asked: Solving) -> Solved:
        found: tuple[Plan, float, float] | CutoffError | InfeasibleError | SearchTimeoutError
        try:
            found = self._solve(asked)
        except (CutoffError, InfeasibleError, SearchTimeoutError) as error:
            found = error
        key = asked.key
        return Solved(
            found=found,
            own=self._own.get(key, 0.0),
            way=self._ways.get(key),
            prices=dict(self.bounds.prices.of(key.arrangement.pipeline)),
        )

    def _solve(self, asked: Solving) -> tuple[Plan, float, float]:
        key, cutoff, setup, step = asked.key, asked.cutoff, self.bounds.setup, self.bounds.step
        p = key.arrangement.pipeline
        program, pricer = self.bounds.program(key.microbatches), self.bounds.pricer(key)
        once, bubble = step.rounds(key, key.microbatches).once, step.with_bubble(key, 0.0)
        most = PATIENT_SECONDS if asked.patient else PLAN_SECONDS if cutoff < math.inf else FIRST_SECONDS
        if cutoff < math.inf and not asked.is_refined:
            least = self.bounds.within_memory(key, cutoff, most)
            if least == math.inf:
                raise InfeasibleError(f"{key}: nothing fits in the memory of a rank")
            if least >= cutoff:
                raise CutoffError(least)
            self._proved(key, least)
        room = memory_limit(key.arrangement.cluster, setup.config)
        began = time.monotonic()

        options = replace(
            setup.options,
            relative_gap=setup.options.relative_gap / 4,  # a better plan leaves fewer bounds to be found
            with_baselines=False,
            tell=lambda text: self.tell(f"{key}: {text}"),
        )

        def left() -> float:
            """Seconds for the next search."""
            rest = most - (time.monotonic() - began)
            if rest < 0.0:
                raise SearchTimeoutError(f"{key}: no plan was found that fits in {most:g} s")
            if key.schedule == INTERLEAVED:
                rest = min(rest, FIRST_PART * most)
            rest = max(rest, AGAIN_SECONDS)
            return rest if asked.deadline is None else min(rest, max(asked.deadline - time.time(), LEAST_SECONDS))

        def within(prices: dict[int, float], pricer: Pricer) -> SearchAim:
            return SearchAim(
                cutoff=(cutoff - bubble) / once * p,
                is_below=key.schedule != INTERLEAVED and memory_limit(pricer.cluster, pricer.config) == room,
                says_least=False,
                prices=prices,
            )

        def whole(pricer: Pricer, share: Share, mixes: bool) -> Exact:
            with self.bounds.prices.at(p, key.microbatches) as prices:
                own = replace(options, seconds=left())
                return plan_rank(program, pricer, share, own, within(prices, pricer), mixes=mixes)

        if p == 1:
            try:
                with self.bounds.prices.at(p, key.microbatches) as prices:
                    plan = plan_program(program, pricer, replace(options, seconds=left()), within(prices, pricer))
            except SearchTimeoutError as error:
                self._proved(key, error.bound)
                raise
            if setup.options.buckets and plan.estimate.gap > setup.options.relative_gap:
                seconds = most if asked.deadline is None else max(asked.deadline - time.time(), LEAST_SECONDS)
                own = replace(options, relative_gap=setup.options.relative_gap, seconds=seconds)
                # what comes here is compared by the sum
                plan = best_in_buckets(plan, program, pricer, own, beside=False)
            return one_stage(plan), plan.estimate.in_turn_seconds, plan.estimate.bound
        try:
            found = best_staged(program, pricer, setup.cluster, key, whole, cutoff)
        except CutoffError as error:
            raise CutoffError(step.with_bubble(key, error.bound / p)) from error
        self._ways[key] = found.way
        self._proved(key, step.with_bubble(key, found.bound))
        if found.plan is None:
            raise SearchTimeoutError(f"{key}: no plan was found that fits, which proves nothing")
        return found.plan, found.plan.estimate.step_seconds, self._own[key]

    def _proved(self, key: Candidate, bound: float) -> None:
        self._own[key] = max(self._own.get(key, 0.0), bound)
