"""What does a rank run for one micro-batch, in order, and what waits for what? The seconds of `evaluate`, task by task.

Forward is `search.calls`; backward runs it in reverse, before each op the gathers that are repeated for it and the
replays that it waits for (`search.live`). A task reads and makes *facts*: a value of the forward pass, a gradient, a
value made again in backward. A fact made by several tasks is their sum: whoever reads it waits for all of them. A task
of no seconds (a view, a slice) hands on what it waits for.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.graph import target_name
from autopar.lower.calls import WAIT, Call
from autopar.lower.journeys import regathered, sent_by, splits_parameters
from autopar.lower.live import Live
from autopar.lower.program import Program
from autopar.lower.replays import Value, root_of
from autopar.placement import Layout
from autopar.plan import ONCE_A_STEP, Plan
from autopar.redistribution import Message
from autopar.search.costs.pricing import OpPrice, Pricer, Timed

Fact = tuple[str, str, Layout, int]
"""("value" | "gradient" | "again" | "gathered", tensor, layout, position of the op that it is gathered for)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Seconds of a rank's device or, over mesh axes, of a link.

    stored: what is sent is a parameter, or the gradient of one. inside: a collective of an op's own body, which waits
    for it. once: of what is paid once a step. begun: waited for where it is read first, not where it stands. nbytes: of
    the message, 0 where it is inside an op. call: in backward the number of the call in `Live.calls`, of a gather that
    of the one that reads it; again: of a replay.
    """

    kind: str
    name: str
    seconds: float
    reads: tuple[Fact, ...] = ()
    makes: tuple[Fact, ...] = ()
    axes: tuple[int, ...] = ()
    nbytes: int = 0
    stored: bool = False
    inside: bool = False
    once: bool = False
    begun: bool = False
    call: int = -1
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """One micro-batch forward and backward, and the optimizer's step. leaves: facts that hold before anything ran and
    that nobody has to wait for: parameters as they are stored."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    optimizer: tuple[Task, ...]
    leaves: frozenset[Fact]


def find_runs(plan: Plan, program: Program, pricer: Pricer, live: Live, *, hoisted: bool) -> Runs:
    """The tasks of a plan. hoisted: parameters whose copies live for the step are prepared apart from micro-batches."""
    return _Finder(plan, program, pricer, live, hoisted).run()


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


class _Finder:
    def __init__(self, plan: Plan, program: Program, pricer: Pricer, live: Live, hoisted: bool) -> None:
        self.plan, self.program, self.pricer, self.live = plan, program, pricer, live
        self.journeys, self.replays = live.journeys, live.replays
        self.once = {name for name, v in plan.lifetimes.items() if hoisted and v in ONCE_A_STEP}

    def run(self) -> Runs:
        forward = [task for call in self.live.calls for task in self._forward(call)]
        return Runs(
            forward=tuple(forward),
            backward=tuple(self._backward_pass()),
            optimizer=tuple(self._optimizer()),
            leaves=frozenset(
                ("value", name, journey.source, -1)
                for name, journey in self.journeys.items()
                if journey.tensor.kind == "parameter"
            ),
        )

    def _optimizer(self) -> Iterator[Task]:
        splits = splits_parameters(self.plan, self.journeys, self.pricer.target)
        for name, journey in self.journeys.items():
            if journey.tensor.kind == "parameter" and journey.tensor.requires_grad:
                seconds = self.pricer.optimizer_seconds(journey.tensor, journey.source, beside_split=splits)
                yield Task(kind="optimizer", name=name, seconds=seconds)

    def _forward(self, call: Call) -> Iterator[Task]:
        if call.part == WAIT:
            return
        reads = tuple(("value", *value, -1) for value in call.operands)
        makes = tuple(("value", *value, -1) for value in call.results if value is not None)
        if call.op is not None:
            price = self._price(call)
            yield from _of_op("forward", call.op.name, price.forward, price.forward_sent, reads, makes)
        else:
            yield self._sent(call, 0, reads, makes)

    def _price(self, call: Call) -> OpPrice:
        assert call.op is not None
        return self.pricer.op(call.op, self.plan.choices[call.op.name])

    def _sent(self, call: Call, backward: int, reads: tuple[Fact, ...], makes: tuple[Fact, ...]) -> Task:
        """A redistribution step's collective of the forward or the backward pass; of no seconds where there is none."""
        assert call.step is not None
        name = call.operands[0][0]
        tensor = self.journeys[name].tensor
        stored = tensor.kind == "parameter"
        sent = sent_by(call.step, tensor, self.plan)[backward]
        timed = self.pricer.step(call.step, tensor.shape, tensor.element_size, stored)[backward]
        found = _collective(name, sent, timed, reads, makes, stored=stored, once=name in self.once)
        return replace(found, begun=True) if call.part and found.axes else found

    def _backward_pass(self) -> Iterator[Task]:
        """In the order of the moments of `Live`; a gather for an op's backward stands before the op's replays."""
        live = self.live
        gathers: dict[int, list[tuple[Value, int, bool]]] = defaultdict(list)
        for value in self.replays.uses:
            if self.plan.lifetimes.get(value[0]) == "use":
                for position, number, again in self._readers(value):
                    gathers[position].append((value, number, again))
        moments = [(moment, number, False) for number, moment in live.backward.items()]
        moments += [(moment, number, True) for number, moment in live.replay.items()]
        for _, number, again in sorted(moments):
            call = live.calls[number]
            position = self._waits(call) if again else call.op.position if call.op is not None else -1
            for (name, layout), reader, is_replay in gathers.pop(position, ()):
                for task in self._gathered(name, layout, position):
                    yield replace(task, call=reader, again=is_replay)
            for task in self._replayed(call, position) if again else self._backward(call):
                yield replace(task, call=number, again=again)

    def _readers(self, value: Value) -> Iterator[tuple[int, int, bool]]:
        """Who reads a value in backward: the op that it is gathered for, the call that reads it, whether replayed."""
        for position in self.replays.savers.get(value, ()):
            yield position, self.live.at[position], False
        for number in self.live.replay:
            call = self.live.calls[number]
            for operand in call.operands:
                if self.live.root(*operand) == value:
                    yield self._waits(call), number, True

    def _waits(self, call: Call) -> int:
        """The op at whose backward a call is replayed."""
        if call.op is not None:
            return self.replays.ops[call.op.position]
        assert call.results[0] is not None
        return self.replays.steps[call.results[0]][1]

    def _gathered(self, name: str, layout: Layout, position: int) -> Iterator[Task]:
        tensor, reads = self.journeys[name].tensor, (("value", name, self.journeys[name].source, -1),)
        steps = list(reversed(regathered(self.journeys[name].path(layout))))
        for number, step in enumerate(steps):
            target = layout if number + 1 == len(steps) else step.target
            makes = (("gathered", name, target, position),)
            sent = sent_by(step, tensor, self.plan)[0]
            timed = self.pricer.step(step, tensor.shape, tensor.element_size, True)[0]
            yield _collective(name, sent, timed, reads, makes, stored=True)
            reads = makes

    def _remade(self, value: Value, position: int) -> Iterator[Fact]:
        """What backward waits for to have a value that it does not keep; facts that nothing makes hold from before."""
        root = root_of(self.program, self.plan, self.pricer.target, self.journeys, *value)
        yield ("again", *root, -1)
        yield ("gathered", *root, position)

    def _replayed(self, call: Call, position: int) -> Iterator[Task]:
        reads = tuple(fact for value in call.operands for fact in self._remade(value, position))
        makes = tuple(("again", *value, -1) for value in call.results if value is not None)
        if call.op is not None:
            price = self._price(call)
            again = self.pricer.again(call.op, price)
            yield from _of_op("recompute", call.op.name, again, price.forward_sent, reads, makes)
        else:
            yield self._sent(call, 0, reads, makes)

    def _backward(self, call: Call) -> Iterator[Task]:
        if not any(call.gradients):
            return
        reads = [("gradient", *value, -1) for value in call.results if value is not None]
        wanted = zip(call.operands, call.gradients, strict=True)
        makes = tuple(("gradient", *value, -1) for value, has_gradient in wanted if has_gradient)
        if call.op is None:
            yield self._sent(call, 1, tuple(reads), makes)
            return
        op, price = call.op, self._price(call)
        operands, results = self.pricer.target.saves(op)
        saved = [call.operands[slot] for slot in operands]
        saved += [value for slot in results if (value := call.results[slot]) is not None]
        reads += [fact for value in saved for fact in self._remade(value, op.position)]
        yield from _of_op("backward", op.name, price.backward, price.backward_sent, tuple(reads), makes)


def _of_op(
    kind: str, name: str, seconds: float, sent: Timed, reads: tuple[Fact, ...], makes: tuple[Fact, ...]
) -> Iterator[Task]:
    yield Task(kind=kind, name=name, seconds=seconds, reads=reads, makes=makes)
    for collective, duration, axes in sent:
        yield Task(kind=collective, name=name, seconds=duration, reads=reads, makes=makes, axes=axes, inside=True)


def _collective(
    name: str,
    sent: tuple[Message, ...],
    timed: Timed,
    reads: tuple[Fact, ...],
    makes: tuple[Fact, ...],
    *,
    stored: bool,
    once: bool = False,
) -> Task:
    if not sent:
        return Task(kind="", name=name, seconds=0.0, reads=reads, makes=makes, once=once)
    ((kind, seconds, axes),) = timed
    return Task(
        kind=kind, name=name, seconds=seconds, reads=reads, makes=makes, axes=axes, nbytes=sent[0].nbytes,
        stored=stored, once=once,
    )  # fmt: skip
