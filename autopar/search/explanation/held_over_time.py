"""How many bytes of which kind does a rank hold, second by second of its step?

Of a plan of one stage the seconds are those of `search.costs.evaluate`, everything in turn, of one micro-batch and the
optimizer's step: `lower.live` counts the last of several. Of several stages they are the timeline's, and bytes those at
the peak of each action. A curve has at most `MOST_MOMENTS` moments: of neighbours the fullest stands for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopar.lower.events import Event, find_events
from autopar.lower.live import Live
from autopar.lower.lowered_step import LoweredStep
from autopar.search.costs.event_prices import EventPrices
from autopar.search.costs.ledger import moment_text
from autopar.search.costs.pricing import Pricer
from autopar.search.staged.staged_memory import STAGED_KINDS, held_over_actions
from autopar.search.timeline.plan_timeline import PlanTimeline
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.step_picture import HeldOverTime

MOST_MOMENTS = 600
"""As many as a wide screen has columns for; with half as many, short peaks look twice as wide."""

Floats = npt.NDArray[np.float64]


def held_of_step(step: LoweredStep, live: Live, pricer: Pricer) -> HeldOverTime:
    """Of a plan of one stage."""
    spent = seconds_of_moments(step, pricer)
    starts = np.concatenate([[0.0], np.cumsum(spent)[:-1]])
    kinds = {kind: np.asarray(nbytes) for kind, nbytes in live.bytes.items()}
    shown = _shown(sum(kinds.values(), start=np.zeros(len(spent))), MOST_MOMENTS)
    axis = "one micro-batch of the step, everything in turn" if step.is_one_of_several else "step, everything in turn"
    what = [moment_text(live, int(moment)) for moment in shown]
    return replace(
        _curve(axis, kinds, shown), at=tuple(starts[shown].tolist()), end=float(spent.sum()), what=tuple(what)
    )


def seconds_of_moments(step: LoweredStep, pricer: Pricer) -> Floats:
    """What each moment of a micro-batch takes, everything in turn; they add up to its forward and backward pass and to
    what is paid once a step."""
    found, prices = find_events(step), EventPrices(step, pricer)

    def taken(event: Event) -> float:
        return sum(seconds for _, seconds, _ in prices.sent(event)) if event.messages else prices.computed(event)

    spent, moment = np.zeros(step.end + 1), 0
    for event in found.forward:
        moment = max(moment, event.call)
        spent[moment] += taken(event)
    for event in found.backward:
        moments = step.replay if event.again else step.backward
        moment = max(moment, moments.get(event.call, len(step.calls)))
        spent[moment] += taken(event)
    spent[step.end] += sum(map(taken, found.update))
    return spent


def held_in_stages(
    plan: Plan, stages: Sequence[CapturedModel], part: Cluster, timeline: PlanTimeline
) -> list[HeldOverTime]:
    """Of every pipeline rank; part: what a stage has of the cluster."""
    pipeline, start = timeline.pipeline, timeline.timeline.start
    actions = [action for of_rank in pipeline.order.ranks for action in of_rank]
    begins = np.full(len(actions), np.inf)
    ends = np.zeros(len(actions))
    of_action = pipeline.action_of_task >= 0
    np.minimum.at(begins, pipeline.action_of_task[of_action], start[of_action])
    np.maximum.at(ends, pipeline.action_of_task[of_action], timeline.timeline.finish[of_action])
    curves, number = [], 0
    for rank, held in enumerate(held_over_actions(plan, stages, part)):
        at, what, now, said = list[float](), list[str](), 0.0, "before the first pass"
        for action, _ in held:
            if action is not None:
                at.append(float(begins[number]))
                what.append(str(action))
                now, said, number = float(ends[number]), f"after {action}", number + 1
            else:
                at.append(now)
                what.append(said)
        what[-1] = "the optimizer's step"
        table = np.array([most for _, most in held])
        kinds = {kind: table[:, column] for column, kind in enumerate(STAGED_KINDS)}
        shown = _shown(table.sum(axis=1), MOST_MOMENTS)
        curve = _curve("step", kinds, shown)
        own = tuple(at[moment] for moment in shown), tuple(what[moment] for moment in shown)
        curves.append(replace(curve, rank=rank, at=own[0], what=own[1], end=timeline.seconds))
    return curves


def _curve(axis: str, kinds: Mapping[str, Floats], shown: npt.NDArray[np.int64]) -> HeldOverTime:
    """The bytes of a curve; whoever asks knows the seconds."""
    total = sum((nbytes[shown] for nbytes in kinds.values()), start=np.zeros(len(shown)))
    return HeldOverTime(
        rank=0,
        axis=axis,
        at=(),
        end=0.0,
        what=(),
        kinds={kind: tuple(nbytes[shown].tolist()) for kind, nbytes in kinds.items() if nbytes.any()},
        peak=int(total.argmax()),
    )


def _shown(total: Floats, most: int) -> npt.NDArray[np.int64]:
    """Moments that stand for their neighbours: the fullest, the first of several, of each of `most` runs."""
    edges = np.linspace(0, len(total), min(most, len(total)) + 1).astype(np.int64)
    return np.array([a + int(total[a:b].argmax()) for a, b in pairwise(edges)], dtype=np.int64)
