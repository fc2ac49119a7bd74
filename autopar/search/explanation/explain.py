"""Why this plan? What binds, what more memory or faster links would buy, which others were near, where all goes.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.ledger import Ledger, ledger
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.explanation.alternatives import Alternative, Space
from autopar.search.explanation.odd_rows import OddRows, odd_rows
from autopar.search.explanation.what_if import faster_arithmetic, faster_link, faster_memory
from autopar.search.in_buckets import LEAST as BESIDE
from autopar.search.in_buckets import best_in_buckets
from autopar.search.known.baselines import BASELINES, baseline_plan, memory_limit
from autopar.search.planner import make_plan
from autopar.search.recursion.ways import SEARCHED_AXES
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.search.timeline.staged_buckets import MARK
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan

GB = 1e9
FACTOR = 2.0
EACH = 0.15
"""The part of the time that one question may take: a hard one (a limit near the least that would do) leaves some for
the others."""
AS_IT_IS = "nothing changed"
UNLIMITED = "no memory limit"
LEAST = 1.0
"""Seconds without which no question is begun."""
DECISIONS = 8
"""How many kinds of ops, and half as many of parameters, are asked for their second best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a change would buy. same: seconds of the plan as it is, under the change (None where it does not fit).
    best, nbytes: of the best plan found under it; `why_not` says why none beside the plan itself was, `best` is then
    None or that. in_turn: of the best if nothing runs beside compute, where that may be another, and what no such plan
    is below is `bound`."""

    change: str
    same: float | None = None
    best: float | None = None
    in_turn: float | None = None
    bound: float = 0.0
    nbytes: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All of it. limit: bytes a device. limit_costs: seconds that the limit costs the best plan at least and at most,
    None if that was not asked. unanswered: what the time given did not suffice for. odd_rows: products that take long
    for the lengths of their rows. is_in_buckets: so are all others, named baselines too.
    """

    plan: Plan
    limit: float
    limit_costs: tuple[float, float] | None
    ledger: Ledger
    offers: tuple[Offer, ...]
    alternatives: tuple[Alternative, ...]
    baselines: Mapping[str, float | str]
    unanswered: tuple[str, ...]
    odd_rows: tuple[OddRows, ...] = ()
    is_in_buckets: bool = False

    def __str__(self) -> str:
        from autopar.report.explain_text import explain_text

        return explain_text(self)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; of the plan its estimate."""
        return {
            "model": self.plan.model,
            "estimate": asdict(self.plan.estimate),
            "limit_nbytes": self.limit,
            "limit_costs_seconds": self.limit_costs,
            "ledger": asdict(self.ledger),
            "offers": [asdict(offer) for offer in self.offers],
            "alternatives": [other.to_json() for other in self.alternatives],
            "baselines": dict(self.baselines),
            "unanswered": list(self.unanswered),
            "odd_rows": [asdict(odd) for odd in self.odd_rows],
            "hidden_seconds": self.plan.estimate.hidden,
            "is_in_buckets": self.is_in_buckets,
        }


def explain(
    plan: Plan,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    seconds: float = 60.0,
    relative_gap: float = 5e-3,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """The explanation of a plan of `captured` on `cluster`, questions asked until `seconds` are over.

    Raises:
        PlanMismatchError: if the plan is for another model.
    """
    plan.check(captured)
    program = make_program(captured)
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    plan = plan.with_estimate(evaluate_program(plan, program, pricer))
    asker = _Asker(
        plan=plan,
        captured=captured,
        program=program,
        pricer=pricer,
        deadline=time.monotonic() + seconds,
        each=seconds * EACH,
        relative_gap=relative_gap,
        tell=progress or (lambda _: None),
        is_in_buckets=MARK in plan.estimate.solver,
    )
    return asker.run()


def changes(cluster: Cluster, limit: float) -> list[tuple[str, Cluster, float]]:
    """What is asked about: a change in words, the machine and the bytes a device under it."""
    out = [
        (UNLIMITED, cluster, math.inf),
        (f"1 GB more a device: {(limit + GB) / GB:.4g} GB", cluster, limit + GB),
        (f"1 GB less a device: {(limit - GB) / GB:.4g} GB", cluster, limit - GB),
    ]
    for depth, level in enumerate(cluster.levels):
        if level.size > 1:
            out.append((f"{level.name} with {FACTOR:g}× the bandwidth", faster_link(cluster, depth, FACTOR), limit))
    out.append((f"{FACTOR:g}× the flop/s", faster_arithmetic(cluster, FACTOR), limit))
    out.append((f"{FACTOR:g}× the bandwidth of device memory", faster_memory(cluster, FACTOR), limit))
    return out


@dataclass(slots=True, kw_only=True)
class _Asker:
    plan: Plan
    captured: CapturedModel
    program: Program
    pricer: Pricer
    deadline: float
    each: float
    relative_gap: float
    tell: Callable[[str], None]
    is_in_buckets: bool

    def run(self) -> Explanation:
        plan, cluster = self.plan, self.pricer.cluster
        limit = memory_limit(cluster, plan.config)
        asked = changes(cluster, limit)
        if plan.estimate.gap > self.relative_gap:
            asked.insert(1, (AS_IT_IS, cluster, limit))
        unanswered: list[str] = []
        offers: list[Offer] = []
        for change, machine, room in asked:
            if room > 0 and self._asks(change, unanswered):
                free = offers[0] if machine is cluster and offers and offers[0].change == UNLIMITED else None
                offers.append(self._offer(change, machine, room, free))
        alternatives: list[Alternative] = []
        if plan.mesh.size > 1 and plan.mesh.num_axes <= SEARCHED_AXES:
            prices = self.pricer.sharing() if self.is_in_buckets else self.pricer
            space = Space(plan=plan, program=self.program, pricer=prices, limit=limit, relative_gap=self.relative_gap)
            both = itertools.zip_longest(space.techniques(), space.decisions(DECISIONS))
            for label, answer in filter(None, itertools.chain.from_iterable(both)):
                if self._asks(label, unanswered):
                    alternatives.append(answer(self._left()))
        alternatives.sort(key=lambda a: math.inf if a.seconds is None else a.seconds)
        return Explanation(
            plan=plan,
            limit=limit,
            limit_costs=self._limit_costs(offers, limit),
            ledger=ledger(plan, self.program, self.pricer),
            offers=tuple(offers),
            alternatives=tuple(alternatives),
            baselines=plan.estimate.baselines or self._baselines(limit, unanswered),
            unanswered=tuple(unanswered),
            odd_rows=odd_rows(plan, self.program, self.pricer),
            is_in_buckets=self.is_in_buckets,
        )

    def _left(self) -> float:
        """Seconds for the next question."""
        return max(min(self.deadline - time.monotonic(), self.each), 0.1)

    def _asks(self, what: str, unanswered: list[str]) -> bool:
        """Whether there is time for one more question; tells which one."""
        if self.deadline - time.monotonic() < LEAST:
            unanswered.append(what)
            return False
        self.tell(f"asking: {what}")
        return True

    def _offer(self, change: str, cluster: Cluster, limit: float, free: Offer | None) -> Offer:
        """free: the same without a limit; what fits there is what is best within this one."""
        pricer = make_pricer(mesh=self.plan.mesh, cluster=cluster, config=self.plan.config)
        own = evaluate_program(self.plan, self.program, pricer)
        is_held = own.peak_nbytes <= limit
        same, in_turn = (own.step_seconds, own.in_turn_seconds) if is_held else (None, None)
        if free is not None and free.best is not None and not free.why_not and free.nbytes <= limit:
            return replace(free, change=change, same=same)
        config = replace(self.plan.config, memory_nbytes=limit)
        how: dict[str, Any] = {"relative_gap": self.relative_gap, "fold": True}
        until = time.monotonic() + self._left()
        try:
            plan = make_plan(
                self.captured,
                cluster,
                self.plan.mesh,
                config,
                seconds=self._left(),
                with_baselines=False,
                buckets=self.is_in_buckets,
                **how,
            )
        except InfeasibleError as error:
            return Offer(change=change, same=same, best=same, in_turn=in_turn, why_not=str(error))
        except SearchTimeoutError:
            why_not = "no other plan was found in the time given"
            return Offer(change=change, same=same, best=same, in_turn=in_turn, why_not=why_not)
        found = [plan.estimate.in_turn_seconds, own.in_turn_seconds if is_held else math.inf]
        bound, left = plan.estimate.bound, until - time.monotonic()
        if self.is_in_buckets and left > 0:
            plan = best_in_buckets(plan, self.program, cluster, seconds=left, most=min(left, BESIDE), **how)
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

    def _baselines(self, limit: float, unanswered: list[str]) -> dict[str, float | str]:
        out: dict[str, float | str] = {}
        if self.plan.mesh.size == 1 or self.plan.mesh.num_axes > SEARCHED_AXES:
            return out
        for name in BASELINES:
            if self._asks(f"baseline {name}", unanswered):
                try:
                    made = named_in_buckets if self.is_in_buckets else baseline_plan
                    other = made(name, self.program, self.pricer, limit)
                    out[name] = other.estimate.step_seconds
                except InfeasibleError as error:
                    out[name] = str(error)
        return out
