"""What does a plan cost, exactly, on the whole unfolded graph? Seconds by kind and bytes by kind at the peak moment."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autopar.cluster import Cluster
from autopar.graph import CapturedModel
from autopar.lower.copies import running
from autopar.lower.fused import Fused, find_fused, fused_messages
from autopar.lower.holding import MEMORY_KINDS
from autopar.lower.journeys import (
    Journey,
    make_journeys,
    parameters_journeys,
    regathered,
    splits_parameters,
)
from autopar.lower.live import Live
from autopar.lower.program import Program, Tensor, make_program
from autopar.lower.replays import Replays, Value, find_replays
from autopar.placement import Layout
from autopar.plan import ONCE_A_STEP, Estimate, Plan
from autopar.redistribution import Step
from autopar.search.costs.beside import beside_seconds
from autopar.search.costs.late import late_seconds
from autopar.search.costs.pricing import Pricer, Timed, make_pricer

KINDS = ("forward", "backward", "recompute", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "optimizer")


def evaluate(plan: Plan, captured: CapturedModel, cluster: Cluster) -> Estimate:
    """Seconds of one step and memory at its peak. Seconds add up, but for what runs beside compute (`hidden`)."""
    program = make_program(captured)
    return evaluate_program(plan, program, make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config))


def evaluate_program(plan: Plan, program: Program, pricer: Pricer) -> Estimate:
    """`evaluate` for a program and prices at hand; other fields of the plan's estimate stay as they are."""
    plan, program = running(plan, program)
    journeys = make_journeys(program, plan, pricer.target)
    replays = find_replays(plan, program, pricer.target, journeys)
    seconds = _summed(_charges(plan, program, pricer, journeys, replays))
    saved, saved_by_ways = _saved(plan, program, pricer, journeys, replays)
    live = Live(plan, program, pricer.target, journeys, replays).bytes
    peak = int(np.argmax(np.sum(list(live.values()), axis=0)))
    memory = {kind: float(live[kind][peak]) for kind in MEMORY_KINDS}
    hidden = 0.0
    if program.copies > 1:
        hidden = sum(seconds.values()) + saved - _beside(plan, program, pricer)
    elif plan.buckets and plan.microbatches == 1:
        groups = dict.fromkeys(find_fused(plan, journeys).values())
        hidden = late_seconds(plan, program, pricer, journeys, groups)
    return replace(
        plan.estimate,
        seconds=seconds,
        hidden=hidden,
        saved=saved,
        saved_by_ways=saved_by_ways,
        memory=memory,
        rates=pricer.rates.name,
    )


def _beside(plan: Plan, program: Program, pricer: Pricer) -> float:
    """Seconds of a step of two micro-batches at once, every collective in a message of its own."""
    plan = replace(plan, ways={}, buckets=())
    return beside_seconds(plan, program, pricer, find_live(plan, program, pricer))


def _saved(
    plan: Plan, program: Program, pricer: Pricer, journeys: Mapping[str, Journey], replays: Replays
) -> tuple[float, float]:
    """Seconds that parameters' buckets and ways save, and those of them that ways alone do; all else costs the same."""

    def of_parameters(other: Plan) -> float:
        own = parameters_journeys(program, other, pricer.target)
        every = {**journeys, **own}
        is_again = "use" in other.lifetimes.values()  # else backward asks for no parameter's way
        again = find_replays(other, program, pricer.target, every) if is_again else replays
        return sum(charge.seconds for charge in _charges_of_ways(other, program, pricer, every, again, own))

    if not plan.buckets and not plan.ways:
        return 0.0, 0.0
    total = of_parameters(plan)
    unmerged = of_parameters(replace(plan, ways={})) if plan.ways else total
    alone = of_parameters(replace(plan, ways={}, buckets=())) if plan.buckets else unmerged
    return alone - total, unmerged - total


def _summed(charges: "Iterable[Charge]") -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    for charge in charges:
        seconds[charge.kind] += charge.seconds
    return seconds


def find_live(plan: Plan, program: Program, pricer: Pricer, sent: Mapping[str, Layout] = MappingProxyType({})) -> Live:
    """Bytes at every moment, by kind; of a pipeline's stage `sent` says how the next takes what it sends."""
    plan, program = running(plan, program)
    journeys = make_journeys(program, plan, pricer.target, sent)
    return Live(plan, program, pricer.target, journeys, find_replays(plan, program, pricer.target, journeys))


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds of a step that an op or a tensor's way takes; `axes` are those that a collective joins, `backward` tells
    in which pass it runs (what is paid once a step, before or after the micro-batches, too)."""

    kind: str
    name: str
    seconds: float
    axes: tuple[int, ...] = ()
    backward: bool = False


def itemised(
    plan: Plan, program: Program, pricer: Pricer, sent: Mapping[str, Layout] = MappingProxyType({})
) -> tuple[list[Charge], Live]:
    """What `evaluate_program` adds up; of a pipeline's stage `sent` says how the next takes what it sends."""
    plan, program = running(plan, program)
    journeys = make_journeys(program, plan, pricer.target, sent)
    replays = find_replays(plan, program, pricer.target, journeys)
    charges = _charges(plan, program, pricer, journeys, replays)
    return list(charges), Live(plan, program, pricer.target, journeys, replays)


def charges_of(plan: Plan, program: Program, pricer: Pricer) -> list[Charge]:
    """The seconds of `itemised`, and no bytes."""
    plan, program = running(plan, program)
    journeys = make_journeys(program, plan, pricer.target)
    return list(_charges(plan, program, pricer, journeys, find_replays(plan, program, pricer.target, journeys)))


def peak_nbytes(plan: Plan, program: Program, pricer: Pricer) -> float:
    """Most bytes at once, and nothing of what a step takes."""
    live = find_live(plan, program, pricer).bytes
    return float(np.sum(list(live.values()), axis=0).max())


def peak_without_optimizer(plan: Plan, captured: CapturedModel, cluster: Cluster) -> float:
    """Most bytes at once in forward and backward of a step before which the optimizer has no state."""
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    live = find_live(plan, make_program(captured), pricer).bytes
    return float(np.sum([nbytes for kind, nbytes in live.items() if kind != "optimizer"], axis=0).max())


def _charges(
    plan: Plan, program: Program, pricer: Pricer, journeys: Mapping[str, Journey], replays: Replays
) -> Iterator[Charge]:
    yield from _charges_of_ops(plan, program, pricer, journeys, replays)
    yield from _charges_of_ways(plan, program, pricer, journeys, replays, journeys)


def _sent(name: str, timed: Timed, times: int, *, backward: bool = True) -> Iterator[Charge]:
    return (Charge(kind, name, duration * times, axes, backward) for kind, duration, axes in timed)


def _stepped(tensor: Tensor, step: Step, plan: Plan, pricer: Pricer) -> tuple[Timed, Timed]:
    share = pricer.share(tensor, plan.lifetimes.get(tensor.name, ""))
    return pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter", share)


def _charges_of_ops(
    plan: Plan, program: Program, pricer: Pricer, journeys: Mapping[str, Journey], replays: Replays
) -> Iterator[Charge]:
    """What computes, what ops send themselves, and what is run again."""
    parts = plan.microbatches
    for op in program.ops:
        price = pricer.op(op, plan.choices[op.name])
        yield Charge("forward", op.name, price.forward * parts)
        yield Charge("backward", op.name, price.backward * parts, backward=True)
        yield from _sent(op.name, price.forward_sent, parts, backward=False)
        yield from _sent(op.name, price.backward_sent, parts)
        if op.position in replays.ops:
            yield Charge("recompute", op.name, pricer.again(op, price) * parts, backward=True)
            yield from _sent(op.name, price.forward_sent, parts)
    for (name, _), (step, _) in replays.steps.items():
        yield from _sent(name, _stepped(journeys[name].tensor, step, plan, pricer)[0], parts)


def _charges_of_ways(
    plan: Plan,
    program: Program,
    pricer: Pricer,
    journeys: Mapping[str, Journey],
    replays: Replays,
    names: Iterable[str],
) -> Iterator[Charge]:
    """How the tensors of these names travel, those in one message among them, and what updates parameters."""
    parts = plan.microbatches
    fused = find_fused(plan, journeys)
    groups = dict.fromkeys(fused.values())

    def together(group: Fused, *, backward: bool, again: bool = False) -> Iterator[Charge]:
        for number, message in enumerate(fused_messages(group, plan, journeys, backward=backward and not again)):
            seconds = pricer.message(message.kind, message.axes, message.nbytes, True)[0]
            seconds += 0.0 if number else pricer.rates.copied_seconds(message.nbytes)
            seconds /= len(group.values)
            for name, _ in group.values:
                times = 1 if plan.lifetimes.get(name) in ONCE_A_STEP else parts
                yield Charge(message.kind, name, seconds * times, message.axes, backward)

    for group in groups:
        yield from together(group, backward=False)
        yield from together(group, backward=True)
    splits = splits_parameters(plan, journeys, pricer.target)
    for name in names:
        journey = journeys[name]
        tensor = journey.tensor
        times = 1 if plan.lifetimes.get(name) in ONCE_A_STEP else parts
        for target, step in journey.made.items():
            if (name, target) in fused:
                continue
            forward, backward = _stepped(tensor, step, plan, pricer)
            yield from _sent(name, forward, times, backward=False)
            if target in journey.in_backward:
                yield from _sent(name, backward, times)
        if tensor.kind == "parameter" and tensor.requires_grad:
            seconds = pricer.optimizer_seconds(tensor, journey.source, beside_split=splits)
            yield Charge("optimizer", name, seconds, backward=True)
    again = _gathered_again(plan, journeys, replays, fused)
    for name, step in dict.fromkeys(again) if pricer.in_buckets else again:  # in a bucket once for all uses
        yield from _sent(name, _stepped(journeys[name].tensor, step, plan, pricer)[0], parts)
    for group in _groups_again(plan, journeys, replays, fused):
        yield from together(group, backward=True, again=True)


def _gathered_again(
    plan: Plan, journeys: Mapping[str, Journey], replays: Replays, fused: Mapping[Value, Fused]
) -> Iterator[tuple[str, Step]]:
    """Gathers that backward makes alone, one for each use, and those that a group gathered again reads."""
    for value, uses in replays.uses.items():
        for step in _alone(value, plan, journeys, fused):
            yield from ((value[0], step) for _ in uses)
    for group in _groups_again(plan, journeys, replays, fused):
        for name, layout in group.values:
            for step in _alone((name, journeys[name].made[layout].source), plan, journeys, fused):
                yield name, step


def _alone(value: Value, plan: Plan, journeys: Mapping[str, Journey], fused: Mapping[Value, Fused]) -> Iterator[Step]:
    """Steps alone that remake a value, back to one of a group."""
    if plan.lifetimes.get(value[0]) == "use":
        for step in regathered(journeys[value[0]].path(value[1])):
            if (value[0], step.target) in fused:
                return
            yield step


def _groups_again(
    plan: Plan, journeys: Mapping[str, Journey], replays: Replays, fused: Mapping[Value, Fused]
) -> Iterable[Fused]:
    """Groups that backward gathers again: each once."""
    found: dict[Fused, None] = {}
    waiting = [value for value, uses in replays.uses.items() if uses]
    while waiting:
        name, layout = waiting.pop()
        if plan.lifetimes.get(name) != "use":
            continue
        for step in regathered(journeys[name].path(layout)):
            group = fused.get((name, step.target))
            if group is not None:
                if group not in found:
                    found[group] = None
                    waiting += [(n, journeys[n].made[v].source) for n, v in group.values]
                break
    return found
