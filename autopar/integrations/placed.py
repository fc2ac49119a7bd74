"""What does a loop see that traces a model, and owns loss, backward pass and optimizer? A plain module of local graphs.

Parameters are DTensors under their names. A call takes this rank's rows of a (micro-)batch and returns this rank's rows
of what the model returns, plain tensors: ranks that share rows have the same. Gradients come by autograd, summed over
ranks as DTensors say, so whatever is computed of the rows is meant as a sum over rows of all ranks. Collectives are
torch's functional ones, so that make_fx follows forward and backward; what is kept, gathered again or bucketed is for
whoever traces to say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.api.again import captor_of
from autopar.api.model_plan import ModelPlan
from autopar.capture.loss import accepted_inputs
from autopar.errors import ArgumentError, BatchError, MeshError, PlanMismatchError
from autopar.lower.emit import emit
from autopar.ops.collectives import all_gather
from autopar.ops.groups import use_functional, use_groups
from autopar.passes.split_stages import cuts_by_state, split_stages
from autopar.runtime.data import local_input
from autopar.runtime.groups import build_groups, flattened_axes
from autopar.runtime.launch import device as own_device
from autopar.runtime.parameters import local_part, padded_part, register_under, to_dtensor
from autopar.runtime.private_torch import local_tensor
from autopar.runtime.state import first_ranks_value, without_value
from autopar.search.following import following_plan
from autopar.values.binding import as_planned
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel, InputSpec, is_random
from autopar.values.inputs import bind_inputs
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGraph:
    """The graph of a stage (or of all) on this rank, whose ends are what its caller has.

    returned: what is around the tensors that the last stage returns; None of a stage that sends on.
    rows: mesh axes over which the rows of a batch are dealt out.
    call: how the model is called, on the rows of all ranks.
    """

    local: LocalModel
    returned: Returned | None
    rows: tuple[str, ...]
    call: Call


def placed_graphs(plan: ModelPlan, model: nn.Module, num_rows: int) -> tuple[PlacedGraph, ...]:
    """The graphs of a plan's stages for a model whose loss is outside.

    Args:
        plan: bound to `model`.
        num_rows: into how many parts the loop deals out the rows of a batch; those ranks that share a part are next to
            each other.

    Raises:
        MeshError: if no leading axes of the plan's mesh have so many ranks.
        ArgumentError: for a forward that draws random numbers or writes buffers.
        PlanMismatchError: if a stage after the first reads an input.
    """
    mesh, captor = plan.mesh, captor_of(plan, model)
    fits = {math.prod(mesh.shape[:count]): count for count in range(mesh.num_axes, -1, -1)}
    if num_rows not in fits:
        raise MeshError(
            f"the loop deals a batch out to {num_rows} ranks, and the leading axes of mesh {mesh} have "
            f"{', '.join(map(str, sorted(fits)))}; use one of these data-parallel degrees, or plan for another mesh"
        )
    rows = mesh.names[: fits[num_rows]]
    call = captor.call if plan.call is None else plan.call
    batch = next(spec.shape[0] for spec in plan.graph.inputs if spec.shape)
    args, kwargs = accepted_inputs(model, call.args, call.kwargs)
    own = replace(call, args=tuple(args), kwargs=dict(kwargs)).with_batch(batch)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    captured, returned = replace(captor, loss_fn=None).captured(own, captor.modes(), buffers, gradients=True)
    _check(captured)
    if plan.num_stages == 1:
        stages: tuple[CapturedModel, ...] = (captured,)
        numbers: tuple[int, ...] = (0,)
    else:
        owners: dict[str, list[int]] = {}
        for number, part in enumerate(plan.parts):
            for spec in part.parameters:
                for name in spec.names:
                    owners.setdefault(name, []).append(number)
        cuts = cuts_by_state(captured, owners)
        stages, numbers = split_stages(captured, tuple(cuts.values())), (0, *cuts)
        if numbers != tuple(range(plan.num_stages)):
            raise PlanMismatchError(
                f"without its loss the model runs on the stages {numbers} of {plan.num_stages}; plan for fewer stages"
            )
    plans = [
        following_plan(stage, plan.stages[n], plan.parts[n], captor.cluster())
        for stage, n in zip(stages, numbers, strict=True)
    ]
    made = []
    for number, stage in enumerate(stages):
        if number and len(stage.inputs) > len(stage.received):
            read = stage.inputs[0].path
            raise PlanMismatchError(f"stage {number} reads the input {read}, which the loop gives to the first alone")
        if number + 1 < len(stages):
            sent = {name: plans[number + 1].layouts[name] for name in stage.sends}
        else:
            sent = {name: _as_rows(stage, name, rows, plan) for name in stage.outputs}
            stage = replace_ends(stage)
        local = emit(stage, plans[number], sent)
        is_last = number + 1 == len(stages)
        made.append(PlacedGraph(local=local, returned=returned if is_last else None, rows=rows, call=own))
    return tuple(made)


def replace_ends(stage: CapturedModel) -> CapturedModel:
    """The same graph, whose outputs are sent in layouts that are asked for."""
    return replace(stage, sends=stage.outputs, outputs=())


def _as_rows(stage: CapturedModel, name: str, rows: Sequence[str], plan: ModelPlan) -> Layout:
    """Rows on the axes over which they are dealt out, else whole, with the whole gradient."""
    node = stage.nodes[name]
    shape = tuple(node.meta["val"].shape)
    if not shape or shape[0] % math.prod(plan.mesh.shape[: len(rows)]):
        raise BatchError(
            f"the model returns {shape}, whose rows are not dealt out evenly over {' x '.join(rows) or 'no axis'} of "
            f"mesh {plan.mesh}; plan a model that returns the batch first, for a global batch that these ranks divide"
        )
    whole = INVARIANT if node.meta["requires_grad"] else REPLICATE
    return Layout(tuple(Shard(0) if axis in rows else whole for axis in plan.mesh.names))


def _check(captured: CapturedModel) -> None:
    written = [spec.names[0] for spec in captured.written]
    if written:
        raise ArgumentError(f"forward writes {written[0]}, which a traced step cannot; use a model that writes nothing")
    drawn = [node.name for node in captured.graph.nodes if node.op == "call_function" and is_random(node)]
    if drawn:
        raise ArgumentError(f"{drawn[0]} draws random numbers, which a traced step cannot; set dropout to 0")


class PlacedModule(nn.Module):
    """One rank's part of a model, for a loop of somebody else. All ranks make it together.

    Args:
        placed: of `placed_graphs`.
        model: the original, for attributes and first values.
        plan: the bound plan.

    Raises:
        MeshError: if the plan is for another number of ranks.
    """

    def __init__(self, placed: PlacedGraph, model: nn.Module, plan: ModelPlan) -> None:
        super().__init__()
        local = placed.local
        captured, mesh = local.captured, plan.mesh
        axes = flattened_axes(local.graph, mesh) | ({placed.rows} if len(placed.rows) > 1 else set())
        self.device_mesh, self.groups = build_groups(mesh, own_device().type, axes, pipeline=plan.pipeline)
        self.placed, self._model = placed, (model,)  # in a tuple, or its parameters would be this module's
        coordinate = mesh.coordinate(self.groups.rank)
        self._graph = (fx.GraphModule(nn.Module(), local.graph),)
        self._reads = tuple(node.name for node in local.graph.nodes if node.op == "placeholder")
        if hasattr(model, "config"):
            self.config = model.config
        held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        tied: list[tuple[str, nn.Parameter]] = []
        for spec in captured.parameters:
            part = local_part(
                held[spec.names[0]].detach().to(spec.storage), self._layout(spec.placeholder), mesh, coordinate
            )
            value = without_value(part, self.device) if part.is_meta else part.clone().to(self.device)
            stored = to_dtensor(value, self._layout(spec.placeholder), spec.shape, mesh, self.device_mesh)
            parameter = nn.Parameter(stored, requires_grad=spec.trainable)
            register_under(self, spec.names[0], parameter)
            tied += [(name, parameter) for name in spec.names[1:]]
        for name, parameter in tied:
            register_under(self, name, parameter)
        for buffer in captured.buffers:
            own = held[buffer.names[0]].detach()
            value = without_value(own, self.device) if own.is_meta else own.clone().to(self.device)
            for name in buffer.names:
                register_under(self, name, value, buffer.persistent)
        self._constants = {
            name: padded_part(value.to(self.device), self._layout(name), mesh, coordinate)
            for name, value in captured.constants.items()
        }

    def _layout(self, placeholder: str) -> Layout:
        return self.placed.local.plan.layouts[placeholder]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return own_device()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's rows of what the model returns for this rank's rows of a batch; of a stage what it sends on for
        what it receives.

        Raises:
            BatchError: for other rows or inputs than were planned.
            ArgumentError: if the model does not take the arguments.
        """
        captured, plan = self.placed.local.captured, self.placed.local.plan
        values: dict[str, Tensor] = dict(self._constants)
        given = captured.inputs[: len(captured.inputs) - len(captured.received)]
        with use_groups(self.groups), use_functional():
            if captured.received:
                values.update(zip(captured.received, args, strict=True))
            else:
                own_args, own_kwargs = as_planned(
                    self._model[0].forward, self.placed.call, args, kwargs, has_loss_fn=False
                )
                bound = bind_inputs(given, own_args, own_kwargs)
                values.update({spec.placeholder: self._taken(spec, bound[spec.placeholder]) for spec in given})
            for spec in captured.parameters:
                values[spec.placeholder] = _local(self._held(spec.names[0])).to(spec.dtype)
            for buffer in captured.buffers:
                own, layout = self._held(buffer.names[0]), plan.layouts[buffer.placeholder]
                values[buffer.placeholder] = padded_part(own, layout, plan.mesh, plan.mesh.coordinate(self.groups.rank))
            made = self._graph[0](*(values[name] for name in self._reads))[: len(captured.ends)]
        returned = self.placed.returned
        return tuple(made) if returned is None else returned.holding(list(made))

    def _held(self, name: str) -> Tensor:
        """A parameter or buffer as it is now: a tracer puts its own there."""
        path, _, leaf = name.rpartition(".")
        owner = self.get_submodule(path)
        held = owner._parameters.get(leaf)
        value: Tensor = owner._buffers[leaf] if held is None else held  # type: ignore[assignment]
        return value

    def _taken(self, spec: InputSpec, value: Tensor) -> Tensor:
        """This rank's part of an input as the graph wants it, of this rank's rows."""
        plan, rows = self.placed.local.plan, self.placed.rows
        wanted = Layout(tuple(Shard(0) if axis in rows else REPLICATE for axis in plan.mesh.names))
        size = self.groups.size(rows)
        if not spec.shape or value.dim() == 0:
            return value.to(self.device)
        if value.shape[0] * size != spec.shape[0]:
            raise BatchError(
                f"input {spec.path} has {value.shape[0]} rows on this rank; the plan is for {spec.shape[0]} on {size} "
                f"ranks; give {spec.shape[0] // size}"
            )
        if plan.layouts[spec.placeholder] == wanted:
            return local_input(self, plan, spec, value, is_local=True)
        whole = all_gather(value.to(self.device), dim=0, axis=rows, backward="slice") if size > 1 else value
        return local_input(self, plan, spec, whole)

    def init_weights(self, **how: Any) -> None:
        """First values, as the model's own `init_weights(**how)` makes them under rank 0's random numbers. It makes
        the whole model once in the CPU's memory, on every rank.

        Raises:
            ArgumentError: if the model has no `init_weights`.
        """
        model: Any = self._model[0]
        if not callable(getattr(model, "init_weights", None)):
            raise ArgumentError(f"{type(model).__name__} has no init_weights(); load a checkpoint instead")
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(**how)
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                self._take(name, first_ranks_value(value.detach(), self.device))
        model.to("meta")

    def _take(self, name: str, whole: Tensor) -> None:
        """Write this rank's part of a whole parameter or buffer, of those that its stage has."""
        captured, mesh = self.placed.local.captured, self.placed.local.plan.mesh
        for spec in (spec for spec in captured.parameters if name in spec.names):
            part = local_part(whole, self._layout(spec.placeholder), mesh, mesh.coordinate(self.groups.rank))
            local_tensor(self._held(name)).copy_(part)
        if any(name in buffer.names for buffer in captured.buffers):
            self._held(name).copy_(whole)


def _local(value: Tensor) -> Tensor:
    """This rank's part, through which gradients go back."""
    out: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return out
