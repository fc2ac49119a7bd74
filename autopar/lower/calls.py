"""In which order does a rank run a plan's ops and redistributions? The calls of the local graph, none of them made.

An operand travels just before the first op that wants it so. Backward
runs them in exactly the reverse order, as autograd does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.lower.program import Op, Program
from autopar.lower.recomputation import Value
from autopar.lower.redistributions import SINK, Redistributed
from autopar.lower.target import Target
from autopar.values.placement import Layout
from autopar.values.redistribution import Step
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredCall:
    """An op, or a step of the tensor that `results` names. `gradients`: which operands get a gradient from it.

    part: of a collective in two calls, `START` is where forward begins and backward ends it, `WAIT` the other.
    """

    op: Op | None = None
    step: Step | None = None
    operands: tuple[Value, ...]
    results: tuple[Value | None, ...]
    gradients: tuple[bool, ...]
    part: str = ""


START, WAIT = "start", "wait"


def make_calls(
    program: Program, plan: StagePlan, target: Target, redistributed: dict[str, Redistributed]
) -> list[LoweredCall]:
    """All calls of the forward pass, in order."""
    seen: set[Value] = set()
    calls: list[LoweredCall] = []

    def travel(name: str, layout: Layout) -> Iterator[LoweredCall]:
        one = redistributed[name]
        for step in one.path(layout):
            if (name, step.target) not in seen:
                seen.add((name, step.target))
                yield LoweredCall(
                    step=step,
                    operands=((name, step.source),),
                    results=((name, step.target),),
                    gradients=(step.target in one.in_backward,),
                )

    for op in program.ops:
        price = target.op(op, plan.choices[op.name])
        for name, layout in zip(op.operands, price.operands, strict=True):
            calls += travel(name, layout)
        named = zip(op.results, price.results, strict=True)
        calls.append(
            LoweredCall(
                op=op,
                operands=tuple(zip(op.operands, price.operands, strict=True)),
                results=tuple(None if name is None else (name, layout) for name, layout in named),
                gradients=tuple(g and op.has_backward for g in op.operand_grads),
            )
        )
    for name in (*program.ends, *program.mutated):
        for position, _, layout in redistributed[name].wanted:
            if position == SINK:
                calls += travel(name, layout)
    return calls
