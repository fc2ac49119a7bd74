"""What does a plan cost, exactly, on the whole unfolded graph? Seconds by kind and bytes by kind at the peak moment."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autopar.lower.events import Events, find_events
from autopar.lower.holding import MEMORY_KINDS
from autopar.lower.live import Live
from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import Program, make_program
from autopar.lower.target import Target
from autopar.search.costs.event_prices import EventPrices
from autopar.search.costs.interleaved_seconds import interleaved_seconds
from autopar.search.costs.overlapped_seconds import overlapped_seconds
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel
from autopar.values.redistribution import Step
from autopar.values.stage_plan import StagePlan

KINDS = ("forward", "backward", "recompute", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "optimizer")


def evaluate(plan: StagePlan, captured: CapturedModel, cluster: Cluster) -> Estimate:
    """Seconds of one step and memory at its peak. Seconds add up, but for what runs beside compute (`hidden`)."""
    program = make_program(captured)
    return evaluate_program(plan, program, make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config))


def evaluate_program(plan: StagePlan, program: Program, pricer: Pricer) -> Estimate:
    """`evaluate` for a program and prices at hand; other fields of the plan's estimate stay as they are."""
    return evaluate_step(lower(plan, program, pricer.target), pricer)


def evaluate_step(step: LoweredStep, pricer: Pricer) -> Estimate:
    """`evaluate_program` for a plan that is lowered already."""
    seconds = _summed(charges_of(step, pricer))
    saved, saved_by_ways = _saved(step, pricer)
    live = Live(step).bytes
    peak = int(np.argmax(np.sum(list(live.values()), axis=0)))
    memory = {kind: float(live[kind][peak]) for kind in MEMORY_KINDS}
    hidden = 0.0
    if step.program.copies > 1:
        alone = lower(replace(step.plan, ways={}, buckets=()), step.program, pricer.target)
        hidden = sum(seconds.values()) + saved - interleaved_seconds(alone, pricer)
    elif step.plan.buckets and (step.plan.microbatches == 1 or step.plan.prefetch):
        hidden = overlapped_seconds(step, pricer)
    return replace(
        step.plan.estimate,
        seconds=seconds,
        hidden=hidden,
        saved=saved,
        saved_by_ways=saved_by_ways,
        memory=memory,
        rates=pricer.rates.name,
    )


def _saved(step: LoweredStep, pricer: Pricer) -> tuple[float, float]:
    """Seconds that parameters' buckets and ways save, and those of them that ways alone do; all else costs the same."""
    plan = step.plan

    def of_parameters(step: LoweredStep) -> float:
        return sum(charge.seconds for charge in charges_of(step, pricer, only_parameters=True))

    if not plan.buckets and not plan.ways:
        return 0.0, 0.0
    total = of_parameters(step)
    unmerged = of_parameters(step.under(replace(plan, ways={}))) if plan.ways else total
    alone = of_parameters(step.under(replace(plan, ways={}, buckets=()))) if plan.buckets else unmerged
    return alone - total, unmerged - total


def _summed(charges: Iterable["Charge"]) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    for charge in charges:
        seconds[charge.kind] += charge.seconds
    return seconds


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds of a step that an op or a tensor's way takes; `axes` are those that a collective joins, `backward` tells
    in which pass it runs (what is paid once a step, before or after the micro-batches, too)."""

    kind: str
    name: str
    seconds: float
    axes: tuple[int, ...] = ()
    backward: bool = False


def peak_nbytes(plan: StagePlan, program: Program, target: Target) -> float:
    """Most bytes at once, and nothing of what a step takes."""
    return float(np.sum(list(Live(lower(plan, program, target)).bytes.values()), axis=0).max())


def peak_without_optimizer(plan: StagePlan, captured: CapturedModel, cluster: Cluster) -> float:
    """Most bytes at once in forward and backward of a step before which the optimizer has no state."""
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    live = Live(lower(plan, make_program(captured), pricer.target)).bytes
    return float(np.sum([nbytes for kind, nbytes in live.items() if kind != "optimizer"], axis=0).max())


def charges_of(
    step: LoweredStep, pricer: Pricer, *, only_parameters: bool = False, events: Events | None = None
) -> list[Charge]:
    """Of every event; in buckets a copy is gathered again once for all that read it.

    events: those of the step, if they are known: they do not depend on prices.
    """
    found = find_events(step, only_parameters=only_parameters) if events is None else events
    prices = EventPrices(step, pricer)
    seen, charges = set[tuple[str, Step]](), list[Charge]()
    for some, is_back in ((found.forward, False), (found.backward, True), (found.update, True)):
        for event in some:
            if pricer.in_buckets and event.step is not None and event.is_gathered_again:
                if (event.name, event.step) in seen:
                    continue
                seen.add((event.name, event.step))
            times = 1 if event.once or event.kind == "optimizer" else step.plan.microbatches
            if not event.messages:
                if event.kind:
                    charges.append(Charge(event.kind, event.name, prices.computed(event) * times, backward=is_back))
                continue
            names = [name for name, _ in event.members] or [event.name]
            for kind, seconds, axes in prices.sent(event):
                charges += (Charge(kind, name, seconds / len(names) * times, axes, is_back) for name in names)
    return charges
