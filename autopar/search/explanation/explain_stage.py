"""Why is a plan of one stage as it is? What binds, what a change would buy, which others were near, where all goes.

Every figure is found by planning again with one thing changed, on the plan's own mesh and number of micro-batches, so
each can be checked by planning so. With the plan at s seconds and no plan below b, and under the change one of s' and
none below b', the best under the change is between b' and s' away from zero, so that the change saves at least
max(0, b - s') and at most s - b'. The plan itself is a candidate under every change that it still fits.

What plans take is said as they run. Bounds, and what is proved by them, count everything in turn, as the search does:
where a plan hides collectives beside compute (`costs.overlapped_seconds`) both are said.
"""

import itertools
import math
import time
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.ledger import ledger
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.explanation.alternatives import Space
from autopar.search.explanation.odd_rows import odd_rows
from autopar.search.explanation.pin_costs import pin_questions
from autopar.search.explanation.questions import UNLIMITED, TimedQuestions, changes
from autopar.search.in_buckets import LEAST as BESIDE
from autopar.search.in_buckets import best_in_buckets
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.planner import make_plan
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.search_options import SearchOptions
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.values.cluster import Cluster
from autopar.values.explanation import Alternative, Explanation, Offer
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan

AS_IT_IS = "nothing changed"
DECISIONS = 8
"""How many kinds of ops, and half as many of parameters, are asked for their second best."""


def explain_stage(
    whole: Plan, captured: CapturedModel, cluster: Cluster, asked: TimedQuestions, relative_gap: float
) -> Explanation:
    """The explanation of a plan of one stage."""
    program = make_program(captured)
    pricer = make_pricer(mesh=whole.mesh, cluster=cluster, config=whole.config)
    whole = whole.with_estimate(evaluate_program(whole.single, program, pricer))
    asker = _Asker(
        whole=whole,
        plan=whole.single,
        captured=captured,
        program=program,
        pricer=pricer,
        questions=asked,
        relative_gap=relative_gap,
        is_in_buckets=whole.estimate.search.is_in_buckets,
    )
    return asker.run()


@dataclass(slots=True, kw_only=True)
class _Asker:
    whole: Plan
    plan: StagePlan
    captured: CapturedModel
    program: Program
    pricer: Pricer
    questions: TimedQuestions
    relative_gap: float
    is_in_buckets: bool

    def run(self) -> Explanation:
        plan, cluster = self.plan, self.pricer.cluster
        limit = memory_limit(cluster, plan.config)
        asked = changes(cluster, limit)
        if plan.estimate.gap > self.relative_gap:
            asked.insert(1, (AS_IT_IS, cluster, limit))
        offers: list[Offer] = []
        for change, machine, room in asked:
            if room > 0 and self.questions.asks(change):
                free = offers[0] if machine is cluster and offers and offers[0].change == UNLIMITED else None
                offers.append(self._offer(change, machine, room, free))
        alternatives: list[Alternative] = []
        pins: list[Alternative] = []
        if plan.mesh.size > 1 and plan.mesh.num_axes <= SEARCHED_AXES:
            prices = self.pricer.shared if self.is_in_buckets else self.pricer
            space = Space(plan=plan, program=self.program, pricer=prices, limit=limit, relative_gap=self.relative_gap)
            for label, answer in pin_questions(space):
                if self.questions.asks(f"without {label}"):
                    pins.append(answer(self.questions.left()))
            both = itertools.zip_longest(space.techniques(), space.decisions(DECISIONS))
            for label, answer in filter(None, itertools.chain.from_iterable(both)):
                if self.questions.asks(label):
                    alternatives.append(answer(self.questions.left()))
        alternatives.sort(key=lambda a: math.inf if a.seconds is None else a.seconds)
        return Explanation(
            plan=self.whole,
            limit=limit,
            limit_costs=self._limit_costs(offers, limit),
            ledger=ledger(plan, self.program, self.pricer),
            offers=tuple(offers),
            alternatives=tuple(alternatives),
            pins=tuple(pins),
            baselines=plan.estimate.named_baselines or self._baselines(limit),
            unanswered=tuple(self.questions.unanswered),
            odd_rows=odd_rows(plan, self.program, self.pricer),
            is_in_buckets=self.is_in_buckets,
        )

    def _offer(self, change: str, cluster: Cluster, limit: float, free: Offer | None) -> Offer:
        """free: the same without a limit; what fits there is what is best within this one."""
        pricer = make_pricer(mesh=self.plan.mesh, cluster=cluster, config=self.plan.config)
        own = evaluate_program(self.plan, self.program, pricer)
        is_held = own.peak_nbytes <= limit
        same, in_turn = (own.step_seconds, own.in_turn_seconds) if is_held else (None, None)
        if free is not None and free.best is not None and not free.why_not and free.nbytes <= limit:
            return replace(free, change=change, same=same)
        config = replace(self.plan.config, memory_nbytes=limit)
        options = SearchOptions(
            relative_gap=self.relative_gap,
            seconds=self.questions.left(),
            with_baselines=False,
            buckets=self.is_in_buckets,
        )
        until = time.monotonic() + self.questions.left()
        try:
            plan = make_plan(self.captured, cluster, self.plan.mesh, config, options)
        except InfeasibleError as error:
            return Offer(change=change, same=same, best=same, in_turn=in_turn, why_not=str(error))
        except SearchTimeoutError:
            why_not = "no other plan was found in the time given"
            return Offer(change=change, same=same, best=same, in_turn=in_turn, why_not=why_not)
        found = [plan.estimate.in_turn_seconds, own.in_turn_seconds if is_held else math.inf]
        bound, left = plan.estimate.bound, until - time.monotonic()
        if self.is_in_buckets and left > 0:
            own_pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=config)
            options = replace(options, seconds=left)
            plan = best_in_buckets(plan, self.program, own_pricer, options, most=min(left, BESIDE))
        in_turn = min(*found, plan.estimate.in_turn_seconds)
        best, nbytes = plan.estimate.step_seconds, plan.estimate.peak_nbytes
        if same is not None and same < best:
            best, nbytes = same, own.peak_nbytes
        return Offer(change=change, same=same, best=best, in_turn=in_turn, bound=min(bound, in_turn), nbytes=nbytes)

    def _limit_costs(self, offers: list[Offer], limit: float) -> tuple[float, float] | None:
        """Seconds at least and at most that the best plan under the limit takes more than the best without, everything
        in turn."""
        known = {offer.change: offer for offer in offers}
        free, own = known.get(UNLIMITED), self.plan.estimate
        if free is None or free.in_turn is None or not free.bound:
            return None
        if free.nbytes <= limit:
            return 0.0, 0.0
        here = known.get(AS_IT_IS)
        best, bound = own.in_turn_seconds, own.bound
        if here is not None and here.in_turn is not None:
            best, bound = here.in_turn, max(bound, here.bound)
        return max(0.0, bound - free.in_turn), max(0.0, best - free.bound)

    def _baselines(self, limit: float) -> dict[str, float | str]:
        out: dict[str, float | str] = {}
        if self.plan.mesh.size == 1 or self.plan.mesh.num_axes > SEARCHED_AXES:
            return out
        for name in BASELINES:
            if self.questions.asks(f"baseline {name}"):
                try:
                    made = named_in_buckets if self.is_in_buckets else baseline_plan
                    other = made(name, self.program, self.pricer, limit)
                    out[name] = other.estimate.step_seconds
                except InfeasibleError as error:
                    out[name] = str(error)
        return out
