"""Which bytes does a rank hold at every moment of a step? A walk over its calls, forward and back, as autograd goes.

Moments: each call forward, each call backward in reverse, replays just before the backward that waits for them, and the
optimizer's step. Redistributions are calls. With several micro-batches these are the moments of the last one. Live are
    parameters, optimizer   storage of parameters and their optimizer state, always, as wide as they are stored
    gradients               in storage layout, from the first backward that makes one to the end; with several
                            micro-batches from the beginning, and in each layout in use if they are reduced once a step;
                            as wide as stored, but for one micro-batch only after backward
    activations             what autograd saves or a replay reads, from its making, or its replay, to its last use in
                            backward (`lower.recomputation`); views share storage
    gathered                copies of parameters: for the step, kept to backward, or (`use`) only while an op reads
                            them; the part that is cast to what is computed on: for the step, or as long as it is read
    buckets                 (`lower.buckets`) are gathered, or gathered again, when the first of them is used, beside
                            flat buffers; gradients wait for the last of their bucket
    working                 forward: what nothing saves, from its making to its last reader. Backward: gradients of
                            values, from the last reader's backward to the producer's; sums hand theirs on. Both: what
                            a call allocates beside (`rules.spare`, buffers of collectives along a dim but the first)
    inputs                  inputs of the step, buffers and constants, always; their slices as any other value
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator

from autopar.lower.buckets import Bucket, gathered_from
from autopar.lower.calls import START, WAIT, LoweredCall
from autopar.lower.collective_buffers import buffer_nbytes, buffer_spans, keeps_padding, least_nbytes
from autopar.lower.gradients import BackwardPass, Gradients, Noted, Wanted, gradient_holdings
from autopar.lower.holding import Holding, bytes_at
from autopar.lower.in_turn import in_turn
from autopar.lower.lowered_step import LoweredStep
from autopar.lower.prefetch import begun_backward, begun_forward
from autopar.lower.recomputation import Value, saved_of
from autopar.lower.redistributions import SINK, Redistributed, regathered
from autopar.values.redistribution import SUMS, Step


class Live:
    """`bytes[kind]` at every moment; `at[p]` is the number of the call that op p is, its moment forward too;
    `backward` and `replay` are the moments of a call's backward pass and of its replay, `end` that of the optimizer.
    Of a pipeline's stage: what is sent is held from its making to the end of backward, gradients of what was received
    too; `ends` are bytes of each sent storage."""

    def __init__(self, step: LoweredStep) -> None:
        self.step, self.plan, self.program, self.target = step, step.plan, step.program, step.target
        self.redistributed, self.recomputation, self.calls, self.at = (
            step.redistributed,
            step.recomputation,
            step.calls,
            step.at,
        )
        self.fused, self.first = step.fused, step.first
        self.backward, self.replay, self.end = step.backward, step.replay, step.end
        self.ended = {call.results[0]: i for i, call in enumerate(self.calls) if call.part == WAIT}
        self.several = step.is_one_of_several
        self.ends, self.held = dict[Value, int](), dict[Value, str]()  # what a stage's results are: `sent` or `end`
        self.alone: dict[int, list[Value]] = {}  # gathered again, by moment
        self.begun = begun_forward(step)
        self.holdings: list[Holding] = []
        self._values()
        self._parameters()
        self._gradients()
        for number, call in enumerate(self.calls):
            self._temporary(number, call)
        for holding in list(self._again()):
            self._hold(holding)
        self.bytes = bytes_at(self.holdings, self.end)

    def _add(self, kind: str, name: str, nbytes: float, first: int, last: int, role: str = "") -> None:
        self._hold(Holding(kind, name, nbytes, first, last, role))

    def _keep(self, kind: str, value: Value, first: int, last: int) -> None:
        self._hold(Holding(kind, value[0], self._nbytes(value), first, last, layout=value[1]))

    def _hold(self, holding: Holding) -> None:
        if holding.nbytes:
            self.holdings.append(holding)

    def _values(self) -> None:
        """What calls make, and what is handed in; but copies of parameters that live for a use or a step."""
        made: dict[Value, int] = {}
        last: dict[Value, int] = {}
        uses: dict[Value, set[int]] = defaultdict(set)
        for kept, savers in self.recomputation.savers.items():
            uses[kept].update(self.backward[self.at[p]] for p in savers)
        for number, call in enumerate(self.calls):
            if call.part == WAIT:
                continue
            for name, layout in call.operands:
                root = self.step.root(name, layout)
                last[root] = number
                if number in self.replay:
                    uses[root].add(self.replay[number])
            for value in call.results:
                if value is not None and self.step.root(*value) == value:
                    group = self.fused.get(value)
                    made[value] = number if group is None else self.first[group]
                    last[value] = number
        for name in self.program.captured.sends:
            self._sends(name, made)
        self.again = {
            group: min(moments) for group in self.first if (moments := {m for v in group.values for m in uses[v]})
        }
        self.unread = {group: sum(self._nbytes(v) for v in group.values if not uses[v]) for group in self.again}
        read = {self.step.root(name, v) for name, one in self.redistributed.items() for _, _, v in one.wanted}
        hops = [self._nbytes(value) for value in made if self.step.is_once_a_step(value[0]) and value not in read]
        self._add("gathered", "on the way", max(hops, default=0), 0, 0, "once")  # one after another
        for value, number in made.items():
            if value in read or not self.step.is_once_a_step(value[0]):
                self._value(value, number, last[value], uses[value])
        ops = [op for op in self.program.ops if op.rule.in_turn]
        inside = {op.name: self.target.op(op, self.plan.choices[op.name]).sizes.kept for op in ops}
        for moment, value, nbytes in in_turn(
            self.calls, self.backward, self.alone, self.step.root, self._nbytes, inside
        ):
            self._add("gathered", value[0], nbytes, moment, moment)
        for name, one in self.redistributed.items():
            if one.tensor.kind == "parameter":
                self._cast(one, uses)
                self._padded(one, uses)
            elif one.tensor.kind != "op":
                times = self.plan.microbatches if one.tensor.kind == "input" else 1
                self._add("inputs", name, times * self._nbytes((name, one.source)), 0, self.end, "fixed")

    def _sends(self, name: str, made: Container[Value]) -> None:
        """What a stage sends is held, and where it is no contiguous tensor a copy that is."""
        one = self.redistributed[name]
        for layout in (layout for position, _, layout in one.wanted if position == SINK):
            if (root := self.step.root(name, layout)) in made:
                self.held.setdefault(root, "end")
            is_strided = not one.is_contiguous and not one.is_laid_anew(layout)
            if is_strided:
                nbytes = self.ends[name, layout] = self._nbytes((name, layout))
                self._add("activations", name, nbytes, len(self.calls) - 1, self.end - 1, "sent")
            elif root in made:
                self.ends[root], self.held[root] = self._nbytes(root), "sent"

    def _cast(self, one: Redistributed, uses: dict[Value, set[int]]) -> None:
        """Of a parameter: the rank's part as it is computed on, which what is gathered again is made of too."""
        name = one.tensor.name
        last = self.end - 1 if self.several else len(self.calls) - 1
        for layout in () if self.several else (one.source, *one.made):
            path = one.path(layout)
            again = regathered(path) if self.plan.lifetimes.get(name) == "use" else []
            if len(again) == sum(bool(step.forward) for step in path):
                last = max({last} | uses.get((name, layout), set()))
        nbytes = self.target.cast_nbytes(one.tensor, one.source)
        self._add("gathered", name, nbytes, 0, last, "fixed" if self.several else "")

    def _padded(self, one: Redistributed, uses: dict[Value, set[int]]) -> None:
        """Of a parameter that does not divide: the last rank's part with zeros, made again where backward reads it."""
        tensor, source, shape = one.tensor, one.source, self.plan.mesh.shape
        nbytes = least_nbytes(self.target.local_nbytes(tensor, source), tensor.shape, source, shape)
        if nbytes == self.target.local_nbytes(tensor, source) or not one.wanted:
            return
        if self.step.is_once_a_step(tensor.name):
            self._add("gathered", tensor.name, nbytes, 0, self.end - 1, "fixed")
            return
        read = {source, *one.made} if self.plan.lifetimes.get(tensor.name) == "use" else {source}
        self._add("gathered", tensor.name, nbytes, 0, max(self.at.get(p, 0) for p, _, _ in one.wanted))
        for moment in {moment for layout in read for moment in uses.get((tensor.name, layout), ())}:
            self._add("gathered", tensor.name, nbytes, moment, moment)

    def _nbytes(self, value: Value) -> int:
        """Bytes of a value's storage, padding included."""
        one = self.redistributed[value[0]]
        step = one.made.get(value[1])
        return self._size(value) if step is None or not keeps_padding(step) else self._whole(value, step)

    def _whole(self, value: Value, step: Step) -> int:
        """Bytes of what the step that makes a value gathers, scatters or exchanges, padding included."""
        tensor = self.redistributed[value[0]].tensor
        return self.target.wholes(step, tensor.shape, tensor.element_size)[0]

    def _size(self, value: Value) -> int:
        return self.target.local_nbytes(self.redistributed[value[0]].tensor, value[1])

    def _given(self, step: Step, name: str) -> int:
        """Bytes of the storage of the gradient that a step gives."""
        tensor = self.redistributed[name].tensor
        if not keeps_padding(step, backward=True):
            return self._size((name, step.source))
        return self.target.wholes(step, tensor.shape, tensor.element_size)[1]

    def _value(self, value: Value, made: int, last: int, uses: set[int]) -> None:
        one = self.redistributed[value[0]]
        if one.tensor.kind != "op" and not one.is_copied(value[1]):
            return
        kind = {"op": "activations", "parameter": "gathered"}.get(one.tensor.kind, "inputs")
        nbytes = self._nbytes(value)
        if self.step.is_once_a_step(value[0]):
            self._add(kind, value[0], nbytes, 0, self.end - 1, "fixed")
        elif value in self.held:
            layout = None if (again := value in self.recomputation.first) else value[1]
            self._hold(Holding("activations", value[0], nbytes, made, self.end - 1, self.held[value], layout))
            if again:
                self._keep(kind, value, self.replay[made], max(uses))
        elif self.plan.lifetimes.get(value[0]) == "use" and regathered(one.path(value[1])):
            self._add(kind, value[0], nbytes, made, last)
            if uses and value in self.fused:
                self._add(kind, value[0], nbytes, self.again[self.fused[value]], max(uses))
            for moment in () if value in self.fused else uses:
                self.alone.setdefault(moment, []).append(value)
        elif not uses:
            self._add("working" if kind == "activations" else kind, value[0], nbytes, made, last)
        elif value in self.recomputation.first:
            self._add("working", value[0], nbytes, made, last)
            self._keep(kind, value, self.replay[made], max(uses))
        else:
            self._keep(kind, value, made, max(uses))

    def _parameters(self) -> None:
        """Storage and state, and gradients as far as they are there from the beginning."""
        end = self.end
        for one in self.redistributed.values():
            tensor = one.tensor
            if tensor.kind != "parameter":
                continue
            stored = self.target.stored_nbytes(tensor, one.source)
            self._add("parameters", tensor.name, stored, 0, end, "fixed")
            readers = {v for p, _, v in one.wanted if p >= 0 and self.program.ops[p].has_backward}
            if not (tensor.requires_grad and readers):
                continue
            self._add("optimizer", tensor.name, self.target.state_nbytes(tensor, one.source), 0, end, "fixed")
            if self.step.is_once_a_step(tensor.name):
                for layout in readers:
                    nbytes = self.target.stored_nbytes(tensor, layout)
                    self._add("gradients", tensor.name, nbytes, 0, end - 1, "fixed")
                self._add("gradients", tensor.name, stored, end, end, "fixed")
            elif self.several:
                self._add("gradients", tensor.name, stored, 0, end, "fixed")

    def gradients(
        self, begins: Iterable[int] = (), wanted: Wanted = lambda _: True, *, copies: bool = True, noted: Noted = None
    ) -> Gradients:
        """The backward pass, or the part of it for `wanted` values, which may begin at further calls.

        copies: leaves copy a gradient from outside, of what a stage received and sends on as it is, or a shared one.
        noted: of a first of two parts.
        """
        ends = self.program.ends
        first = {i for i, c in enumerate(self.calls) if any(v is not None and v[0] in ends for v in c.results)}
        begin = frozenset({*first, *begins})
        groups = {i: self.step.group(call) for i, call in enumerate(self.calls)}
        buckets = {i: self.first[group] for i, group in groups.items() if group is not None}
        sent, received = self.program.captured.sends, self.program.captured.received
        redistributed = [self.redistributed[name] for name in sent if name in received]
        passed = {
            (j.tensor.name, j.source)
            for j in redistributed
            if j.tensor.requires_grad and (SINK, 0, j.source) in j.wanted
        }
        return Gradients(
            BackwardPass(
                calls=self.calls,
                moments=self.backward,
                begins=begin,
                nbytes=self._size,
                received=self._given,
                skipped=self.step.is_once_a_step,
                wanted=wanted,
                buckets=buckets,
                outside=[value for value in passed if wanted(value)],
                copies=copies,
                noted=noted,
                width=lambda name: self.target.widening(self.redistributed[name].tensor),
            )
        )

    def _gradients(self) -> None:
        """Backward, call by call."""
        found = self.gradients()
        self.summed = found.summed
        for holding in self.holdings_of(found):
            self._hold(holding)
        for (name, layout), gradient in found.held.items():
            tensor = self.redistributed[name].tensor
            if tensor.kind == "parameter" and not self.several:
                is_cast = tensor.element_size * gradient.width != tensor.stored_size
                self._add("gradients", name, gradient.nbytes, gradient.since, self.end - is_cast)
                if is_cast:  # autograd casts back what it cast first when all else is done
                    self._add("gradients", name, self.target.stored_nbytes(tensor, layout), self.end, self.end)

    def holdings_of(self, found: Gradients) -> Iterator[Holding]:
        """What of a backward pass is live for a while, or is added to what there is."""
        return gradient_holdings(found, self.redistributed, self.end, self.program.captured.received, self.several)

    def _temporary(self, number: int, call: LoweredCall) -> None:
        """Temporary bytes of one call, and what autograd keeps inside it."""
        forward, backward = number, self.backward[number]
        if (group := self.step.group(call)) is not None:
            if number == self.first[group]:
                self._rows(group, forward, backward)
            return
        if call.step is not None:
            self._on_its_way(number, call.operands[0][0], call.step)
            return
        op = call.op
        assert op is not None
        price = self.target.op(op, self.plan.choices[op.name])
        unread = zip(op.result_shapes, op.result_sizes, price.results, call.results, strict=True)
        nobodys = sum(self.target.nbytes(s, size, layout) for s, size, layout, value in unread if value is None)
        if op.rule.alias is None:
            self._add("working", op.name, price.sizes.spare_forward + nobodys, forward, forward)
        if any(call.gradients):
            gone = min(self.summed.get(backward, 0), max(price.sizes.spare_backward, 0))  # when gradients are added up
            self._add("working", op.name, price.sizes.spare_backward - gone, backward, backward)
        kept = price.sizes.kept
        if kept and self.target.are_products(op):  # but for what they keep as it is
            kept -= sum(self._size(value) for value in saved_of(op, price, self.target, self.redistributed))
        self._add("activations", op.name, kept, self.replay.get(number, forward), backward)

    def _on_its_way(self, number: int, name: str, step: Step) -> None:
        """What a collective holds beside its operand and its result, forward and back."""
        call, tensor, backward = self.calls[number], self.redistributed[name].tensor, self.backward[number]
        source, target = (self.target.local_nbytes(tensor, layout) for layout in (step.source, step.target))
        ahead, back = self.target.wholes(step, tensor.shape, tensor.element_size)
        role = "once" if self.step.is_once_a_step(name) else ""
        if call.part == START:
            end = self.ended[call.results[0]]
            spans = list(buffer_spans(step.forward, step, source, target, ahead, number, end))
            if any(self.calls[end].gradients):
                spans += buffer_spans(step.backward, step, target, source, back, self.backward[end], backward)
            for span in spans:
                self._add("working", name, *span, role)
        elif not call.part:
            self._add("working", name, buffer_nbytes(step.forward, step, source, target, ahead), number, number, role)
            if any(call.gradients):
                width = self.target.widening(tensor)
                nbytes = width * buffer_nbytes(step.backward, step, target, source, back)
                if width > 1 and step.backward in SUMS:
                    nbytes += width * (target + (source if step.backward == "reduce_scatter" else 0))
                self._add("working", name, nbytes, backward, backward, role)

    def _rows(self, group: Bucket, forward: int, backward: int) -> None:
        """Flat buffers of a bucket: of a gather while it is taken apart, of a scatter until it is on its way."""
        name, layout = group.values[0]
        step = self.redistributed[name].made[layout]
        if step.forward != "all_gather":
            return
        role = "once" if self.step.is_once_a_step(name) else ""
        rows, row = self._buffers(group)
        self._add("working", name, rows + row, self.begun.get(group, forward), forward, role)
        if step.backward == "reduce_scatter" and any(v in self.redistributed[n].in_backward for n, v in group.values):
            width = self.target.widening(self.redistributed[name].tensor)
            self._add("working", name, width * rows, backward, backward, role)

    def _buffers(self, group: Bucket) -> tuple[int, int]:
        """Bytes of all ranks' rows of a bucket, and of this rank's."""
        rows = sum(self._whole(value, self.redistributed[value[0]].made[value[1]]) for value in group.values)
        return rows, sum(map(self._nbytes, gathered_from(group, self.redistributed)))

    def _again(self) -> Iterator[Holding]:
        """What gathering again takes beside what it makes: buffers, and what is gathered from where that just was, too.
        All is gone before the backward pass that reads it makes its own."""
        taken: dict[tuple[int, str], float] = {}
        for group, again in self.again.items():
            name, layout = group.values[0]
            if self.plan.lifetimes.get(name) == "use" and regathered(self.redistributed[name].path(layout)):
                hops = gathered_from(group, self.redistributed)
                others = sum(self._nbytes(v) for v in hops if v in self.fused)
                taken[again, name] = sum(self._buffers(group)) + self.unread[group] + others
        for moment, values in self.alone.items():
            taken[moment, values[0][0]] = max(map(self._beside_gather, values))
        made: dict[int, float] = defaultdict(float)
        for holding in self.holdings if taken else ():
            made[holding.first] += holding.nbytes if holding.kind == "working" else 0.0
        for group, before in begun_backward(self.step, self.again).items():
            begins, nbytes = self.again[before], float(sum(self._buffers(group)))
            made[begins] += nbytes
            yield Holding("working", group.values[0][0], nbytes, begins, self.again[group] - 1)
        for (moment, name), nbytes in taken.items():
            yield Holding("working", name, max(nbytes - made[moment], 0.0), moment, moment)

    def _beside_gather(self, value: Value) -> float:
        """The same of a copy that travels alone."""
        name, one = value[0], self.redistributed[value[0]]
        step, tensor = one.made[value[1]], one.tensor
        hop, source = self.step.root(name, step.source), self.target.local_nbytes(tensor, step.source)
        nbytes = buffer_nbytes(step.forward, step, source, self._size(value), self._whole(value, step))
        return nbytes + (self._nbytes(hop) if hop[1] in one.made else 0)
