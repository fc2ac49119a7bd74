"""What does a plan cost, exactly, on the whole unfolded graph? Seconds by kind and bytes by kind at the peak moment.

Moments: the forward of each op in graph order, their backward in reverse, the optimizer's step. Live then are
    parameters, optimizer   storage of parameters and their optimizer state, always
    gradients               in storage layout, from the first backward that makes one to the end; with several
                            micro-batches from the beginning, and in each layout in use if they are reduced once a step
    activations             what autograd saves or a replay reads, from its making, or its replay, to its last use in
                            backward (`search.replays`); views share storage
    gathered                copies of parameters: for the step, kept to backward, or (`use`) only while an op reads them
    working                 operands and results of the op that runs, if they are not saved; in backward gradients
    inputs                  inputs, buffers and constants, with the layouts of them that are saved, always
A tensor that nothing saves is counted while its producer and its readers run, not in between.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import Cluster
from autopar.graph import CapturedModel
from autopar.placement import Layout
from autopar.plan import ONCE_A_STEP, Estimate, Plan
from autopar.redistribution import Step
from autopar.search.journeys import Journey, make_journeys
from autopar.search.moments import Moments
from autopar.search.pricing import Pricer, Timed
from autopar.search.program import Program, Tensor, make_program
from autopar.search.replays import Replays, find_replays
from autopar.search.strategy_graph import Floats

KINDS = ("forward", "backward", "recompute", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "optimizer")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "inputs")


def evaluate(plan: Plan, captured: CapturedModel, cluster: Cluster) -> Estimate:
    """Seconds of one step and memory at its peak; nothing is overlapped, seconds add up."""
    program = make_program(captured)
    return evaluate_program(plan, program, Pricer(mesh=plan.mesh, cluster=cluster, config=plan.config))


def evaluate_program(plan: Plan, program: Program, pricer: Pricer) -> Estimate:
    """`evaluate` for a program and prices at hand; other fields of the plan's estimate stay as they are."""
    journeys = make_journeys(program, plan, pricer)
    replays = find_replays(plan, program, pricer, journeys)
    seconds = dict.fromkeys(KINDS, 0.0)
    for charge in _charges(plan, program, pricer, journeys, replays):
        seconds[charge.kind] += charge.seconds
    live = _memory(plan, program, pricer, journeys, replays)
    peak = int(np.argmax(sum(live.values())))
    memory = {kind: float(live[kind][peak]) for kind in MEMORY_KINDS}
    return replace(plan.estimate, seconds=seconds, memory=memory, rates=pricer.rates.name)


def live_nbytes(plan: Plan, program: Program, pricer: Pricer) -> dict[str, Floats]:
    """Bytes at every moment of `search.moments`, by kind."""
    journeys = make_journeys(program, plan, pricer)
    return _memory(plan, program, pricer, journeys, find_replays(plan, program, pricer, journeys))


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds of a step that an op or a tensor's way takes; `axes` are those that a collective joins."""

    kind: str
    name: str
    seconds: float
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that an op or a tensor holds over an interval of moments."""

    kind: str
    name: str
    nbytes: float
    interval: slice


def itemised(plan: Plan, program: Program, pricer: Pricer) -> tuple[list[Charge], list[Holding]]:
    """What `evaluate_program` adds up."""
    journeys = make_journeys(program, plan, pricer)
    replays = find_replays(plan, program, pricer, journeys)
    charges = _charges(plan, program, pricer, journeys, replays)
    return list(charges), list(_holdings(plan, program, pricer, journeys, replays))


def _charges(
    plan: Plan, program: Program, pricer: Pricer, journeys: dict[str, Journey], replays: Replays
) -> Iterator[Charge]:
    parts = plan.microbatches

    def sent(name: str, timed: Timed, times: int = parts) -> Iterator[Charge]:
        return (Charge(kind, name, duration * times, axes) for kind, duration, axes in timed)

    def stepped(tensor: Tensor, step: Step) -> tuple[Timed, Timed]:
        return pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter")

    for op in program.ops:
        price = pricer.op(op, plan.choices[op.name])
        yield Charge("forward", op.name, price.forward * parts)
        yield Charge("backward", op.name, price.backward * parts)
        yield from sent(op.name, price.forward_sent)
        yield from sent(op.name, price.backward_sent)
        if op.position in replays.ops:
            yield Charge("recompute", op.name, price.forward * parts)
            yield from sent(op.name, price.forward_sent)
    for (name, _), (step, _) in replays.steps.items():
        yield from sent(name, stepped(journeys[name].tensor, step)[0])
    for name, journey in journeys.items():
        tensor = journey.tensor
        times = 1 if plan.lifetimes.get(name) in ONCE_A_STEP else parts
        for target, step in journey.made.items():
            forward, backward = stepped(tensor, step)
            yield from sent(name, forward, times)
            if target in journey.in_backward:
                yield from sent(name, backward, times)
        if tensor.kind == "parameter" and tensor.requires_grad:
            yield Charge("optimizer", name, pricer.optimizer_seconds(tensor, journey.source))
    for (name, layout), uses in replays.uses.items():
        if plan.lifetimes.get(name) == "use":
            for step in regathered(journeys[name].path(layout)):
                for _ in uses:
                    yield from sent(name, stepped(journeys[name].tensor, step)[0])


def regathered(path: list[Step]) -> list[Step]:
    """The gathers that backward repeats to remake the end of `path`: those after the last other computed step."""
    out: list[Step] = []
    for step in reversed(path):
        if step.forward == "all_gather":
            out.append(step)
        elif step.forward:
            break
    return out


def _memory(
    plan: Plan, program: Program, pricer: Pricer, journeys: dict[str, Journey], replays: Replays
) -> dict[str, Floats]:
    """Bytes at every moment, by kind."""
    moments = Moments(num_ops=len(program.ops), several=plan.microbatches > 1)
    live = {kind: moments.nothing() for kind in MEMORY_KINDS}
    for holding in _holdings(plan, program, pricer, journeys, replays):
        live[holding.kind][holding.interval] += holding.nbytes
    return live


def _holdings(
    plan: Plan, program: Program, pricer: Pricer, journeys: dict[str, Journey], replays: Replays
) -> Iterator[Holding]:
    moments = Moments(num_ops=len(program.ops), several=plan.microbatches > 1)
    for op in program.ops:
        price = pricer.op(op, plan.choices[op.name])
        for moment, nbytes in (
            (moments.forward(op.position), price.working_forward),
            (moments.backward(op.position), price.working_backward),
        ):
            yield Holding("working", op.name, nbytes, slice(moment, moment + 1))
        if price.kept:
            again = replays.ops.get(op.position)
            yield Holding("activations", op.name, price.kept, moments.held(op.position, again, op.position))
    inputs: dict[str, set[Layout]] = defaultdict(set)
    for (name, layout), uses in replays.uses.items():
        tensor = journeys[name].tensor
        if tensor.kind == "op":
            assert tensor.producer is not None
            held = moments.held(tensor.producer, replays.first.get((name, layout)), min(uses))
            yield Holding("activations", name, pricer.local_nbytes(tensor, layout), held)
        elif tensor.kind != "parameter":
            inputs[name].add(layout)
    for name, journey in journeys.items():
        tensor = journey.tensor
        if tensor.kind == "parameter":
            yield from _of_parameter(moments, plan.lifetimes[name], program, pricer, journey, replays)
        elif tensor.kind != "op":
            for layout in inputs[name] | {journey.source}:
                yield Holding("inputs", name, pricer.local_nbytes(tensor, layout), moments.always())


def _of_parameter(
    moments: Moments, lifetime: str, program: Program, pricer: Pricer, journey: Journey, replays: Replays
) -> Iterator[Holding]:
    """Storage, state, gradient and the copies in use of one parameter."""
    tensor, name = journey.tensor, journey.tensor.name
    stored = pricer.local_nbytes(tensor, journey.source)
    yield Holding("parameters", name, stored, moments.always())
    readers = [p for p, _, _ in journey.wanted if p >= 0 and program.ops[p].has_backward]
    if tensor.requires_grad and readers:
        yield Holding("optimizer", name, pricer.state_nbytes(tensor, journey.source), moments.always())
        if moments.several and lifetime in ONCE_A_STEP:
            yield Holding("gradients", name, stored, moments.update())
            for layout in {v for p, _, v in journey.wanted if p >= 0 and program.ops[p].has_backward}:
                yield Holding("gradients", name, pricer.local_nbytes(tensor, layout), moments.step())
        else:
            yield Holding("gradients", name, stored, moments.gradient(max(readers)))
    readings: dict[Layout, list[int]] = defaultdict(list)
    for position, _, layout in journey.wanted:
        if position >= 0 and journey.is_copied(layout):
            readings[layout].append(position)
    for layout, positions in readings.items():
        uses = replays.uses.get((name, layout), [])
        nbytes = pricer.local_nbytes(tensor, layout)
        held = "step" if moments.several and lifetime in ONCE_A_STEP else lifetime
        for interval in moments.copies(held, positions, uses):
            yield Holding("gathered", name, nbytes, interval)
