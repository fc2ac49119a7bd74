"""How long does a data-parallel step take under an exchange system? Its messages and its layers on the timeline.

The device runs forward layer by layer, then backward; a gradient's messages wait for its backward. Where the next
forward may start before all gradients have arrived, several steps are simulated and the time between the ends of the
last two is the answer; otherwise one step is, with the optimizer at its end.
"""

from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.contract import Architecture, ExchangeSchedule, GradientMessage
from autopar.cost_models.gradient_exchange.model import ExchangeModel
from autopar.cost_models.timeline import TaskList, Tasks, Timeline, simulate

_STEPS = 4  # of the survey's 24 rows none changes in its fifth digit with 3 or with 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRun:
    """One step: its seconds, of which `exposed_seconds` are not computation; the tasks and their times."""

    model: ExchangeModel
    architecture: Architecture
    schedule: ExchangeSchedule
    seconds: float
    num_messages: int
    tasks: Tasks
    timeline: Timeline
    names: tuple[str, ...]

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.model.compute_seconds

    @property
    def streams(self) -> list[tuple[str, str]]:
        """(process, thread) of each stream, for a trace."""
        waits = [f"delay {k}" for k in range(self.tasks.num_streams - 1 - len(self.architecture.streams))]
        return [("rank", stream) for stream in ("device", *self.architecture.streams, *waits)]


def exchange(model: ExchangeModel, architecture: Architecture, schedule: ExchangeSchedule) -> ExchangeRun:
    """Simulate `model` with gradients sent as `schedule` says over `architecture`."""
    messages = schedule.messages(model, architecture)
    delays = 1 + len(architecture.streams)  # the first of a stream for each message that waits: delays do not queue
    build = TaskList(delays + _num_delays(messages))
    names: list[str] = []
    ends: list[int] = []
    arrived: list[list[int]] = [[] for _ in model.gradients]
    share = model.update_seconds / float(model.nbytes.sum())
    device: list[int] = []

    def on_device(seconds: float, after: list[int], name: str) -> int:
        nonlocal device
        device = [build.add(0, seconds, [*device, *after])]
        names.append(name)
        return device[0]

    for _ in range(_STEPS if schedule.overlaps_forward else 1):
        for k in reversed(range(len(model.gradients))):
            gradient = model.gradients[k]
            update = share * gradient.nbytes if schedule.overlaps_forward and ends else 0.0
            on_device(gradient.forward_seconds + update, arrived[k], f"forward {gradient.name}")
        ready = [on_device(g.backward_seconds, [], f"backward {g.name}") for g in model.gradients]
        if schedule.overhead_seconds:
            ready[-1] = on_device(schedule.overhead_seconds, [], "overhead")
        arrived = [[] for _ in model.gradients]
        offset = 0.0
        for number, message in enumerate(messages):
            after = [ready[message.last]]
            if message.delay:
                after = [build.add(delays + number, message.delay, after)]
                names.append("delay")
            before = len(build)
            sent = architecture.send(build, 1, message.nbytes, after, message.priority, offset)
            offset += message.nbytes
            names += [f"send {number}"] * (len(build) - before)
            for k in range(message.first, message.last + 1):
                arrived[k] += sent
        ends.append(device[0])
    if not schedule.overlaps_forward:
        ends.append(on_device(model.update_seconds, sorted({task for sent in arrived for task in sent}), "update"))
    window = schedule.credit_nbytes * architecture.line()[1]
    tasks = build.tasks((0.0, *[window] * len(architecture.streams), *[0.0] * _num_delays(messages)))
    timeline = simulate(tasks)
    begin = timeline.finish[ends[-2]] if schedule.overlaps_forward else 0.0
    return ExchangeRun(
        model=model,
        architecture=architecture,
        schedule=schedule,
        seconds=float(timeline.finish[ends[-1]] - begin),
        num_messages=len(messages),
        tasks=tasks,
        timeline=timeline,
        names=tuple(names),
    )


def _num_delays(messages: tuple[GradientMessage, ...]) -> int:
    return len(messages) if any(message.delay for message in messages) else 0
