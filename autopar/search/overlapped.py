"""Which of the best plans takes the shortest step where collectives run beside compute? The timeline ranks them.

The additive cost is the timeline's linear shadow: it finds the plans that are ranked, and the proved bound stays that
of the shadow. Where the number of micro-batches is open, the best plans of every number are ranked, those near the
first one's first. A number is left out where its work alone, shared out over all devices, takes as long as the shortest
step known: a device is busy at least that long, whatever runs beside it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.capture.rebatch import Batches
from autopar.errors import BatchError
from autopar.lower.program import Program, make_program
from autopar.passes.split_stages import split_stages
from autopar.search.costs.pricing import make_pricer
from autopar.search.costs.work_bound import work_bound
from autopar.search.explanation.next_best import SECONDS, next_best
from autopar.search.pipeline_parts import part_of
from autopar.search.search_options import Tell, silent
from autopar.search.timeline.plan_timeline import plan_timeline
from autopar.search.timeline.weave import Overlap
from autopar.values.cluster import Cluster
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.search_report import RankedPlan, TimelineRanking

OWN = 0.5
"""Part of the time for the first plan's own number of micro-batches, where there are others."""
LEAST = 0.05
"""Seconds below which no other number is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRank:
    """Which plans are ranked, and by which timeline.

    count: of the next best, of each number of micro-batches.
    is_asked: only such plans.
    seconds: of searching them.
    tell: told what is being done.
    """

    overlap: Overlap
    count: int
    is_asked: Callable[[Plan], bool] = lambda _: True
    seconds: float = SECONDS
    tell: Tell = silent


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Plans with the seconds of their overlapped steps and their graphs, the first by the sum first."""

    cluster: Cluster
    overlap: Overlap
    rows: list[tuple[float, Plan, CapturedModel]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, plan: Plan, captured: CapturedModel) -> None:
        """captured: the plan's graph, that of one micro-batch of the whole model."""
        seconds = plan_timeline(plan, split_stages(captured, plan.cuts), self.cluster, self.overlap).seconds
        self.rows.append((seconds, plan, captured))

    @property
    def least(self) -> float:
        return min(row[0] for row in self.rows)

    def best(self) -> tuple[Plan, CapturedModel]:
        """The plan whose step is shortest, and its graph; its bound, baselines and search are the first one's.

        The search report says what each takes by the additive cost and by the timeline.
        """
        first = self.rows[0][1]
        chosen = min(range(len(self.rows)), key=lambda number: (self.rows[number][0], number))
        _, plan, captured = self.rows[chosen]
        ranked = TimelineRanking(
            bucket_nbytes=self.overlap.bucket_nbytes,
            ahead=self.overlap.ahead,
            chosen=chosen,
            plans=tuple(
                RankedPlan(
                    plan=one.estimate.search.instead if number else "first by the sum",
                    sum_seconds=one.estimate.in_turn_seconds,
                    timeline_seconds=seconds,
                )
                for number, (seconds, one, _) in enumerate(self.rows)
            ),
            left_out=self.left_out,
        )
        estimate = replace(
            plan.estimate,
            bound=first.estimate.bound,
            bounded_alone=first.estimate.bounded_alone,
            baselines=first.estimate.baselines,
            search=replace(first.estimate.search, timeline=ranked),
        )
        return plan.with_estimate(estimate), captured


def best_overlapped(
    plan: Plan,
    captured: CapturedModel,
    cluster: Cluster,
    asked: ToRank,
    *,
    batch: int | None = None,
    capture: Callable[[int], CapturedModel] | None = None,
) -> tuple[Plan, CapturedModel]:
    """Of `plan` and its next best the one whose overlapped step is shortest, and its graph.

    batch, capture: of an open number of micro-batches, the samples of a step and the graph of so many samples; then the
    best of every other number and its next are ranked too.
    """
    if batch is None or capture is None or not asked.count:
        return _ranked(plan, captured, cluster, asked, {})
    batches = Batches(capture=capture, batch=batch)
    graphs = {number: batches.microbatch for number in divisors(batch) if number != plan.microbatches}
    while True:
        best, own = _ranked(plan, captured, cluster, asked, graphs)
        number = best.microbatches
        if number == plan.microbatches or not batches.lines:
            return best, own
        seen = batches.captured_microbatch(number)
        if seen.fingerprint == own.fingerprint:
            return best, seen
        batches.distrust()


def _ranked(
    plan: Plan,
    captured: CapturedModel,
    cluster: Cluster,
    asked: ToRank,
    graphs: Mapping[int, Callable[[int], CapturedModel]],
) -> tuple[Plan, CapturedModel]:
    deadline = time.monotonic() + asked.seconds
    ranking = Ranking(cluster=cluster, overlap=asked.overlap)
    ranking.add(plan, captured)
    if asked.count:
        own = asked.seconds * OWN if graphs else asked.seconds
        for other in next_best(plan, make_program(captured), cluster, asked.count, seconds=own, tell=asked.tell):
            if asked.is_asked(other):
                ranking.add(other, captured)
    for number, program, share in _numbers(plan, cluster, graphs, ranking, deadline):
        asked.tell(f"planning {number} micro-batches")
        for other in next_best(plan, program, cluster, asked.count + 1, seconds=share, tell=asked.tell):
            if asked.is_asked(other):
                ranking.add(other, program.captured)
    return ranking.best()


def _numbers(
    plan: Plan,
    cluster: Cluster,
    graphs: Mapping[int, Callable[[int], CapturedModel]],
    ranking: Ranking,
    deadline: float,
) -> Iterator[tuple[int, Program, float]]:
    """Other numbers of micro-batches that may be better, their programs and the seconds that each is given."""
    pipeline = plan.pipeline
    pricer = make_pricer(mesh=plan.mesh, cluster=part_of(cluster, pipeline), config=plan.config)
    near = sorted(graphs, key=lambda number: abs(math.log(number / plan.microbatches)))
    for place, number in enumerate(near):
        left = deadline - time.monotonic()
        if left < LEAST:
            ranking.left_out[str(number)] = "no time was left"
            continue
        try:
            program = make_program(graphs[number](number))
        except BatchError as error:
            ranking.left_out[str(number)] = str(error)
            continue
        work = work_bound(program, pricer.for_another()) / pipeline
        if work >= ranking.least:
            ranking.left_out[str(number)] = f"its work takes {work:.4g} s"
            continue
        yield number, program, left / (len(near) - place)
