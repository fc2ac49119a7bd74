"""Does a rank notice that another died where a step sends it nothing? All ranks call the roll beside such steps.

Ranks that a plan joins notice: their next collective fails. A plan may compute alike on all ranks of a mesh axis and
join none of them. Then each step sums one number over all ranks while it computes, and the next step looks whether the
sum came: a lost rank is noticed one step later, and ranks stay within a step of each other.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from autopar.rules.rule import splits
from autopar.runtime.lost_ranks import among_ranks
from autopar.values.placement import Shard
from autopar.values.plan import Plan
from autopar.values.stage_plan import StagePlan


def joins_all_ranks(plan: Plan | StagePlan) -> bool:
    """Whether a training step surely sends something over every mesh axis, in some stage; stages always send.

    What is split over an axis is gathered or summed there before the loss is; what is computed whole need not be.
    """
    stages = plan.stages if isinstance(plan, Plan) else (plan,)
    axes = range(len(plan.mesh.shape))
    return all(plan.mesh.shape[axis] == 1 or any(_joins(stage, axis) for stage in stages) for axis in axes)


def _joins(stage: StagePlan, axis: int) -> bool:
    split: Iterable[bool] = (splits(choice[axis]) for choice in stage.choices.values())
    return any(split) or any(isinstance(layout.axes[axis], Shard) for layout in stage.layouts.values())


class RollCall:
    """Of the steps of one module; all ranks make one of the same plan."""

    def __init__(self) -> None:
        self._is_needed: bool | None = None
        self._answers: Any = None

    def next_step(self, plan: Plan | StagePlan) -> None:
        """Begin to call the roll, once the last one is answered.

        Raises:
            RankError: if a rank did not answer it.
        """
        if self._is_needed is None:
            self._is_needed = dist.get_world_size() > 1 and not joins_all_ranks(plan)
        if not self._is_needed:
            return
        with among_ranks("a roll call of all ranks, beside a plan that sends nothing to some,"):
            answers, self._answers = self._answers, None
            if answers is not None:
                answers.wait()
            self._answers = dist.all_reduce(torch.zeros(1), async_op=True)
