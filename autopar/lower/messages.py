"""What does a step send? Calls and payload bytes by collective and axes, counted before anything runs."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from autopar.lower.events import Event, find_events
from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import make_program
from autopar.lower.split_backward import split_events
from autopar.lower.target import Target
from autopar.passes.split_stages import owners
from autopar.values.graph import CapturedModel
from autopar.values.placement import Layout, local_ranges
from autopar.values.plan import Plan
from autopar.values.schedules import PIPELINE, SPLITTING
from autopar.values.stage_plan import StagePlan

Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(collective, axis names) -> (calls, payload bytes) of one step on one rank."""


def sent_messages(step: LoweredStep, *, splits: bool = False) -> Sent:
    """Everything that forward and backward of all micro-batches send on each rank.

    splits: backward runs in two parts, both of which read what some calls keep.
    """
    found = find_events(step, splits=splits)
    passes: list[Iterable[Event]] = [found.forward, found.backward]
    if splits:
        passes[1:] = split_events(step, found.backward)
    sent: Sent = {}
    names = step.plan.mesh.names
    for event in (event for events in passes for event in events):
        times = 1 if event.once else step.plan.microbatches
        for message in event.messages:
            _add(sent, message.kind, tuple(names[a] for a in message.axes), times, times * message.nbytes)
    return sent


def messages_of(
    captured: CapturedModel,
    plan: StagePlan,
    *,
    on_host: bool,
    exact_random: bool = False,
    sent: Mapping[str, Layout] = MappingProxyType({}),
    splits: bool = False,
) -> Sent:
    """`sent_messages` of a model's plan.

    on_host, exact_random: of the ranks (`Target`).
    sent: of a stage, layouts in which the next takes what it sends.
    """
    target = Target(mesh=plan.mesh, config=plan.config, on_host=on_host, exact_random=exact_random)
    return sent_messages(lower(plan, make_program(captured), target, sent), splits=splits)


def sent_by_rank(
    stages: Sequence[CapturedModel],
    plan: Plan,
    numbers: Iterable[int],
    place: int,
    *,
    on_host: bool,
    exact_random: bool = False,
) -> Sent:
    """What the rank at `place` of a stage mesh sends that runs the stages of these numbers.

    Beside the collectives of its stages:
        send         each micro-batch forward, and the gradient of what a stage received back, to another rank's stage
        all_reduce   over axis `pipeline`: gradients of weights that stages on several ranks share, once a step
    """
    own, sent = set(numbers), Sent()
    for number in sorted(own):
        stage, part = stages[number], plan.stages[number]
        after: Mapping[str, Layout] = plan.stages[number + 1].layouts if number + 1 < len(stages) else {}
        ahead = {name: after[name] for name in stage.sends}
        target = Target(mesh=plan.mesh, config=part.config, on_host=on_host, exact_random=exact_random)
        step = lower(part, make_program(stage), target, ahead)
        for (kind, axes), (calls, nbytes) in sent_messages(step, splits=plan.schedule in SPLITTING).items():
            _add(sent, kind, axes, calls, nbytes)
        times, tensors, rank = plan.microbatches, step.program.tensors, plan.stage_rank(number)
        if number + 1 < plan.num_stages and plan.stage_rank(number + 1) != rank:
            for name, layout in ahead.items():
                _add(sent, "send", (PIPELINE,), times, times * target.local_nbytes(tensors[name], layout))
        for name in stage.received if number and plan.stage_rank(number - 1) != rank else ():
            if tensors[name].requires_grad:
                layout = part.layouts[name]
                _add(sent, "send", (PIPELINE,), times, times * target.local_nbytes(tensors[name], layout))
    for placeholder, sharing in owners(stages).items():
        mine = [number for number in sharing if number in own]
        spec = next(p for p in stages[sharing[0]].parameters if p.placeholder == placeholder)
        if mine and spec.trainable and len({plan.stage_rank(number) for number in sharing}) > 1:
            layout, size = plan.stages[mine[0]].layouts[placeholder], spec.storage.itemsize
            for _, length in local_ranges(spec.shape, layout, plan.mesh, plan.mesh.coordinate(place)):
                size *= length
            _add(sent, "all_reduce", (PIPELINE,), 1, size)
    return sent


def _add(sent: Sent, kind: str, axes: tuple[str, ...], calls: int, nbytes: int) -> None:
    """Adds so many calls of so many bytes together."""
    before = sent.get((kind, axes), (0, 0))
    sent[kind, axes] = before[0] + calls, before[1] + nbytes
