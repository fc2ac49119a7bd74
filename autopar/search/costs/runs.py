"""What does every event of a step take? The tasks of a rank's device and links, of which timelines are made.

A task of no seconds (a view, a slice) hands on what it waits for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.lower.events import Event, Fact, find_events
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.program import Program
from autopar.lower.split_backward import split_events
from autopar.search.costs.event_prices import EventPrices
from autopar.search.costs.pricing import Pricer
from autopar.values.graph import target_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Seconds of a rank's device or, over mesh axes, of a link.

    stored: what is sent is a parameter, or the gradient of one. nbytes: of the message, 0 where it is inside an op.
    """

    event: Event
    seconds: float
    axes: tuple[int, ...] = ()
    stored: bool = False
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """One micro-batch forward and backward, and the optimizer's step; see `lower.events.Events`.

    parts: of a backward pass in two parts both, of one in one that one.
    """

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    parts: tuple[tuple[Task, ...], ...]
    optimizer: tuple[Task, ...]
    leaves: frozenset[Fact]


def find_runs(step: LoweredStep, pricer: Pricer, *, hoisted: bool, splits: bool = False) -> Runs:
    """The tasks of a step, every collective alone.

    hoisted: parameters whose copies live for the step are prepared apart from micro-batches.
    splits: backward runs in two parts.
    """
    found = find_events(step, hoisted=hoisted, buckets=False)
    parts = split_events(step, found.backward) if splits else ()

    prices = EventPrices(step, pricer)

    def tasks(events: Iterable[Event]) -> tuple[Task, ...]:
        return tuple(_task(event, prices) for event in events)

    backward = tasks(found.backward)
    return Runs(
        forward=tasks(found.forward),
        backward=backward,
        parts=tuple(map(tasks, parts)) or (backward,),
        optimizer=tasks(found.update),
        leaves=found.leaves,
    )


def _task(event: Event, prices: EventPrices) -> Task:
    if not event.messages:
        return Task(event=event, seconds=prices.computed(event))
    ((_, seconds, axes),) = prices.sent(event)
    return Task(
        event=event, seconds=seconds, axes=axes, stored=prices.is_parameter(event),
        nbytes=0 if event.inside else event.messages[0].nbytes,
    )  # fmt: skip


def labels(program: Program) -> dict[str, str]:
    """What each op and tensor is called: an op `model.layers.0.mlp.up_proj: linear`, its results likewise, a parameter
    by its own name."""
    own = {p.placeholder: p.names[0] for p in program.captured.parameters}
    out = {name: own.get(name, name) for name, tensor in program.tensors.items() if tensor.producer is None}
    for op in program.ops:
        called = target_name(op.node.target).removeprefix("aten.").split(".")[0]
        words = f"{op.module}: {called}" if op.module else called
        out.update(dict.fromkeys([op.name, *(r for r in op.results if r is not None)], words))
    return out
