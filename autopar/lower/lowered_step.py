"""In which order does a rank run the calls of a plan's step: forward, back, and what is recomputed between?

Moments: each call forward, each call backward in reverse, what is recomputed just before the backward pass that waits
for it, and the optimizer's step. Redistributions are calls. With several micro-batches these are the moments of one.
`lower` puts plan and program in this order; its readers are `events` (what runs and sends), `messages` (what is sent),
`live` (what is held).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.lower.buckets import Bucket, find_buckets
from autopar.lower.calls import WAIT, LoweredCall, make_calls
from autopar.lower.interleaved import interleaved_calls, running
from autopar.lower.program import Program
from autopar.lower.recomputation import Recomputation, Value, find_recomputation, root_of
from autopar.lower.redistributions import Redistributed, redistribute, redistribute_parameters
from autopar.lower.target import Target
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStep:
    """A step in order.

    calls: those of forward, each with its number.
    at: number of the call that an op is, by the op's position.
    fused: the bucket of each value that is made in one; first: number of the first call of each.
    backward, replay: moments of a call's backward pass and of its recomputation, by its number; end: the optimizer's.
    """

    plan: StagePlan
    program: Program
    target: Target
    redistributed: dict[str, Redistributed]
    recomputation: Recomputation
    calls: list[LoweredCall]
    at: dict[int, int]
    fused: dict[Value, Bucket]
    first: dict[Bucket, int]
    backward: dict[int, int]
    replay: dict[int, int]
    end: int

    def root(self, name: str, layout: Layout) -> Value:
        """The value whose storage a tensor in a layout is."""
        return root_of(self.program, self.plan, self.target, self.redistributed, name, layout)

    def group(self, call: LoweredCall) -> Bucket | None:
        """The bucket that a step travels with."""
        value = call.results[0]
        return None if call.step is None or value is None else self.fused.get(value)

    @property
    def is_one_of_several(self) -> bool:
        """Whether there are other micro-batches."""
        return self.plan.microbatches > 1 or self.program.captured.is_stage

    def is_once_a_step(self, name: str) -> bool:
        """Whether a parameter's copies are made and its gradients reduced apart from the micro-batches."""
        return self.is_one_of_several and self.plan.lifetimes.get(name) in ONCE_A_STEP

    def under(self, plan: StagePlan) -> "LoweredStep":
        """The step of a plan in which nothing differs but how parameters travel and in which buckets."""
        redistributed = {**self.redistributed, **redistribute_parameters(self.program, plan, self.target)}
        is_again = "use" in plan.lifetimes.values()  # else backward asks for no parameter's redistribution
        recomputation = (
            find_recomputation(plan, self.program, self.target, redistributed) if is_again else self.recomputation
        )
        return _in_order(plan, self.program, self.target, redistributed, recomputation)


def lower(
    plan: StagePlan,
    program: Program,
    target: Target,
    sent: Mapping[str, Layout] = MappingProxyType({}),
    *,
    gathers: bool = False,
) -> LoweredStep:
    """The step of a plan.

    sent: of a pipeline's stage, layouts in which the next stage takes what this one sends.
    gathers: what a call returns ends whole on every rank.
    """
    plan, program = running(plan, program)
    redistributed = redistribute(program, plan, target, sent, gathers=gathers)
    return _in_order(plan, program, target, redistributed, find_recomputation(plan, program, target, redistributed))


def _in_order(
    plan: StagePlan,
    program: Program,
    target: Target,
    redistributed: dict[str, Redistributed],
    recomputation: Recomputation,
) -> LoweredStep:
    calls = make_calls(program, plan, target, redistributed)
    if program.copies > 1:
        calls = interleaved_calls(calls, program, plan)
    at = {call.op.position: i for i, call in enumerate(calls) if call.op is not None}
    backward, replay, end = _moments(calls, at, recomputation)
    step = LoweredStep(
        plan=plan,
        program=program,
        target=target,
        redistributed=redistributed,
        recomputation=recomputation,
        calls=calls,
        at=at,
        fused=find_buckets(plan, redistributed),
        first={},
        backward=backward,
        replay=replay,
        end=end,
    )
    return replace(step, first=_first_calls(step))


def _first_calls(step: LoweredStep) -> dict[Bucket, int]:
    found: dict[Bucket, int] = {}
    for number, call in enumerate(step.calls if step.fused else ()):
        if (group := step.group(call)) is not None:
            found.setdefault(group, number)
    return found


def _moments(
    calls: list[LoweredCall], at: dict[int, int], recomputation: Recomputation
) -> tuple[dict[int, int], dict[int, int], int]:
    """Of backward passes, of recomputations, and of the optimizer's step."""
    steps = {v: i for i, c in enumerate(calls) if c.step is not None and c.part != WAIT for v in c.results}
    waiting: dict[int, list[int]] = defaultdict(list)
    for position, waits in recomputation.ops.items():
        waiting[at[waits]].append(at[position])
    for value, (_, waits) in recomputation.steps.items():
        waiting[at[waits]].append(steps[value])
    moment, backward, replay = len(calls), dict[int, int](), dict[int, int]()
    for number in reversed(range(len(calls))):
        for again in sorted(waiting[number]):
            replay[again] = moment
            moment += 1
        backward[number] = moment
        moment += 1
    return backward, replay, moment
