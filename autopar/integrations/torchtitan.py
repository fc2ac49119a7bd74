"""How does torchtitan train a planned model? The plan gives its `parallelize_fn` and `pipelining_fn`.

    spec = model_registry("debugmodel")                            # a torchtitan ModelSpec
    spec.parallelize_fn = parallelize_fn(plan, loss_fn=loss_fn)    # plan of spec.model, made or loaded before
    spec.pipelining_fn = pipelining_fn(plan, loss_fn=loss_fn)      # of a plan with stages

torchtitan keeps data, loss, optimizer, clipping, checkpoints and its graph passes. Its data-parallel degree is how many
ranks a batch is dealt out to: the product of leading axes of the plan's mesh. What is recomputed, gathered again and
bucketed is for its own passes to say, which find torch's functional collectives in the traced step. torchtitan itself
is not imported: this is its interface (release 0.3.0).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage

from autopar.api.model_plan import ModelPlan
from autopar.errors import ArgumentError, MeshError
from autopar.integrations.placed import PlacedGraph, PlacedModule, placed_graphs
from autopar.runtime.groups import check_world, group_across
from autopar.runtime.launch import device as own_device
from autopar.runtime.private_torch import greet_others
from autopar.runtime.schedules import SINGLE, schedule_class
from autopar.values.precision import PRECISIONS

LossFn = Callable[..., Any]


def parallelize_fn(plan: ModelPlan, *, loss_fn: LossFn | None = None) -> Callable[..., nn.Module]:
    """A `parallelize_fn` that places a model as a plan of one stage says.

    Args:
        plan: from `autopar.plan` or `autopar.load_plan`, of the model that torchtitan builds.
        loss_fn: as given to `plan`, for a loaded plan.

    The function raises:
        MeshError: if torchtitan's degrees are not those of the plan's mesh.
        ArgumentError: for degrees or a precision that the plan does not have, or a forward that cannot be traced.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, training: Any = None, **_: Any) -> nn.Module:
        if plan.num_stages > 1:
            raise ArgumentError(
                f"the plan has {plan.num_stages} stages; give spec.pipelining_fn = pipelining_fn(plan) and set "
                f"--parallelism.pipeline_parallel_degree {plan.pipeline}"
            )
        check_degrees(plan, parallel_dims, training)
        bound = plan.bind(model, loss_fn=loss_fn)
        (placed,) = placed_graphs(bound, model, batch_degree(parallel_dims))
        return PlacedModule(placed, model, bound)

    return parallelize


def pipelining_fn(plan: ModelPlan, *, loss_fn: LossFn | None = None) -> Callable[..., Any]:
    """A `pipelining_fn` that cuts a model into the stages of a plan and places each.

    Args:
        plan, loss_fn: as of `parallelize_fn`.

    The function raises as that of `parallelize_fn`, and
        PlanMismatchError: if a stage after the first reads an input.
    """

    planned_loss = loss_fn

    def pipeline(
        model: nn.Module, *, parallel_dims: Any, loss_fn: LossFn, training: Any = None, **_: Any
    ) -> tuple["StagedSchedule", list[nn.Module], bool, bool]:
        if plan.num_stages == 1:
            raise ArgumentError("the plan has one stage; set --parallelism.pipeline_parallel_degree 1")
        check_degrees(plan, parallel_dims, training)
        bound = plan.bind(model, loss_fn=planned_loss)
        placed = placed_graphs(bound, model, batch_degree(parallel_dims))
        group = group_across(plan.mesh, tuple(range(plan.pipeline)))
        own = plan.stages_of(dist.get_rank() // plan.mesh.size)
        modules = [PlacedModule(placed[number], model, bound) for number in own]
        stages = []
        for number, module in zip(own, modules, strict=True):
            took, gave = _examples(placed[number], module)
            described = PipelineStage(
                module, number, plan.num_stages, own_device(), input_args=took, output_args=gave, group=group
            )
            greet_others(described)
            stages.append(described)
        schedule = StagedSchedule(stages, plan, loss_fn)
        return schedule, [*modules], 0 in own, plan.num_stages - 1 in own

    return pipeline


class StagedSchedule:
    """A schedule of `torch.distributed.pipelining` that takes a step's micro-batches as torchtitan gives them."""

    def __init__(self, stages: Sequence[PipelineStage], plan: ModelPlan, loss_fn: LossFn) -> None:
        kind = schedule_class(plan.schedule)
        how: dict[str, Any] = {"loss_fn": _scalar(loss_fn), "scale_grads": False}
        given: Any = stages[0] if plan.schedule in SINGLE else list(stages)
        self.schedule = kind(given, plan.microbatches, **how)
        self.microbatches = plan.microbatches

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Forward and backward of all micro-batches.

        Args:
            arg_mbs: of the first stage, inputs of each micro-batch, this rank's rows.
            kwarg_mbs: must be empty: stages after the first take no inputs.
            target_mbs: of the last stage, what the loss takes beside the model's output.
            losses: of the last stage, takes the loss of each micro-batch.
            loss_kwargs: for the loss.
            return_outputs: must be False.

        Raises:
            ArgumentError: for keywords of stages, outputs, or another number of micro-batches.
        """
        if any(kwarg_mbs or ()) or return_outputs:
            raise ArgumentError("stages of a plan take no keywords and return no outputs of a step; leave them out")
        for one in (arg_mbs, target_mbs):
            if one is not None and len(one) != self.microbatches:
                raise ArgumentError(
                    f"{len(one)} micro-batches were given, and the plan is for {self.microbatches}; set "
                    "training.local_batch_size and parallelism.pipeline_parallel_microbatch_size for as many"
                )
        inputs = () if arg_mbs is None else tuple(torch.cat(parts) for parts in zip(*arg_mbs, strict=True))
        target = None if target_mbs is None else torch.cat(list(target_mbs))
        self.schedule.step(*inputs, target=target, losses=losses, loss_kwargs=loss_kwargs, return_outputs=False)


def batch_degree(parallel_dims: Any) -> int:
    """To how many ranks torchtitan deals a batch out."""
    degree: int = parallel_dims.dp_replicate * parallel_dims.dp_shard
    return degree


def check_degrees(plan: ModelPlan, parallel_dims: Any, training: Any) -> None:
    """Raises MeshError or ArgumentError where torchtitan's configuration is not the plan's."""
    check_world(plan.mesh, plan.pipeline, dist.get_world_size())
    for name in ("cp", "ep"):
        if getattr(parallel_dims, name) > 1:
            raise ArgumentError(f"the plan splits what it splits by itself; set the {name} degree to 1")
    pp, tp, rows = parallel_dims.pp, parallel_dims.tp, batch_degree(parallel_dims)
    if pp != plan.pipeline or rows * tp != plan.mesh.size:
        raise MeshError(
            f"torchtitan has pipeline {pp}, data parallel {rows}, tensor parallel {tp}; the plan is for pipeline "
            f"{plan.pipeline} of mesh {plan.mesh}; set degrees whose product is the mesh's, or plan for these ranks"
        )
    asked = None if training is None else training.mixed_precision_param
    computed = str(PRECISIONS[plan.config.precision].compute).removeprefix("torch.")
    if asked is not None and asked != computed:
        raise ArgumentError(
            f"training.mixed_precision_param is {asked}, and the plan computes in {computed}; set it to {computed}, or "
            "plan with precision='bf16-mixed' for bfloat16 on float32 parameters"
        )


def _examples(placed: PlacedGraph, module: PlacedModule) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Meta tensors like those that a stage takes and gives on this rank.

    Raises:
        ArgumentError: if a bool travels, which torch's schedules do not send.
    """
    captured, nodes = placed.local.captured, {node.name: node for node in placed.local.graph.nodes}
    output = next(node for node in reversed(placed.local.graph.nodes) if node.op == "output")
    ends: Any = output.args[0]
    took = [_example(nodes[name]) for name in captured.received]
    if not captured.received:
        rows = module.groups.size(placed.rows)
        took = [torch.empty((s.shape[0] // rows, *s.shape[1:]), dtype=s.dtype, device="meta") for s in captured.inputs]
    return tuple(took), tuple(_example(node) for node in ends[: len(captured.ends)])


def _example(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    if value.dtype == torch.bool:
        raise ArgumentError(f"{node.name}, a bool, would travel between stages; plan other cuts, or without stages")
    made = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return made.requires_grad_(bool(node.meta["requires_grad"]))


def _scalar(loss_fn: LossFn) -> LossFn:
    """A loss of torchtitan's returns metrics beside it."""

    def scalar(*args: Any, **kwargs: Any) -> Tensor:
        made = loss_fn(*args, **kwargs)
        loss: Tensor = made[0] if isinstance(made, tuple) else made
        return loss

    return scalar
