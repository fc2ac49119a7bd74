"""Which module runs a plan? That of its stages, or of one stage, which needs no pipeline engine.

Both are `Trainable`: they train, evaluate, save and load alike. Two classes run the steps, because
`torch.distributed.pipelining` runs stages one micro-batch at a time and keeps every backward pass to itself, while one
stage leaves `backward()` to its caller, interleaves micro-batches and compiles.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.lower.emit import emit
from autopar.runtime.module import DistributedModule
from autopar.runtime.pipeline import PipelinedModule, staged_model
from autopar.runtime.trainable import Trainable
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan


def distributed_module(
    captured: CapturedModel, plan: Plan, values: Mapping[str, Tensor], *, exact_random: bool = False, **how: Any
) -> Trainable:
    """The module of a plan; all ranks make it together.

    Args:
        captured: the whole model, one micro-batch of it.
        values: whole parameters and buffers by placeholder.
        exact_random, how: keywords of both modules; beside it sync, bare, seed, captor and outputs.

    Raises:
        PlanMismatchError: if the plan is for another model.
        MeshError, RankError, ArgumentError: as the modules.
    """
    if plan.num_stages > 1:
        return PipelinedModule(staged_model(captured, plan, exact_random=exact_random), values, **how)
    local = emit(captured, plan.single, exact_random=exact_random)
    return DistributedModule(local, values, exact_random=exact_random, **how)
