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

from autopar.lower.calls import WAIT, Call, make_calls
from autopar.lower.copies import running, woven_calls
from autopar.lower.fused import Fused, find_fused
from autopar.lower.journeys import Journey, make_journeys, parameters_journeys
from autopar.lower.program import Program
from autopar.lower.replays import Replays, Value, find_replays, root_of
from autopar.lower.target import Target
from autopar.placement import Layout
from autopar.plan import ONCE_A_STEP, Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredStep:
    """A step in order.

    calls: those of forward, each with its number.
    at: number of the call that an op is, by the op's position.
    fused: the bucket of each value that is made in one; first: number of the first call of each.
    backward, replay: moments of a call's backward pass and of its recomputation, by its number; end: the optimizer's.
    """

    plan: Plan
    program: Program
    target: Target
    journeys: dict[str, Journey]
    replays: Replays
    calls: list[Call]
    at: dict[int, int]
    fused: dict[Value, Fused]
    first: dict[Fused, int]
    backward: dict[int, int]
    replay: dict[int, int]
    end: int

    def root(self, name: str, layout: Layout) -> Value:
        """The value whose storage a tensor in a layout is."""
        return root_of(self.program, self.plan, self.target, self.journeys, name, layout)

    def group(self, call: Call) -> Fused | None:
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

    def under(self, plan: Plan) -> "LoweredStep":
        """The step of a plan in which nothing differs but how parameters travel and in which buckets."""
        journeys = {**self.journeys, **parameters_journeys(self.program, plan, self.target)}
        is_again = "use" in plan.lifetimes.values()  # else backward asks for no parameter's redistribution
        replays = find_replays(plan, self.program, self.target, journeys) if is_again else self.replays
        return _in_order(plan, self.program, self.target, journeys, replays)


def lower(
    plan: Plan, program: Program, target: Target, sent: Mapping[str, Layout] = MappingProxyType({})
) -> LoweredStep:
    """The step of a plan.

    sent: of a pipeline's stage, layouts in which the next stage takes what this one sends.
    """
    plan, program = running(plan, program)
    journeys = make_journeys(program, plan, target, sent)
    return _in_order(plan, program, target, journeys, find_replays(plan, program, target, journeys))


def _in_order(
    plan: Plan, program: Program, target: Target, journeys: dict[str, Journey], replays: Replays
) -> LoweredStep:
    calls = make_calls(program, plan, target, journeys)
    if program.copies > 1:
        calls = woven_calls(calls, program, plan)
    at = {call.op.position: i for i, call in enumerate(calls) if call.op is not None}
    backward, replay, end = _moments(calls, at, replays)
    step = LoweredStep(
        plan=plan, program=program, target=target, journeys=journeys, replays=replays, calls=calls, at=at,
        fused=find_fused(plan, journeys), first={}, backward=backward, replay=replay, end=end,
    )  # fmt: skip
    return replace(step, first=_first_calls(step))


def _first_calls(step: LoweredStep) -> dict[Fused, int]:
    found: dict[Fused, int] = {}
    for number, call in enumerate(step.calls if step.fused else ()):
        if (group := step.group(call)) is not None:
            found.setdefault(group, number)
    return found


def _moments(calls: list[Call], at: dict[int, int], replays: Replays) -> tuple[dict[int, int], dict[int, int], int]:
    """Of backward passes, of recomputations, and of the optimizer's step."""
    steps = {v: i for i, c in enumerate(calls) if c.step is not None and c.part != WAIT for v in c.results}
    waiting: dict[int, list[int]] = defaultdict(list)
    for position, waits in replays.ops.items():
        waiting[at[waits]].append(at[position])
    for value, (_, waits) in replays.steps.items():
        waiting[at[waits]].append(steps[value])
    moment, backward, replay = len(calls), dict[int, int](), dict[int, int]()
    for number in reversed(range(len(calls))):
        for again in sorted(waiting[number]):
            replay[again] = moment
            moment += 1
        backward[number] = moment
        moment += 1
    return backward, replay, moment
