"""Which redistribution steps does a plan insert, and which of them have a backward pass?

Consumers in graph order; a layout of a tensor is made once and shared by all. Every operand is brought from its
producer's layout to the one that its consumer's choice wants, step by step along the plan's route. The loss ends
Invariant: whole, and with the whole gradient, on every rank; so does what a call returns, but on axes that split it.
What a pipeline's stage sends ends in the layout in which the next stage takes it, so that each rank sends to its
counterpart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.lower.memory_layouts import find_memory_layouts
from autopar.lower.program import Program, Tensor
from autopar.lower.target import LocalOp, Target
from autopar.values.mesh import Mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard
from autopar.values.redistribution import Message, Step, messages
from autopar.values.stage_plan import StagePlan

SINK = -1
"""Position of the reader that stands for the graph's output."""


@dataclass(slots=True, kw_only=True)
class Redistributed:
    """One tensor's way: `made[layout]` is the step that makes it; `wanted` are (reader, operand, layout).

    is_copy: of a view's result, that it has storage of its own; is_contiguous: of an op's, how it lies
    (`lower.memory_layouts`).
    """

    tensor: Tensor
    source: Layout
    made: dict[Layout, Step] = field(default_factory=dict)
    wanted: list[tuple[int, int, Layout]] = field(default_factory=list)
    in_backward: set[Layout] = field(default_factory=set)
    is_copy: bool = False
    is_contiguous: bool = True

    def path(self, layout: Layout) -> list[Step]:
        """Steps from the source to `layout`."""
        out: list[Step] = []
        while layout != self.source:
            step = self.made[layout]
            out.append(step)
            layout = step.source
        return out[::-1]

    def is_copied(self, layout: Layout) -> bool:
        """Whether `layout` is other storage than the source: some step computes something in the forward pass."""
        return any(step.forward for step in self.path(layout))

    def is_laid_anew(self, layout: Layout) -> bool:
        """Whether some step made it contiguous; a division leaves it as it lies."""
        return any(step.forward not in ("", "divide") for step in self.path(layout))


def sent_by(step: Step, tensor: Tensor, plan: StagePlan) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What a redistribution step of a tensor sends, forward and back."""
    size = tensor.element_size
    sum_size = plan.config.reduced_size(size) if tensor.kind == "parameter" else size
    return messages(step, tensor.shape, size, plan.mesh, sum_size)


def regathered(path: list[Step]) -> list[Step]:
    """The gathers that backward repeats to remake the end of `path`: those after the last other computed step."""
    out: list[Step] = []
    for step in reversed(path):
        if step.forward == "all_gather":
            out.append(step)
        elif step.forward:
            break
    return out


def wanted_by_output(
    program: Program,
    mesh: Mesh,
    sent: Mapping[str, Layout],
    redistributed: Mapping[str, Redistributed],
    *,
    gathers: bool = False,
) -> Iterator[tuple[str, Layout]]:
    """What the graph's output asks of the tensors that it returns, in order.

    sent: what a stage sends on, and how.
    gathers: what a call returns ends whole on every rank.
    """
    for name in program.ends if program.loss else ():
        yield name, Layout((INVARIANT,) * mesh.num_axes)
    yield from sent.items()
    for name in program.captured.outputs:
        yield name, _returned(redistributed[name], gathers=gathers)
    for name in program.mutated:
        yield name, Layout((REPLICATE,) * mesh.num_axes)


def _returned(one: Redistributed, *, gathers: bool) -> Layout:
    """How a caller has a value: split as it was made, else whole, with the whole gradient on every rank."""
    whole = INVARIANT if one.tensor.requires_grad else REPLICATE
    kept = () if gathers else one.source.sharded_dims()
    axes = tuple(p if isinstance(p, Shard) and p.dim in kept else whole for p in one.source.axes)
    return replace(one.source, axes=axes) if kept else Layout(axes)


def redistribute(
    program: Program,
    plan: StagePlan,
    target: Target,
    sent: Mapping[str, Layout] = MappingProxyType({}),
    *,
    gathers: bool = False,
) -> dict[str, Redistributed]:
    """The way of every tensor under `plan`; `sent`, `gathers`: as of `wanted_by_output`."""
    prices = [target.op(op, plan.choices[op.name]) for op in program.ops]
    out = {name: _redistributed(tensor, program, plan, prices) for name, tensor in program.tensors.items()}
    for name, layout in [*wanted_by_output(program, plan.mesh, sent, out, gathers=gathers)]:
        wanted = _added(out[name], plan, layout) if name in program.ends[1:] and program.copies > 1 else layout
        _travel(out[name], plan, SINK, 0, wanted, name in program.ends)
    memory_layouts = find_memory_layouts(program, plan, target, lambda name, layout: out[name].is_laid_anew(layout))
    for name in memory_layouts.copies:
        out[name].is_copy = True
    for name, value in (program.strided | memory_layouts.strides).items():
        out[name].is_contiguous = value.is_contiguous()
    return out


def redistribute_parameters(program: Program, plan: StagePlan, target: Target) -> dict[str, Redistributed]:
    """The way of every parameter under `plan`."""
    prices = [target.op(op, plan.choices[op.name]) for op in program.ops]
    parameters = {name: tensor for name, tensor in program.tensors.items() if tensor.kind == "parameter"}
    return {name: _redistributed(tensor, program, plan, prices) for name, tensor in parameters.items()}


def splits_parameters(plan: StagePlan, redistributed: Mapping[str, Redistributed], target: Target) -> bool:
    """Whether ranks have a part of some parameter: then the runtime has DTensors of all (`runtime.state.all_whole`).

    Counted, as copies are, of plans in buckets alone: searches add up parameter by parameter, and one for which others
    pay too is more than they see. What buckets save is less by it.
    """
    parameters = [j for j in redistributed.values() if j.tensor.kind == "parameter"] if plan.buckets else []
    return any(target.is_split(one.tensor, one.source) for one in parameters)


def _redistributed(tensor: Tensor, program: Program, plan: StagePlan, prices: Sequence[LocalOp]) -> Redistributed:
    """What a tensor's readers ask of it; not what the graph's output does."""
    source = plan.layouts[tensor.name] if tensor.producer is None else prices[tensor.producer].results[tensor.index]
    one = Redistributed(tensor=tensor, source=source)
    for position, slot in program.readers[tensor.name]:
        _travel(one, plan, position, slot, prices[position].operands[slot], program.ops[position].has_backward)
    return one


def _added(one: Redistributed, plan: StagePlan, layout: Layout) -> Layout:
    """In which layout another copy's loss is added to the first's: before the sum over ranks that nothing waits for."""
    steps = _steps(one, plan, layout) if layout != one.source else ()
    is_sum = bool(steps) and (steps[-1].forward, steps[-1].backward) == ("all_reduce", "")
    return steps[-1].source if is_sum else layout


def _travel(one: Redistributed, plan: StagePlan, position: int, slot: int, layout: Layout, backward: bool) -> None:
    tensor = one.tensor
    one.wanted.append((position, slot, layout))
    if layout != one.source and layout not in one.made:
        for step in _steps(one, plan, layout):
            if step.target != one.source and step.target not in one.made:
                one.made[step.target] = step
    if backward and tensor.requires_grad:
        one.in_backward.update(step.target for step in one.path(layout))


def _steps(one: Redistributed, plan: StagePlan, wanted: Layout) -> tuple[Step, ...]:
    tensor = one.tensor
    steps = plan.steps(tensor.name, one.source, wanted, tensor.shape, tensor.element_size, tensor.requires_grad)
    return tuple(step.among(plan.mesh) for step in steps)
