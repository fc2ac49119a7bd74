"""How long does a step take whose micro-batches run beside each other's collectives? Task by task, on device and links.

The device runs the tasks in their order. A collective that is begun takes its link when it is free, from when the
device came to it, and the device waits for it where it is first read; all others, and compute, the device waits for
where they stand. A pass ends when all that it began has ended. What is paid once a step follows the micro-batches.
`search.timeline` draws the same.
"""

from collections import defaultdict
from collections.abc import Iterable

from autopar.lower.events import Fact
from autopar.lower.lowered_step import LoweredStep
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.runs import Task, find_runs


def interleaved_seconds(step: LoweredStep, pricer: Pricer) -> float:
    """Seconds of a step, every collective alone."""
    runs, microbatches = find_runs(step, pricer, hoisted=step.plan.microbatches > 1), step.plan.microbatches
    passes = (_pass_seconds((t for t in tasks if not t.event.once), pricer) for tasks in (runs.forward, runs.backward))
    once = sum(task.seconds for task in (*runs.forward, *runs.backward) if task.event.once)
    return microbatches * sum(passes) + once + sum(task.seconds for task in runs.optimizer)


def _pass_seconds(tasks: Iterable[Task], pricer: Pricer) -> float:
    now = 0.0
    free: dict[str, float] = defaultdict(float)
    ends: dict[Fact, float] = defaultdict(float)
    for task in tasks:
        now = max([now, *(ends.get(fact, 0.0) for fact in task.event.reads)])
        end = now
        if task.axes and task.seconds:
            level = pricer.slowest_level(task.axes)
            end = free[level] = max(now, free[level]) + task.seconds
        elif task.seconds:
            end = now + task.seconds
        if task.event.begun:
            for fact in task.event.makes:
                ends[fact] = max(ends[fact], end)
        else:
            now = end
    return max([now, *ends.values()])
