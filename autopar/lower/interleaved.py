"""What does a step run that has two micro-batches at once? The program and the plan of both, and their calls' order.

The tables of `passes.weave_copies`: what depends on the batch is there twice, parameters and what is made of them
alone once; both copies decide alike. Their calls follow each other as that pass weaves them, and a collective between
two calls is one that starts and one that waits, as `passes.start_and_wait` has them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.lower.calls import START, WAIT, LoweredCall
from autopar.lower.program import Op, Program, Tensor
from autopar.lower.recomputation import Value
from autopar.passes.graph_tools import copied_name
from autopar.passes.weave_copies import COPIES, check_copies, segments
from autopar.values.redistribution import COLLECTIVES, Step
from autopar.values.stage_plan import StagePlan


def running(plan: StagePlan, program: Program) -> tuple[StagePlan, Program]:
    """Plan and program of what runs at once: themselves, but where that is several micro-batches."""
    if plan.copies == 1 or program.copies > 1:
        return plan, program
    check_copies(plan.copies, program.captured)
    made = _Copies(program)
    return _plan_of(plan, made), made.program()


class _Copies:
    """Names of what there is twice, and what each is called in the second copy."""

    def __init__(self, program: Program) -> None:
        self.source = program
        captured = program.captured
        mutated = [b.placeholder for b in captured.buffers if b.mutated_by]
        self.renamed: dict[str, str] = dict(zip(mutated, program.mutated, strict=False))
        own = {spec.placeholder for spec in captured.inputs}
        for op in program.ops:
            if any(name in own or name in self.renamed for name in op.operands):
                own.update([op.name, *(name for name in op.results if name is not None)])
        self.twice = own
        self.renamed |= {name: copied_name(name, 1) for name in own}
        self.counts = program.mutated[len(mutated) :]
        self.new_buffers = program.mutated[: len(mutated)]

    def name(self, name: str) -> str:
        return self.renamed.get(name, name)

    def program(self) -> Program:
        source, first = self.source, len(self.source.ops)
        ops = list(source.ops)
        moved: dict[int, int] = {}
        for op in source.ops:
            if op.name in self.twice:
                moved[op.position] = len(ops)
                ops.append(self._op(op, len(ops)))
        tensors = dict(source.tensors)
        for name, tensor in source.tensors.items():
            if name in self.twice:
                tensors[self.name(name)] = self._tensor(tensor, moved)
        readers = {name: list(found) for name, found in source.readers.items()}
        readers |= {self.name(name): [] for name in source.tensors if name in self.twice}
        for op in ops[first:]:
            for slot, name in enumerate(op.operands):
                readers[name].append((op.position, slot))
        results = [self.name(name) for name in self.new_buffers]
        return replace(
            source,
            ops=tuple(ops),
            tensors=tensors,
            readers={name: tuple(found) for name, found in readers.items()},
            ends=(source.loss, self.name(source.loss)),
            mutated=(*results, *self.counts, *map(self.name, self.counts)),
            copies=COPIES,
            form={},
            copy_of={**dict.fromkeys(self.twice, 0), **{self.name(name): 1 for name in self.twice}},
        )

    def _op(self, op: Op, position: int) -> Op:
        return replace(
            op,
            position=position,
            name=self.name(op.name),
            operands=tuple(map(self.name, op.operands)),
            results=tuple(None if name is None else self.name(name) for name in op.results),
        )

    def _tensor(self, tensor: Tensor, moved: Mapping[int, int]) -> Tensor:
        producer = None if tensor.producer is None else moved[tensor.producer]
        return replace(tensor, name=self.name(tensor.name), producer=producer)


def _plan_of(plan: StagePlan, made: _Copies) -> StagePlan:
    both = made.twice
    return replace(
        plan,
        microbatches=plan.microbatches // COPIES,
        copies=1,
        choices={**plan.choices, **{made.name(n): v for n, v in plan.choices.items() if n in both}},
        layouts={**plan.layouts, **{made.name(n): v for n, v in plan.layouts.items() if n in both}},
        routes={**plan.routes, **{made.name(n): v for n, v in plan.routes.items() if n in both}},
        remade={**plan.remade, **{made.name(n): v for n, v in plan.remade.items() if n in both}},
        recompute=plan.recompute | {made.name(n) for n in plan.recompute if n in both},
    )


def sends(step: Step) -> bool:
    """Whether a step is a collective, on the way there or on that of its gradient."""
    return step.forward in COLLECTIVES or step.backward in COLLECTIVES


def interleaved_calls(calls: Sequence[LoweredCall], program: Program, plan: StagePlan) -> list[LoweredCall]:
    """The calls of both copies, given one copy after the other, in the order in which they run."""
    makers = {value: call for call in calls for value in call.results if value is not None}

    def reads(call: LoweredCall) -> Iterable[LoweredCall]:
        return (makers[value] for value in call.operands if value in makers)

    def is_sent(call: LoweredCall) -> bool:
        return call.step is not None and _copy(call, program) is not None and _splits(call, call.step, plan)

    first = _leading(calls, program, makers)
    lists: list[list[LoweredCall]] = [[] for _ in range(program.copies)]
    for call in calls:
        if call not in first:
            lists[_copy(call, program) or 0].append(call)
    cut = [segments(own, reads, is_sent) for own in lists]
    order = [call for call in calls if call in first]
    for number in range(max(map(len, cut))):
        order += [call for own in cut if number < len(own) for call in own[number]]
    return _in_two(order, {call for call in calls if is_sent(call)})


def _copy(call: LoweredCall, program: Program) -> int | None:
    return program.copy_of.get(call.operands[0][0] if call.op is None else call.op.name)


def _splits(call: LoweredCall, step: Step, plan: StagePlan) -> bool:
    """Not what is made again for backward."""
    return sends(step) and step.target not in plan.remade.get(call.operands[0][0], ())


def _leading(calls: Sequence[LoweredCall], program: Program, makers: Mapping[Value, LoweredCall]) -> set[LoweredCall]:
    """The calls that count labels, which come before all else."""
    counts = set(program.mutated[-program.copies :]) if program.captured.results[len(_buffers(program)) :] else set()
    found: set[LoweredCall] = set()
    for call in reversed(calls):
        made = {value[0] for value in call.results if value is not None}
        if made & counts or call in found:
            found.add(call)
            found.update(makers[value] for value in call.operands if value in makers)
    return found


def _buffers(program: Program) -> list[str]:
    return [b.placeholder for b in program.captured.buffers if b.mutated_by]


def _in_two(order: Sequence[LoweredCall], sent: set[LoweredCall]) -> list[LoweredCall]:
    """Collectives whose reader does not follow at once start where they stand and end before it."""
    place = {call: number for number, call in enumerate(order)}
    reader: dict[Value, int] = {}
    for call in reversed(order):
        reader.update((value, place[call]) for value in call.operands)
    waits: dict[int, list[LoweredCall]] = {}
    out: list[LoweredCall] = []
    for number, call in enumerate(order):
        out += waits.pop(number, [])
        value = call.results[0]
        at = reader.get(value, 0) if call in sent and value is not None else 0
        if at > number + 1:
            waits.setdefault(at, []).append(replace(call, part=WAIT))
            out.append(replace(call, part=START, gradients=(False,)))
        else:
            out.append(call)
    return out
