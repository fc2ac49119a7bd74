"""What does a rank run for one micro-batch, in order, what is sent, and what waits for what?

Forward is `calls`; backward runs it in reverse, before each op the gathers that are repeated for it and what it waits
for to be recomputed. An event reads and makes *facts*: a value of the forward pass, a gradient, a value made again in
backward. A fact made by several events is their sum: whoever reads it waits for all of them.

A bucket is one event, where its first member stands; in backward where the last does. It is gathered again once, before
the first that reads any of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.lower.buckets import Bucket, bucket_messages
from autopar.lower.calls import WAIT, LoweredCall
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.program import Op
from autopar.lower.recomputation import Value, saved_of
from autopar.lower.redistributions import regathered, sent_by
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import Layout
from autopar.values.redistribution import Message, Step

Fact = tuple[str, str, Layout, int]
"""("value" | "gradient" | "again" | "gathered", tensor, layout, position of the op that it is gathered for)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An op, what its body sends, a redistribution or the update of a parameter.

    kind: of an op `forward`, `backward` or `recompute`; `optimizer`; of what is sent the collective; "" of a
        redistribution that sends nothing.
    op, step: what runs, if it is one. is_back: of a step, whether what it does to gradients.
    members: of a bucket, the values that its steps make.
    messages: what is sent, one after the other.
    inside: a collective of an op's own body, which waits for it.
    once: of what runs once a step, not for every micro-batch.
    begun: waited for where it is read first, not where it stands.
    call: number of the call, of a gather in backward that of the call that reads it.
    again: run again in backward: what is recomputed, and what is gathered for it.
    towards: operands to which a part of an op's backward pass gives gradients, if not to all.
    """

    kind: str
    name: str
    op: Op | None = None
    step: Step | None = None
    is_back: bool = False
    members: tuple[Value, ...] = ()
    reads: tuple[Fact, ...] = ()
    makes: tuple[Fact, ...] = ()
    messages: tuple[Message, ...] = ()
    inside: bool = False
    once: bool = False
    begun: bool = False
    call: int = -1
    again: bool = False
    towards: frozenset[int] | None = None

    @property
    def is_gathered_again(self) -> bool:
        """Whether it makes a copy of a parameter for backward."""
        return bool(self.makes) and self.makes[0][0] == "gathered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """One micro-batch forward and backward, and the optimizer's step.

    leaves: facts that hold before anything ran and that nobody waits for: parameters as they are stored.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    update: tuple[Event, ...]
    leaves: frozenset[Fact]


def find_events(
    step: LoweredStep,
    *,
    hoisted: bool = True,
    buckets: bool = True,
    splits: bool = False,
    only_parameters: bool = False,
) -> Events:
    """The events of a step.

    hoisted: parameters whose copies live for the step are prepared apart from micro-batches.
    buckets: what travels together is one event.
    splits: backward runs in two parts, in which only what is sent once a step travels together.
    only_parameters: no ops, and no redistributions of what they make.
    """
    return _Finder(step, hoisted, buckets, splits, only_parameters).run()


@dataclass(slots=True)
class _Finder:
    lowered: LoweredStep
    hoisted: bool
    buckets: bool
    splits: bool
    only_parameters: bool
    fused: dict[Value, Bucket] = field(init=False)
    once: set[str] = field(init=False)
    done: set[Bucket] = field(init=False, default_factory=set)

    def run(self) -> Events:
        lifetimes = self.lowered.plan.lifetimes
        self.once = {name for name, v in lifetimes.items() if self.hoisted and v in ONCE_A_STEP}
        fused = self.lowered.fused if self.buckets else {}
        self.fused = {v: g for v, g in fused.items() if not self.splits or v[0] in self.once}
        return Events(
            forward=tuple(e for i, call in enumerate(self.lowered.calls) for e in self._forward(i, call)),
            backward=tuple(self._backward_pass()),
            update=tuple(self._update()),
            leaves=frozenset(
                ("value", name, one.source, -1)
                for name, one in self.lowered.redistributed.items()
                if one.tensor.kind == "parameter"
            ),
        )

    def _update(self) -> Iterator[Event]:
        for name in self.lowered.redistributed:
            if name in self.lowered.program.updated:
                yield Event(kind="optimizer", name=name)

    def _forward(self, number: int, call: LoweredCall) -> Iterator[Event]:
        if call.part == WAIT or self._is_left_out(call):
            return
        reads = tuple(("value", *value, -1) for value in call.operands)
        makes = tuple(("value", *value, -1) for value in call.results if value is not None)
        if call.op is not None:
            yield from self._of_op("forward", call.op, reads, makes, number)
            return
        group = self._group(call)
        if group is None:
            yield self._of_step(call, number, reads, makes)
        elif number == self.lowered.first[group]:
            yield self._of_group(group, "value", number)

    def _group(self, call: LoweredCall) -> Bucket | None:
        value = call.results[0]
        return None if value is None else self.fused.get(value)

    def _of_op(
        self, kind: str, op: Op, reads: tuple[Fact, ...], makes: tuple[Fact, ...], number: int, *, again: bool = False
    ) -> Iterator[Event]:
        local = self.lowered.target.op(op, self.lowered.plan.choices[op.name])
        sent = local.backward_messages if kind == "backward" else local.forward_messages
        event = Event(kind=kind, name=op.name, op=op, reads=reads, makes=makes, call=number, again=again)
        yield event
        for message in sent:
            yield replace(event, kind=message.kind, messages=(message,), inside=True)

    def _of_step(
        self, call: LoweredCall, number: int, reads: tuple[Fact, ...], makes: tuple[Fact, ...], *, is_back: bool = False
    ) -> Event:
        """A redistribution step of the forward or the backward pass."""
        assert call.step is not None
        found = self._sent(call.operands[0][0], call.step, reads, makes, number, is_back=is_back)
        return replace(found, begun=bool(call.part and found.messages))

    def _sent(
        self, name: str, step: Step, reads: tuple[Fact, ...], makes: tuple[Fact, ...], number: int, *, is_back: bool
    ) -> Event:
        sent = sent_by(step, self.lowered.redistributed[name].tensor, self.lowered.plan)[is_back]
        return Event(
            kind=sent[0].kind if sent else "", name=name, step=step, is_back=is_back, reads=reads, makes=makes,
            messages=sent, once=name in self.once, call=number,
        )  # fmt: skip

    def _of_group(self, group: Bucket, facts: str, number: int) -> Event:
        """A bucket's steps in one: `facts` are the `value`s or `gathered` copies of forward, or `gradient`s."""
        redistributed, is_back = self.lowered.redistributed, facts == "gradient"
        members = [v for v in group.values if not is_back or v[1] in redistributed[v[0]].in_backward]
        sources = [
            ("value" if facts == "gathered" else facts, n, redistributed[n].made[v].source, -1) for n, v in members
        ]
        made = [(facts, *value, -1) for value in members]
        sent = bucket_messages(group, self.lowered.plan, redistributed, backward=is_back)
        return Event(
            kind=sent[0].kind if sent else "", name=group.values[0][0], members=group.values, is_back=is_back,
            reads=tuple(made if is_back else sources), makes=tuple(sources if is_back else made), messages=sent,
            once=group.values[0][0] in self.once, call=number,
        )  # fmt: skip

    def _backward_pass(self) -> Iterator[Event]:
        """In the order of the moments; a gather for an op's backward stands before what is recomputed for it."""
        lowered, gathers = self.lowered, self._gathers()
        moments = [(moment, number, False) for number, moment in lowered.backward.items()]
        moments += [(moment, number, True) for number, moment in lowered.replay.items()]
        for _, number, again in sorted(moments):
            call = lowered.calls[number]
            position = self._waits(call) if again else call.op.position if call.op is not None else -1
            for (name, layout), reader, is_replay in gathers.pop(position, ()):
                for event in self._gathered(name, layout, position):
                    yield replace(event, call=reader, again=is_replay)
            if not self._is_left_out(call):
                yield from self._recomputed(number, call, position) if again else self._backward(number, call)

    def _is_left_out(self, call: LoweredCall) -> bool:
        """Whether it is none that a parameter travels by, if only those are asked for."""
        if not self.only_parameters:
            return False
        return call.op is not None or self.lowered.program.tensors[call.operands[0][0]].kind != "parameter"

    def _gathers(self) -> dict[int, list[tuple[Value, int, bool]]]:
        """Copies that are gathered again, by the op that they are gathered for: value, call that reads it, whether it
        is recomputed."""
        lowered, found = self.lowered, defaultdict[int, list[tuple[Value, int, bool]]](list)
        wanted = {v for v in lowered.recomputation.uses if lowered.plan.lifetimes.get(v[0]) == "use"}
        readers: dict[Value, list[tuple[int, int, bool]]] = defaultdict(list)
        for value in wanted:
            for position in lowered.recomputation.savers.get(value, ()):
                readers[value].append((position, lowered.at[position], False))
        for number in lowered.replay if wanted else ():
            call = lowered.calls[number]
            for operand in call.operands:
                if (root := lowered.root(*operand)) in wanted:
                    readers[root].append((self._waits(call), number, True))
        for value in lowered.recomputation.uses:
            for position, number, again in readers.get(value, ()):
                found[position].append((value, number, again))
        return found

    def _waits(self, call: LoweredCall) -> int:
        """The op at whose backward a call is recomputed."""
        if call.op is not None:
            return self.lowered.recomputation.ops[call.op.position]
        assert call.results[0] is not None
        return self.lowered.recomputation.steps[call.results[0]][1]

    def _gathered(self, name: str, layout: Layout, position: int) -> Iterator[Event]:
        """What makes a copy again: from a bucket, if some step on its path is in one."""
        steps = regathered(self.lowered.redistributed[name].path(layout))[::-1]
        reads: tuple[Fact, ...] = (("value", name, self.lowered.redistributed[name].source, -1),)
        for number in reversed(range(len(steps))):
            group = self.fused.get((name, steps[number].target))
            if group is not None:
                yield from self._gathered_together(group, position)
                reads = (("gathered", name, steps[number].target, -1),)
                steps = steps[number + 1 :]
                break
        for step in steps:
            makes = (("gathered", name, step.target, position),)
            yield self._sent(name, step, reads, makes, -1, is_back=False)
            reads = makes

    def _gathered_together(self, group: Bucket, position: int) -> Iterator[Event]:
        """A bucket and what it is made of, unless that was done."""
        if group in self.done:
            return
        self.done.add(group)
        for name, layout in group.values:
            yield from self._gathered(name, self.lowered.redistributed[name].made[layout].source, position)
        yield self._of_group(group, "gathered", -1)

    def _remade(self, value: Value, position: int) -> Iterator[Fact]:
        """What backward waits for to have a value that it does not keep; facts that nothing makes hold from before."""
        root = self.lowered.root(*value)
        yield ("again", *root, -1)
        yield ("gathered", *root, position)
        if root in self.fused:
            yield ("gathered", *root, -1)

    def _recomputed(self, number: int, call: LoweredCall, position: int) -> Iterator[Event]:
        reads = tuple(fact for value in call.operands for fact in self._remade(value, position))
        makes = tuple(("again", *value, -1) for value in call.results if value is not None)
        if call.op is not None:
            yield from self._of_op("recompute", call.op, reads, makes, number, again=True)
        else:
            yield replace(self._of_step(call, number, reads, makes), again=True)

    def _backward(self, number: int, call: LoweredCall) -> Iterator[Event]:
        group = self._group(call) if call.step is not None else None
        if group is not None:
            if number == self.lowered.first[group]:
                yield self._of_group(group, "gradient", number)
            return
        if not any(call.gradients):
            return
        reads = [("gradient", *value, -1) for value in call.results if value is not None]
        wanted = zip(call.operands, call.gradients, strict=True)
        makes = tuple(("gradient", *value, -1) for value, has_gradient in wanted if has_gradient)
        if call.op is None:
            yield self._of_step(call, number, tuple(reads), makes, is_back=True)
            return
        local = self.lowered.target.op(call.op, self.lowered.plan.choices[call.op.name])
        saved = saved_of(call.op, local, self.lowered.target, self.lowered.redistributed)
        reads += [fact for value in saved for fact in self._remade(value, call.op.position)]
        yield from self._of_op("backward", call.op, tuple(reads), makes, number)
