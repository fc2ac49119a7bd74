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
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.cluster import Cluster
from autopar.graph import CapturedModel
from autopar.placement import Layout
from autopar.plan import ONCE_A_STEP, Estimate, Plan
from autopar.redistribution import Step
from autopar.search.journeys import Journey, make_journeys
from autopar.search.moments import Moments
from autopar.search.pricing import Pricer, Timed
from autopar.search.program import Program, make_program
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
    seconds = _seconds(plan, program, pricer, journeys, replays)
    live = _memory(plan, program, pricer, journeys, replays)
    peak = int(np.argmax(sum(live.values())))
    memory = {kind: float(live[kind][peak]) for kind in MEMORY_KINDS}
    return replace(plan.estimate, seconds=seconds, memory=memory, rates=pricer.rates.name)


def live_nbytes(plan: Plan, program: Program, pricer: Pricer) -> dict[str, Floats]:
    """Bytes at every moment of `search.moments`, by kind."""
    journeys = make_journeys(program, plan, pricer)
    return _memory(plan, program, pricer, journeys, find_replays(plan, program, pricer, journeys))


def _seconds(
    plan: Plan, program: Program, pricer: Pricer, journeys: dict[str, Journey], replays: Replays
) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    parts = plan.microbatches

    def add(timed: Timed, times: int = parts) -> None:
        for kind, duration in timed:
            seconds[kind] += duration * times

    for op in program.ops:
        price = pricer.op(op, plan.choices[op.name])
        seconds["forward"] += price.forward * parts
        seconds["backward"] += price.backward * parts
        add(price.forward_sent)
        add(price.backward_sent)
        if op.position in replays.ops:
            seconds["recompute"] += price.forward * parts
            add(price.forward_sent)
    for (name, _), (step, _) in replays.steps.items():
        tensor = journeys[name].tensor
        add(pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter")[0])
    for journey in journeys.values():
        tensor = journey.tensor
        times = 1 if plan.lifetimes.get(tensor.name) in ONCE_A_STEP else parts
        for target, step in journey.made.items():
            forward, backward = pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter")
            add(forward, times)
            if target in journey.in_backward:
                add(backward, times)
        if tensor.kind != "parameter":
            continue
        if tensor.requires_grad:
            seconds["optimizer"] += pricer.optimizer_seconds(tensor, journey.source)
    for (name, layout), uses in replays.uses.items():
        if plan.lifetimes.get(name) == "use":
            tensor = journeys[name].tensor
            for step in regathered(journeys[name].path(layout)):
                for _ in uses:
                    add(pricer.step(step, tensor.shape, tensor.element_size, tensor.kind == "parameter")[0])
    return seconds


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

    def add(kind: str, nbytes: float, interval: slice) -> None:
        live[kind][interval] += nbytes

    for op in program.ops:
        price = pricer.op(op, plan.choices[op.name])
        live["working"][moments.forward(op.position)] += price.working_forward
        live["working"][moments.backward(op.position)] += price.working_backward
        if price.kept:
            again = replays.ops.get(op.position)
            add("activations", price.kept, moments.held(op.position, again, op.position))
    inputs: dict[str, set[Layout]] = defaultdict(set)
    for (name, layout), uses in replays.uses.items():
        tensor = journeys[name].tensor
        if tensor.kind == "op":
            assert tensor.producer is not None
            held = moments.held(tensor.producer, replays.first.get((name, layout)), min(uses))
            add("activations", pricer.local_nbytes(tensor, layout), held)
        elif tensor.kind != "parameter":
            inputs[name].add(layout)
    for name, journey in journeys.items():
        tensor = journey.tensor
        if tensor.kind == "parameter":
            _add_parameter(add, moments, plan.lifetimes[name], program, pricer, journey, replays)
        elif tensor.kind != "op":
            for layout in inputs[name] | {journey.source}:
                add("inputs", pricer.local_nbytes(tensor, layout), moments.always())
    return live


def _add_parameter(
    add: Callable[[str, float, slice], None],
    moments: Moments,
    lifetime: str,
    program: Program,
    pricer: Pricer,
    journey: Journey,
    replays: Replays,
) -> None:
    """Storage, state, gradient and the copies in use of one parameter."""
    tensor = journey.tensor
    stored = pricer.local_nbytes(tensor, journey.source)
    add("parameters", stored, moments.always())
    readers = [p for p, _, _ in journey.wanted if p >= 0 and program.ops[p].has_backward]
    if tensor.requires_grad and readers:
        add("optimizer", pricer.state_nbytes(tensor, journey.source), moments.always())
        if moments.several and lifetime in ONCE_A_STEP:
            add("gradients", stored, moments.update())
            for layout in {v for p, _, v in journey.wanted if p >= 0 and program.ops[p].has_backward}:
                add("gradients", pricer.local_nbytes(tensor, layout), moments.step())
        else:
            add("gradients", stored, moments.gradient(max(readers)))
    readings: dict[Layout, list[int]] = defaultdict(list)
    for position, _, layout in journey.wanted:
        if position >= 0 and journey.is_copied(layout):
            readings[layout].append(position)
    for layout, positions in readings.items():
        uses = replays.uses.get((tensor.name, layout), [])
        nbytes = pricer.local_nbytes(tensor, layout)
        held = "step" if moments.several and lifetime in ONCE_A_STEP else lifetime
        for interval in moments.copies(held, positions, uses):
            add("gathered", nbytes, interval)
