"""Which bytes does a rank of a pipeline hold at its peak? A walk over its schedule, pass by pass.

A pass holds what `lower.live` counts of one micro-batch of its stage. Beside it are, of every stage of the rank,

    always      parameters, what lives for the step, the step's inputs (whole: every rank takes the global batch) and
                `received`: torch's buffers for what a stage gets of every micro-batch, forward and back
    gradients   from the stage's first backward pass on
    kept        of each micro-batch between its passes: what backward reads, and what was sent
    left        where backward has two parts, between them: kept, replayed, and gradients that the first part notes
    sent        what went to another rank, held by the handle of its message: gpipe, interleaved-1f1b and zbv wait for
                all of them when the step ends; 1f1b holds a gradient until it has the next, and of the passes before
                its first one back the last but one's to the end of its steady phase

and, with the optimizer, its state. Neighbouring stages on one rank put what they hand over in place of the buffers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from autopar.cost_models.memory import optimizer_state_nbytes
from autopar.cost_models.schedules import Action, PipelineOrder, make_order
from autopar.lower.holding import LEAVES, MEMORY_KINDS, Holding
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.search.costs.evaluate import peak_without_optimizer
from autopar.search.costs.pricing import make_pricer
from autopar.search.graph.strategy_graph import Floats
from autopar.search.staged.split_passes import NO_PARTS, split_passes
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.placement import local_shape
from autopar.values.plan import Plan
from autopar.values.schedules import SPLITTING

STAGED_KINDS = (*MEMORY_KINDS, "received", "sent")
_AT_WORK = np.array([kind != "gradients" for kind in STAGED_KINDS], dtype=np.float64)
"""Of what stages share: each adds up gradients of its own until the step ends."""

WAITS_AT_END = ("gpipe", "interleaved-1f1b", "zbv")
"""Schedules that keep the handles of their messages, and with them what was sent, to the end of the step."""


Held = tuple[Action | None, Floats]
"""Bytes by kind (`STAGED_KINDS`) at the peak of an action; None: between two of them, before or after all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes of one stage on one rank by kind (`STAGED_KINDS`).

    early: what the first of two parts of a backward pass makes of the gradients. passes: at the peak of an action, what
    its micro-batch keeps included; first: of the first, which makes gradients instead of adding to them. opening,
    closing: beside what is always there, while once a step parameters are gathered and their gradients reduced. update:
    what is there when the optimizer runs. Of one micro-batch `ends` is sent and `given` sent back, `copied` by a
    backward pass in two parts, for then what passes through is a copy; `taken` and `answered` are received, forward and
    back.
    """

    always: Floats
    gradients: Floats
    early: Floats
    opening: Floats
    closing: Floats
    update: Floats
    passes: Mapping[str, Floats]
    first: Mapping[str, Floats]
    kept: Floats
    left: Floats
    ends: float
    given: float
    copied: float
    taken: float
    answered: float

    def alone(self, microbatches: int) -> dict[str, float]:
        """Bytes by kind at the peak of a step that has one micro-batch in flight at a time."""
        buffers = _vector("received", microbatches * (self.taken + self.answered))
        most = _larger(_larger(self.passes["F"], self.passes["B"]), self.closing)
        fullest = self.always + self.state + buffers + self.gradients + most
        return dict(zip(STAGED_KINDS, _larger(fullest, self.update + buffers).tolist(), strict=True))

    @property
    def in_flight(self) -> float:
        """What each further micro-batch in flight adds."""
        return float(self.kept.sum())

    @property
    def state(self) -> Floats:
        """The optimizer's."""
        return _vector("optimizer", float(self.update[STAGED_KINDS.index("optimizer")]))


def stage_memory(live: Live, stage: CapturedModel, *, splits: bool = True) -> StageMemory:
    """What `live` counts of a stage, by pass. splits: backward may have two parts, else nothing is said of them."""
    turn, end = len(live.calls), live.end
    inputs = {spec.placeholder for spec in stage.inputs}
    fixed = [h for h in live.holdings if h.role == "fixed" and h.name not in inputs]
    gradients = [h for h in fixed if h.kind == "gradients" and h.first == 0]
    once = [h for h in live.holdings if h.role == "once"]
    moving = [h for h in live.holdings if h.role not in ("fixed", "once")] + list(_copied_inputs(live, stage))
    forward, back = [h for h in moving if h.first < turn], [h for h in moving if h.last >= turn]
    kept = [h for h in forward if h.last >= turn]
    parts = split_passes(live, kept, back) if splits else NO_PARTS
    received = [live.redistributed[name] for name in stage.received]
    taken = [live.target.local_nbytes(j.tensor, j.source) for j in received]
    parts_of = {"B": back, "I": parts.first, "W": parts.second}
    early = {h.name for h in parts.first if h.role in LEAVES}
    again = {kind: [h for h in part if h.role != "copy"] for kind, part in parts_of.items()}
    return StageMemory(
        always=_summed(h for h in fixed if h.kind not in ("gradients", "optimizer")),
        gradients=_summed(gradients),
        early=_summed(h for h in gradients if h.name in early),
        opening=_peak((h for h in once if h.last < turn), 0, turn),
        closing=_peak((h for h in once if h.first >= turn), turn, end),
        update=_summed(h for h in fixed if h.last == end),
        passes={"F": _peak(forward, 0, turn)} | {kind: _peak(part, turn, end) for kind, part in again.items()},
        first={kind: _peak(_staying(live, part), turn, end) for kind, part in parts_of.items()},
        kept=_summed(kept),
        left=_summed(parts.left),
        ends=float(sum(live.ends.values())),
        given=float(_returned(live, stage)),
        copied=parts.returned,
        taken=float(sum(taken)),
        answered=float(sum(_answered(live, stage))),
    )


def held_in_actions(
    actions: Sequence[Action],
    stages: Mapping[int, StageMemory],
    batch_nbytes: float,
    schedule: str,
    *,
    with_optimizer: bool,
    again: Floats,
) -> Iterator[Held]:
    """What a rank that runs `actions` of `stages` (by number) holds at the peak of each, and between them.

    batch_nbytes: of the global batch. with_optimizer: with the optimizer's state, which is there from the second step.
    again: what of the stages' `update` is the same storage in several of them (gradients are summed for it).
    """
    count = 1 + max(action.microbatch for action in actions)
    live = _vector("inputs", batch_nbytes) - again * _AT_WORK
    live = live + sum(s.always + s.state if with_optimizer else s.always for s in stages.values())
    live = live + _vector("received", count * sum(s.taken + s.answered for s in stages.values()))
    for stage in stages.values():
        yield None, live + stage.opening
    returned = {n: s.copied if schedule in SPLITTING else s.given for n, s in stages.items()}
    waits, begun = schedule in WAITS_AT_END, set[tuple[int, str]]()
    warmup = next(i for i, action in enumerate(actions) if action.kind != "F")
    started, over = warmup - 2, len(actions) // 2 - warmup
    for action in actions:
        number, kind, microbatch = action
        own, before, after = stages[number], stages.get(number - 1), stages.get(number + 1)
        if kind == "F":
            yield action, live + own.passes["F"]
            live = live + own.kept - _vector("received", after.taken if after else 0.0)  # what is sent is there instead
            continue
        is_first = (number, kind) not in begun
        begun.add((number, kind))
        live = live - (own.left if kind == "W" else own.kept)
        yield action, live + (own.first if is_first else own.passes)[kind]
        if is_first:
            live = live + {"B": own.gradients, "I": own.early, "W": own.gradients - own.early}[kind]
        if kind == "I":
            live = live + own.left
        elif after:
            live = live + _vector("activations", own.ends)
        if kind != "W" and before:
            live = live + _vector("received", returned[number] - before.answered)
        if kind != "I" and waits and not after:
            live = live + _vector("sent", own.ends)
        if schedule == "1f1b" and 0 <= started < over and microbatch in (started, over):
            live = live + _vector("sent", own.ends if microbatch == started else -own.ends)
        if kind != "W" and not before and (waits or is_first):
            live = live + _vector("sent", returned[number])
        yield None, live  # what is noted and sent back too has been copied
    for stage in stages.values():
        yield None, live + stage.closing
    received = [stages[n - 1].ends if n - 1 in stages else s.taken for n, s in stages.items()]
    received += [returned[n + 1] if n + 1 in stages else s.answered for n, s in stages.items()]
    update = sum((s.update if with_optimizer else s.update - s.state for s in stages.values()), start=-again)
    yield None, _vector("inputs", batch_nbytes) + _vector("received", count * sum(received)) + update


def rank_memories(
    plan: Plan,
    stages: Sequence[CapturedModel],
    order: PipelineOrder,
    memories: Sequence[StageMemory],
    *,
    with_optimizer: bool = True,
) -> list[dict[str, float]]:
    """Bytes by kind at the peak of every pipeline rank, for the memory of each stage."""
    held = _held(plan, stages, order, memories, with_optimizer)
    return [dict(zip(STAGED_KINDS, _most(of_rank).tolist(), strict=True)) for of_rank in held]


def _held(
    plan: Plan,
    stages: Sequence[CapturedModel],
    order: PipelineOrder,
    memories: Sequence[StageMemory],
    with_optimizer: bool,
) -> Iterator[Iterator[Held]]:
    """`held_in_actions` of every pipeline rank."""
    inputs = {
        spec.placeholder: spec for stage in stages for spec in stage.inputs if spec.placeholder not in stage.received
    }
    batch = sum(
        math.prod(spec.shape) * spec.dtype.itemsize * (plan.microbatches if spec.shape else 1)
        for spec in inputs.values()
    )
    for rank in range(plan.pipeline):
        own = {number: memories[number] for number in plan.stages_of(rank)}
        again = _stored_again(plan, [stages[number] for number in own], with_optimizer)
        yield held_in_actions(order.ranks[rank], own, batch, plan.schedule, with_optimizer=with_optimizer, again=again)


def peaks_without_optimizer(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> list[float]:
    """Most bytes at once of every pipeline rank in a step before which the optimizer has no state.

    cluster: what a stage has.
    """
    if plan.num_stages == 1:
        return [peak_without_optimizer(plan.single, stages[0], cluster)]
    return [sum(kinds.values()) for kinds in held_without_optimizer(plan, stages, cluster)]


def held_without_optimizer(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> list[dict[str, float]]:
    """`peaks_without_optimizer` by kind."""
    order, memories = _order(plan), _memories(plan, stages, cluster)
    return rank_memories(plan, stages, order, memories, with_optimizer=False)


def peaks_of_actions(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> list[list[tuple[Action, float]]]:
    """`peaks_without_optimizer` within each action of every pipeline rank, in their order."""
    held = _held(plan, stages, _order(plan), _memories(plan, stages, cluster), with_optimizer=False)
    return [[(action, float(most.sum())) for action, most in of_rank if action] for of_rank in held]


def held_over_actions(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> list[list[Held]]:
    """What every pipeline rank holds at the peak of each of its actions and between them, in their order.

    cluster: what a stage has.
    """
    held = _held(plan, stages, _order(plan), _memories(plan, stages, cluster), with_optimizer=True)
    return [list(of_rank) for of_rank in held]


def _order(plan: Plan) -> PipelineOrder:
    return make_order(plan.schedule, plan.pipeline, plan.microbatches, plan.num_stages // plan.pipeline)


def _memories(plan: Plan, stages: Sequence[CapturedModel], cluster: Cluster) -> list[StageMemory]:
    memories = []
    for number, stage in enumerate(stages):
        after = plan.stages[number + 1].layouts if number + 1 < len(stages) else {}
        pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
        sent = {name: after[name] for name in stage.sends}
        step = lower(plan.stages[number], make_program(stage), pricer.target, sent)
        memories.append(stage_memory(Live(step), stage, splits=plan.schedule in SPLITTING))
    return memories


def _stored_again(plan: Plan, stages: Sequence[CapturedModel], with_optimizer: bool) -> Floats:
    """Of parameters that several stages of a rank share, what each stage after the first counts again."""
    out, seen = np.zeros(len(STAGED_KINDS)), set[str]()
    layouts = {name: layout for stage in plan.stages for name, layout in stage.layouts.items()}
    for spec in (spec for stage in stages for spec in stage.parameters):
        if spec.placeholder in seen:
            elements = math.prod(local_shape(spec.shape, layouts[spec.placeholder], plan.mesh))
            out += _vector("parameters", elements * spec.storage.itemsize)
            if spec.trainable:
                out += _vector("gradients", elements * spec.storage.itemsize)
                state = optimizer_state_nbytes(plan.config.optimizer, spec.storage.itemsize)
                out += _vector("optimizer", elements * state if with_optimizer else 0.0)
        seen.add(spec.placeholder)
    return out


def _copied_inputs(live: Live, stage: CapturedModel) -> Iterator[Holding]:
    """This rank's parts of inputs that are no rows of the batch, which are copied."""
    for spec in stage.inputs[: len(stage.inputs) - len(stage.received)]:
        one = live.redistributed[spec.placeholder]
        if any(dim > 0 for dim in one.source.sharded_dims()):
            savers = live.recomputation.uses.get((spec.placeholder, one.source), ())
            last = max((live.backward[live.at[p]] for p in savers), default=len(live.calls) - 1)
            yield Holding("inputs", spec.placeholder, live.target.local_nbytes(one.tensor, one.source), 0, last)


def _answered(live: Live, stage: CapturedModel) -> Iterator[int]:
    """Bytes of the gradients that come back for what a micro-batch sends."""
    for name in stage.sends:
        one = live.redistributed[name]
        if one.tensor.requires_grad:
            yield from (live.target.local_nbytes(one.tensor, layout) for p, _, layout in one.wanted if p < 0)


def _returned(live: Live, stage: CapturedModel) -> int:
    """Bytes of gradients that a micro-batch makes a stage send back: zeros where there is none."""
    found = {name: gradient for (name, _), gradient in live.gradients().held.items()}
    wanted = [live.redistributed[name] for name in stage.received if live.redistributed[name].tensor.requires_grad]
    zeros = [live.target.local_nbytes(j.tensor, j.source) for j in wanted if j.tensor.name not in found]
    made = {id(found[j.tensor.name]): found[j.tensor.name].nbytes for j in wanted if j.tensor.name in found}
    return sum(zeros) + sum(made.values())


def _staying(live: Live, holdings: Iterable[Holding]) -> list[Holding]:
    """The same with gradients of parameters that stay, as wide as they are stored."""
    out = []
    for holding in holdings:
        if holding.role in LEAVES:
            tensor = live.redistributed[holding.name].tensor
            nbytes = holding.nbytes / tensor.element_size * tensor.stored_size
            out.append(replace(holding, kind="gradients", nbytes=nbytes, last=live.end - 1))
        else:
            out.append(holding)
    return out


def _most(held: Iterable[Held]) -> Floats:
    return reduce(_larger, (most for _, most in held))


def _vector(kind: str, nbytes: float) -> Floats:
    out = np.zeros(len(STAGED_KINDS))
    out[STAGED_KINDS.index(kind)] = nbytes
    return out


def _summed(holdings: Iterable[Holding]) -> Floats:
    out = np.zeros(len(STAGED_KINDS))
    for holding in holdings:
        out[STAGED_KINDS.index(holding.kind)] += holding.nbytes
    return out


def _peak(holdings: Iterable[Holding], first: int, end: int) -> Floats:
    """The moment of most bytes in `[first, end)`; nothing in a stage of no ops."""
    if first == end:
        return np.zeros(len(STAGED_KINDS))
    changes = np.zeros((end + 1, len(STAGED_KINDS)))
    for holding in holdings:
        kind = STAGED_KINDS.index(holding.kind)
        changes[max(holding.first, first), kind] += holding.nbytes
        changes[min(holding.last + 1, end), kind] -= holding.nbytes
    moments = np.cumsum(changes[:end], axis=0)
    return np.array(moments[int(moments.sum(axis=1).argmax())])


def _larger(a: Floats, b: Floats) -> Floats:
    return a if a.sum() >= b.sum() else b
