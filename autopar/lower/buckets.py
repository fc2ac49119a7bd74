"""Which steps of parameters travel in one message? The groups of `passes.fuse_collectives`, found without a graph."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.lower.recomputation import Value
from autopar.lower.redistributions import Redistributed, sent_by
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.placement import is_even
from autopar.values.redistribution import Message, Step
from autopar.values.stage_plan import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """values: what the steps of one message make, a parameter in a layout each; one alone if only backward sends.

    direct: made of storage itself, so that what backward sends may be waited for later.
    """

    values: tuple[Value, ...]
    direct: bool


def find_buckets(plan: StagePlan, redistributed: Mapping[str, Redistributed]) -> dict[Value, Bucket]:
    """The group of every value that is made in one."""
    bucket = {name: number for number, names in enumerate(plan.buckets) for name in names}
    found: dict[tuple[bool, *tuple[object, ...]], list[Value]] = {}
    for name, one in redistributed.items() if bucket else ():
        tensor = one.tensor
        if tensor.kind != "parameter" or name not in bucket:
            continue
        even = is_even(tensor.shape, one.source, plan.mesh)
        lifetime = plan.lifetimes.get(name)
        for layout, step in one.made.items():
            if not _fuses(step) or math.prod(plan.mesh.shape[a] for a in step.axes) == 1:
                continue
            depth = len(one.path(layout)) - 1
            key = (
                *(not depth and even, bucket[name], depth, lifetime in ONCE_A_STEP, tensor.dtype, tensor.requires_grad),
                *(
                    step.forward,
                    step.backward,
                    step.axes,
                    step.inside,
                    lifetime == "use" and step.forward == "all_gather",
                ),
            )
            found.setdefault(key, []).append((name, layout))
    groups = [
        Bucket(values=tuple(v), direct=direct)
        for (direct, *_), v in found.items()
        if len(v) > 1 or (direct and not redistributed[v[0][0]].made[v[0][1]].forward)
    ]
    return {value: group for group in groups for value in group.values}


def gathered_from(group: Bucket, redistributed: Mapping[str, Redistributed]) -> list[Value]:
    """What each value of a group is made of."""
    return [(name, redistributed[name].made[layout].source) for name, layout in group.values]


def _fuses(step: Step) -> bool:
    return step.forward == "all_gather" or (not step.forward and step.backward == "all_reduce")


def bucket_messages(
    group: Bucket, plan: StagePlan, redistributed: Mapping[str, Redistributed], *, backward: bool
) -> tuple[Message, ...]:
    """What a group sends in a pass: what each alone would, together."""
    sent: list[tuple[Message, ...]] = []
    for name, layout in group.values:
        one = redistributed[name]
        if not backward or layout in one.in_backward:
            step, tensor = one.made[layout], one.tensor
            sent.append(sent_by(step, tensor, plan)[backward])
    return tuple(replace(alike[0], nbytes=sum(m.nbytes for m in alike)) for alike in zip(*sent, strict=True))
