"""What does a plan's step look like? Its timeline, its memory over time, what is sent, what each call and tensor costs.

The timeline of one stage is `drawn_step`'s. That of two micro-batches at once, and of several stages, is
`search.timeline`'s without overlap, where every collective goes alone: such a step in buckets takes less than is drawn.
Memory over time is `lower.live`'s, of several stages `search.staged.staged_memory`'s.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from autopar.cost_models.compute import HOST
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.messages import sent_by_rank
from autopar.lower.program import make_program
from autopar.search.costs.evaluate import charges_of
from autopar.search.costs.ledger import ledger
from autopar.search.costs.pricing import make_pricer
from autopar.search.explanation.drawn_step import DrawnStep
from autopar.search.explanation.held_over_time import held_in_stages, held_of_step
from autopar.search.pipeline_parts import part_of
from autopar.search.timeline.plan_timeline import PlanTimeline, plan_timeline
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.step_picture import DrawnTimeline, HeldOverTime, SentInAStep, Span, StepPicture, Track

MOST_SPANS = 8000
"""Spans that are drawn at most: 5,900 are half a MB of a page, twice as many a whole one."""


def picture_step(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> StepPicture:
    """The picture of a plan's step; `stages` are the graphs of its stages (`passes.split_stages`).

    Raises:
        MeshError: if the cluster cannot be shared out over so many pipeline ranks.
    """
    part = part_of(cluster, plan.pipeline) if plan.num_stages > 1 else cluster
    drawn: DrawnTimeline | None = None
    ledgers, computed, communicated, nbytes, held = [], [], [], [], list[HeldOverTime]()
    for number, stage in enumerate(stages):
        program, own = make_program(stage), plan.stages[number]
        pricer = make_pricer(mesh=plan.mesh, cluster=part, config=plan.config)
        after = plan.stages[number + 1].layouts if number + 1 < plan.num_stages else {}
        sent = {name: after[name] for name in stage.sends}
        step = lower(own, program, pricer.target, sent)
        live = Live(step)
        spent, sending, kept = (defaultdict[str, float](float) for _ in range(3))
        for charge in charges_of(step, pricer):
            (sending if charge.axes else spent)[charge.name] += charge.seconds
        peak = int(np.argmax(np.sum(list(live.bytes.values()), axis=0)))
        for holding in live.holdings:
            if holding.first <= peak <= holding.last:
                kept[holding.name] += holding.nbytes
        ledgers.append(ledger(own, program, pricer, sent))
        computed.append(dict(spent))
        communicated.append(dict(sending))
        nbytes.append(dict(kept))
        if plan.num_stages == 1:
            held.append(held_of_step(step, live, pricer))
            if own.copies == 1:
                own_step = DrawnStep(step, live, pricer)
                drawn = draw(own_step.seconds, own_step.tracks, own_step.spans)
    if drawn is None:
        timeline = plan_timeline(plan, stages, cluster)
        drawn = draw(timeline.seconds, *_drawn(timeline))
        if plan.num_stages > 1:
            held += held_in_stages(plan, stages, part, timeline)
    return StepPicture(
        timeline=drawn,
        held=tuple(held),
        sent=tuple(_sent(plan, stages, on_host=cluster.device.name == HOST)),
        ledgers=tuple(ledgers),
        computed=tuple(computed),
        communicated=tuple(communicated),
        nbytes=tuple(nbytes),
    )


def draw(seconds: float, tracks: Sequence[Track], spans: Sequence[Span], most: int = MOST_SPANS) -> DrawnTimeline:
    """A step of so many seconds in at most so many spans, short neighbours joined as far as that needs."""
    tasks = sorted(spans, key=lambda span: (span.track, span.start))
    shown, shortest = tasks, 0.0
    while len(shown) > most:
        shortest = 2 * shortest or seconds / (4 * most)
        shown = list(_joined(tasks, shortest))
    return DrawnTimeline(seconds=seconds, tracks=tuple(tracks), spans=tuple(shown), joined_below=shortest)


def _drawn(step: PlanTimeline) -> tuple[list[Track], list[Span]]:
    """Tracks that do anything, and every task on them."""
    pipeline, names = step.pipeline, step.pipeline.describe()
    kinds = [action.kind for actions in pipeline.order.ranks for action in actions]
    streams, lanes = pipeline.streams(), len(pipeline.lanes)
    stream, action = pipeline.tasks.stream.tolist(), pipeline.action_of_task.tolist()
    start, finish = step.timeline.start.tolist(), step.timeline.finish.tolist()
    running = [k for k, at in enumerate(start) if finish[k] > at]
    place = {track: number for number, track in enumerate(sorted({stream[k] for k in running}))}
    tracks = [Track(rank=t // lanes, lane=streams[t][1], is_device=t % lanes == 0) for t in place]
    spans = [
        Span(
            track=place[stream[k]],
            start=start[k],
            seconds=finish[k] - start[k],
            name=names[k].strip(),
            action=kinds[action[k]] if action[k] >= 0 else "",
        )
        for k in running
    ]
    return tracks, spans


def _joined(spans: Sequence[Span], shortest: float) -> Iterator[Span]:
    """Neighbours of one pass without a gap as long as `shortest` between them, until together they are that long."""
    group: list[Span] = []

    def joined() -> Span:
        first, last = group[0], group[-1]
        tasks = sum(span.tasks for span in group)
        return Span(
            track=first.track, start=first.start, seconds=last.start + last.seconds - first.start,
            name=first.name if tasks == 1 else f"{first.name} … {last.name}", action=first.action, tasks=tasks,
        )  # fmt: skip

    for before, span in pairwise([None, *spans]):
        if before is not None and span is not None:
            same = (before.track, before.action) == (span.track, span.action)
            near = span.start - (before.start + before.seconds) < shortest
            short = span.seconds < shortest and before.start + before.seconds - group[0].start < shortest
            if not (same and near and short):
                yield joined()
                group = []
        if span is not None:
            group.append(span)
    if group:
        yield joined()


def _sent(plan: Plan, stages: Sequence[CapturedModel], *, on_host: bool) -> Iterator[SentInAStep]:
    """Of a rank of each stage mesh: the first one."""
    for rank in range(plan.pipeline):
        sent = sent_by_rank(stages, plan, plan.stages_of(rank), 0, on_host=on_host)
        for (kind, axes), (calls, nbytes) in sorted(sent.items()):
            yield SentInAStep(rank=rank, kind=kind, over=axes, calls=calls, nbytes=nbytes)
