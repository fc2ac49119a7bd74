"""Which bytes does a rank hold at every moment of a step? A walk over its calls, forward and back, as autograd goes.

Moments: each call forward, each call backward in reverse, replays just before the backward that waits for them, and the
optimizer's step. Redistributions are calls. With several micro-batches these are the moments of the last one. Live are
    parameters, optimizer   storage of parameters and their optimizer state, always, as wide as they are stored
    gradients               in storage layout, from the first backward that makes one to the end; with several
                            micro-batches from the beginning, and in each layout in use if they are reduced once a step;
                            as wide as stored, but for one micro-batch only after backward
    activations             what autograd saves or a replay reads, from its making, or its replay, to its last use in
                            backward (`search.replays`); views share storage
    gathered                copies of parameters: for the step, kept to backward, or (`use`) only while an op reads
                            them; the part that is cast to what is computed on: for the step, or as long as it is read
    working                 forward: what nothing saves, from its making to its last reader. Backward: gradients of
                            values, from the last reader's backward to the producer's; sums hand theirs on. Both: what
                            a call allocates beside (`rules.spare`, buffers of collectives along a dim but the first)
    inputs                  inputs of the step, buffers and constants, always; their slices as any other value
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from autopar.placement import Layout, Shard
from autopar.plan import ONCE_A_STEP, Plan
from autopar.redistribution import Step
from autopar.rules.spare import handed_on
from autopar.search.calls import Call, make_calls
from autopar.search.journeys import Journey
from autopar.search.pricing import Pricer
from autopar.search.program import Program
from autopar.search.replays import Replays, Value, root_of

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "inputs")


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that an op or a tensor holds from moment `first` to moment `last`."""

    kind: str
    name: str
    nbytes: float
    first: int
    last: int


@dataclass(slots=True, eq=False)
class _Gradient:
    """A gradient's storage: since when, and how many values' gradients it is."""

    name: str
    nbytes: int
    since: int
    last: int
    owners: int = 1


class Live:
    """`bytes[kind]` at every moment; `at[p]` is the number of the call that op p is, its moment forward too;
    `backward` and `replay` are the moments of a call's backward pass and of its replay, `end` that of the optimizer."""

    def __init__(
        self, plan: Plan, program: Program, pricer: Pricer, journeys: dict[str, Journey], replays: Replays
    ) -> None:
        self.plan, self.program, self.pricer = plan, program, pricer
        self.journeys, self.replays = journeys, replays
        self.calls = make_calls(program, plan, pricer, journeys)
        self.several = plan.microbatches > 1
        self.at = {call.op.position: i for i, call in enumerate(self.calls) if call.op is not None}
        self.backward: dict[int, int] = {}
        self.replay: dict[int, int] = {}
        self._order()
        self.holdings: list[Holding] = []
        self.bytes = {kind: np.zeros(self.end + 1) for kind in MEMORY_KINDS}
        self._values()
        self._parameters()
        self._gradients()
        for number, call in enumerate(self.calls):
            self._beside(number, call)

    def _order(self) -> None:
        """Moments of the calls' backward passes and replays, by number of the call."""
        steps = {v: i for i, call in enumerate(self.calls) if call.step is not None for v in call.results}
        waiting: dict[int, list[int]] = defaultdict(list)
        for position, waits in self.replays.ops.items():
            waiting[self.at[waits]].append(self.at[position])
        for value, (_, waits) in self.replays.steps.items():
            waiting[self.at[waits]].append(steps[value])
        moment = len(self.calls)
        for number in reversed(range(len(self.calls))):
            for again in sorted(waiting[number]):
                self.replay[again] = moment
                moment += 1
            self.backward[number] = moment
            moment += 1
        self.end = moment

    def _add(self, kind: str, name: str, nbytes: float, first: int, last: int) -> None:
        if nbytes:
            self.bytes[kind][first : last + 1] += nbytes
            self.holdings.append(Holding(kind, name, nbytes, first, last))

    def moment(self, number: int) -> tuple[str, Call | None]:
        """`forward`, `backward` or `replay` and its call; None for the optimizer's step."""
        if number < len(self.calls):
            return "forward", self.calls[number]
        for word, moments in (("backward", self.backward), ("replay", self.replay)):
            for call, moment in moments.items():
                if moment == number:
                    return word, self.calls[call]
        return "optimizer", None

    def _values(self) -> None:
        """What calls make, and what is handed in; but copies of parameters that live for a use or a step."""
        made: dict[Value, int] = {}
        last: dict[Value, int] = {}
        uses: dict[Value, set[int]] = defaultdict(set)
        for kept, savers in self.replays.savers.items():
            uses[kept].update(self.backward[self.at[p]] for p in savers)
        for number, call in enumerate(self.calls):
            for name, layout in call.operands:
                root = self._root(name, layout)
                last[root] = number
                if number in self.replay:
                    uses[root].add(self.replay[number])
            for value in call.results:
                if value is not None and self._root(*value) == value:
                    made[value] = last[value] = number
        for value, number in made.items():
            self._value(value, number, last[value], uses[value])
        for name, journey in self.journeys.items():
            if journey.tensor.kind == "parameter":
                self._cast(journey, uses)
            elif journey.tensor.kind != "op":
                times = self.plan.microbatches if journey.tensor.kind == "input" else 1
                self._add("inputs", name, times * self._nbytes((name, journey.source)), 0, self.end)

    def _cast(self, journey: Journey, uses: dict[Value, set[int]]) -> None:
        """Of a parameter: the rank's part as it is computed on, which what is gathered again is made of too."""
        name = journey.tensor.name
        last = self.end - 1 if self.several else len(self.calls) - 1
        for layout in () if self.several else (journey.source, *journey.made):
            path = journey.path(layout)
            again = regathered(path) if self.plan.lifetimes.get(name) == "use" else []
            if len(again) == sum(bool(step.forward) for step in path):
                last = max({last} | uses.get((name, layout), set()))
        self._add("gathered", name, self.pricer.cast_nbytes(journey.tensor, journey.source), 0, last)

    def _root(self, name: str, layout: Layout) -> Value:
        return root_of(self.program, self.plan, self.pricer, self.journeys, name, layout)

    def _nbytes(self, value: Value) -> int:
        return self.pricer.local_nbytes(self.journeys[value[0]].tensor, value[1])

    def _value(self, value: Value, made: int, last: int, uses: set[int]) -> None:
        journey = self.journeys[value[0]]
        if journey.tensor.kind != "op" and not journey.is_copied(value[1]):
            return
        kind = {"op": "activations", "parameter": "gathered"}.get(journey.tensor.kind, "inputs")
        nbytes = self._nbytes(value)
        if self._is_once_a_step(value[0]):
            self._add(kind, value[0], nbytes, 0, self.end - 1)
        elif self.plan.lifetimes.get(value[0]) == "use" and regathered(journey.path(value[1])):
            self._add(kind, value[0], nbytes, made, last)
            for moment in uses:
                self._add(kind, value[0], nbytes, moment, moment)
        elif not uses:
            self._add("working" if kind == "activations" else kind, value[0], nbytes, made, last)
        elif value in self.replays.first:
            self._add("working", value[0], nbytes, made, last)
            self._add(kind, value[0], nbytes, self.replay[made], max(uses))
        else:
            self._add(kind, value[0], nbytes, made, max(uses))

    def _parameters(self) -> None:
        """Storage and state, and gradients as far as they are there from the beginning."""
        end = self.end
        for journey in self.journeys.values():
            tensor = journey.tensor
            if tensor.kind != "parameter":
                continue
            stored = self.pricer.stored_nbytes(tensor, journey.source)
            self._add("parameters", tensor.name, stored, 0, end)
            readers = {v for p, _, v in journey.wanted if p >= 0 and self.program.ops[p].has_backward}
            if not (tensor.requires_grad and readers):
                continue
            self._add("optimizer", tensor.name, self.pricer.state_nbytes(tensor, journey.source), 0, end)
            if self._is_once_a_step(tensor.name):
                for layout in readers:
                    self._add("gradients", tensor.name, self.pricer.stored_nbytes(tensor, layout), 0, end - 1)
                self._add("gradients", tensor.name, stored, end, end)
            elif self.several:
                self._add("gradients", tensor.name, stored, 0, end)

    def _gradients(self) -> None:
        """Backward, call by call: what each makes, hands on, adds up and lets go."""
        held: dict[Value, _Gradient] = {}
        for number in reversed(range(len(self.calls))):
            call, now = self.calls[number], self.backward[number]
            if call.step is not None and self._is_once_a_step(call.operands[0][0]):
                continue
            given = [held.pop(value, None) for value in call.results if value is not None]
            arrived = next((g for g in given if g is not None), None)
            is_end = any(value is not None and value[0] in self.program.captured.ends for value in call.results)
            if any(call.gradients) and (arrived is not None or is_end):
                for slot, (value, wanted) in enumerate(zip(call.operands, call.gradients, strict=True)):
                    if wanted:
                        self._arrive(held, value, self._given(call, slot, value, arrived, now), now)
            for gradient in given:
                if gradient is not None:
                    self._release(gradient, now)
        for (
            name,
            layout,
        ), gradient in held.items():  # of parameters; with several micro-batches added to what is there
            tensor = self.journeys[name].tensor
            if self.several:
                self._add("working", name, gradient.nbytes, gradient.since, gradient.last)
                continue
            is_cast = tensor.stored_size != tensor.element_size
            self._add("gradients", name, gradient.nbytes, gradient.since, self.end - is_cast)
            if is_cast:  # autograd casts back what it cast first when all else is done
                self._add("gradients", name, self.pricer.stored_nbytes(tensor, layout), self.end, self.end)

    def _is_once_a_step(self, name: str) -> bool:
        """Whether a parameter's copies are made and its gradients reduced apart from the micro-batches."""
        return self.several and self.plan.lifetimes.get(name) in ONCE_A_STEP

    def _given(self, call: Call, slot: int, value: Value, arrived: _Gradient | None, now: int) -> _Gradient:
        """The gradient that a call's backward gives one operand."""
        if call.op is not None:
            handed = slot in handed_on(call.op.node, call.op.rule)
        else:
            handed = call.step is not None and not call.step.backward
        if handed and arrived is not None:
            arrived.owners += 1
            return arrived
        return _Gradient(value[0], self._nbytes(value), now, now)

    def _arrive(self, held: dict[Value, _Gradient], value: Value, new: _Gradient, now: int) -> None:
        """Autograd adds in place where nothing else holds the sum so far, and else writes a new one."""
        old = held.get(value)
        if old is None:
            held[value] = new
        elif old.owners == 1:
            old.last = now
            self._release(new, now)
        else:
            held[value] = _Gradient(value[0], old.nbytes, now, now)
            self._release(old, now)
            self._release(new, now)

    def _release(self, gradient: _Gradient, now: int) -> None:
        gradient.owners -= 1
        if not gradient.owners:
            self._add("working", gradient.name, gradient.nbytes, gradient.since, now)

    def _beside(self, number: int, call: Call) -> None:
        """Temporary bytes of one call, and what autograd keeps inside it."""
        forward, backward = number, self.backward[number]
        if call.step is not None:
            source, target = (self._nbytes(v) for v in (call.operands[0], call.results[0]) if v is not None)
            step = call.step
            self._add("working", call.operands[0][0], buffers(step.forward, step, source, target), forward, forward)
            if any(call.gradients):
                self._add(
                    "working", call.operands[0][0], buffers(step.backward, step, target, source), backward, backward
                )
            return
        op = call.op
        assert op is not None
        price = self.pricer.op(op, self.plan.choices[op.name])
        unread = zip(op.result_shapes, op.result_sizes, price.results, call.results, strict=True)
        nobodys = sum(self.pricer.nbytes(s, size, layout) for s, size, layout, value in unread if value is None)
        if op.rule.alias is None:
            self._add("working", op.name, price.spare_forward + nobodys, forward, forward)
        if any(call.gradients):
            self._add("working", op.name, price.spare_backward, backward, backward)
        if price.kept:
            self._add("activations", op.name, price.kept, self.replay.get(number, forward), backward)


def regathered(path: list[Step]) -> list[Step]:
    """The gathers that backward repeats to remake the end of `path`: those after the last other computed step."""
    out: list[Step] = []
    for step in reversed(path):
        if step.forward == "all_gather":
            out.append(step)
        elif step.forward:
            break
    return out


def buffers(kind: str, step: Step, source: int, target: int) -> int:
    """Bytes that a collective allocates beside operand and result: chunks put in order along a dim but the first."""
    sides = [p.dim for p in (step.before, step.after) if isinstance(p, Shard)]
    if kind == "all_to_all":
        return 2 * source
    if kind == "all_gather":
        return target if sides[0] else 0
    if kind == "reduce_scatter":
        return source if sides[0] else 0
    return 0
