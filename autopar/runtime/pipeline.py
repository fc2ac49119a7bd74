"""The distributed module of a plan with stages: one rank's stages inside, trained by a pipeline schedule.

Parameters and state-dict keys are those of the original model, as far as this rank's stages have them. All ranks give
`train_step` the same global batch; it returns the loss of that batch on every rank and leaves on every parameter the
gradient that one process would have computed. A weight that several stages share exists in each of them: the same
parameter where they are on one rank, else stored alike on corresponding ranks, which sum its gradients once a step.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError, BatchError
from autopar.lower.emit import emit_stage
from autopar.lower.legality import check_shared
from autopar.passes.split_stages import owners, split_stages
from autopar.runtime.accumulate import gradient_scale, total_loss
from autopar.runtime.agreement import agree, failing_together, shared_number
from autopar.runtime.data import LocalBatch, arguments_of, split_batch
from autopar.runtime.groups import build_groups, flattened_axes, group_across
from autopar.runtime.launch import device as own_device
from autopar.runtime.launch import init
from autopar.runtime.lost_ranks import among_ranks
from autopar.runtime.optimizers import install_check
from autopar.runtime.parameters import check_names
from autopar.runtime.parts import refuse_uncalled_hooks
from autopar.runtime.reductions import Late
from autopar.runtime.schedules import StageSchedule, schedule_class
from autopar.runtime.stage import ONE_BATCH, Stage, Written, written
from autopar.runtime.staged_variant import StagedVariant
from autopar.runtime.state import State, all_whole, first_ranks_value
from autopar.runtime.trainable import Output, Trainable, without_values
from autopar.runtime.variant import GATHERED, Part
from autopar.runtime.variants import Asked, Captor
from autopar.values.estimate import Estimate
from autopar.values.graph import BufferSpec, CapturedModel, InputSpec, ParameterSpec, dtype_of
from autopar.values.inputs import bind_inputs
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.plan import Plan
from autopar.values.schedules import PIPELINE, SPLITTING


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """What the stages of a plan run: their captured models, the local graph of each by number, how it is written, and
    the dtype of the loss.

    captured: the whole model. exact_random: every rank draws for whole tensors, so that a run equals one process.
    """

    captured: CapturedModel
    stages: Sequence[CapturedModel]
    plan: Plan
    local: Callable[[int], LocalModel]
    written: Written
    loss_dtype: torch.dtype
    exact_random: bool = False


def staged_model(captured: CapturedModel, plan: Plan, *, exact_random: bool = False) -> StagedModel:
    """A captured model in the stages of its plan.

    Raises:
        PlanMismatchError: if the plan is for another model.
    """
    stages = split_stages(captured, plan.cuts)
    return StagedModel(
        captured=captured,
        stages=stages,
        plan=plan,
        local=lambda number: emit_stage(stages, plan.stages, number, exact_random=exact_random),
        written=written,
        loss_dtype=dtype_of(captured.nodes[captured.loss]),
        exact_random=exact_random,
    )


class PipelinedModule(Trainable):
    """One rank's stages of a model. All ranks construct it together, in the same order.

    model: what the stages run. values: whole parameters and buffers by placeholder; those on the meta device are left
        empty. sync, bare, seed, captor, outputs: as of `DistributedModule`.

    Raises:
        MeshError: if the plan is not for as many ranks as there are processes.
        RankError: on every rank, if the ranks have different plans, models or libraries.
        PlanMismatchError: if stages that share a weight store it differently, or a stage's plan is not for it.
        ArgumentError: if the torch at hand lacks the schedule.
    """

    takes_slices = False

    def __init__(
        self,
        model: StagedModel,
        values: Mapping[str, Tensor],
        *,
        sync: bool = True,
        bare: bool = False,
        seed: int | None = None,
        captor: Captor | None = None,
        outputs: str = GATHERED,
    ) -> None:
        super().__init__()
        init()
        captured, plan = model.captured, model.plan
        self._model, self.captured, self.plan = model, captured, plan
        self.bare, self.exact_random = bare, model.exact_random
        device = own_device()
        self.pipeline_rank = dist.get_rank() // plan.mesh.size
        with failing_together():
            schedule_class(plan.schedule)
            self._owners = owners(model.stages)
            check_shared(model.stages, plan.stages)
            locals_ = {s: model.local(s) for s in plan.stages_of(self.pipeline_rank)}
            check_names((name for spec in _specs(captured) for name in spec.names), dir(self))
        empty = [spec for spec in _specs(captured) if values[spec.placeholder].is_meta]
        agree({**_facts(captured, plan), "values": f"{len(empty)} of {len(_specs(captured))} on the meta device"})
        axes = _everyones({names for local in locals_.values() for names in flattened_axes(local.graph, plan.mesh)})
        self.device_mesh, self.groups = build_groups(plan.mesh, device.type, axes, pipeline=plan.pipeline)
        pipeline = group_across(plan.mesh, tuple(range(plan.pipeline)))
        assert pipeline is not None
        self.pipeline_group = pipeline
        self._sharing = {
            name: (ranks, group_across(plan.mesh, ranks))
            for name, stages_ in sorted(self._owners.items())
            if len(ranks := tuple(sorted({plan.stage_rank(s) for s in stages_}))) > 1
        }
        self.seed = shared_number(torch.initial_seed() % 2**63 if seed is None else seed)
        self.stages: list[Stage] = []
        whole = all_whole(plan.stages[s].layouts[name] for name, stages_ in self._owners.items() for s in stages_)
        with torch.no_grad():
            for number, local in locals_.items():
                state = State(
                    local, self.groups.rank, self.device_mesh, device, plain=whole, is_stage=plan.pipeline > 1
                )
                state.register(self, values, sync=False)
                splits = plan.schedule in SPLITTING
                stage = Stage(number, local, state, self.groups, self, splits=splits, written=model.written)
                stage.sends_away = _is_away(plan, number, number + 1)
                stage.returns_away = _is_away(plan, number, number - 1)
                self.stages.append(stage)
            if sync:
                self._take_first_ranks(values)
        own = {name for state in self.states for spec in _specs(state.local.captured) for name in spec.names}
        self.lacks({name for spec in empty for name in spec.names} & own)
        self._elsewhere = {name for spec in _specs(captured) for name in spec.names} - own
        self.bind()
        install_check()
        self._schedule = StageSchedule(plan, model.stages, self.stages, self.pipeline_group, model.loss_dtype)
        self._take_captor(captor, outputs, self._make_variant)
        self.training = captured.training

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return own_device()

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(stage.state for stage in self.stages)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        return self.captured.inputs

    def names_elsewhere(self) -> Iterable[str]:
        return self._elsewhere

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the global batch, without gradients; all ranks call this.

        Raises:
            ArgumentError: where gradients are wanted.
            BatchError: if a tensor is missing or has another shape than was planned.
            CaptureError, PlanMismatchError: if another call cannot be captured, or stages cannot run it in turn.
        """
        if torch.is_grad_enabled():
            raise ArgumentError(
                f"the plan runs {self.plan.num_stages} stages, each with a backward pass of its own; call "
                "module.train_step(batch), or the module under torch.no_grad() for the loss alone"
            )
        if args and isinstance(args[0], LocalBatch):
            raise BatchError("a plan with stages takes the global batch on every rank, and was given a LocalBatch")
        args, kwargs = self.bound(args, kwargs)
        asked, variants = Asked(args=args, kwargs=kwargs), self._variants
        if variants is not None and not (
            self.bare and variants.captor.returns_loss(args, kwargs) and variants.is_planned(self, asked)
        ):
            return variants.run(self, asked)
        self._begin(bind_inputs(self.inputs, args, kwargs))
        self._schedule.evaluate()
        for stage in self.stages:
            stage.abandon()
        loss, _ = self._everyones_loss()
        return loss if self.bare else Output(loss)

    def train_step(self, batch: Any) -> Tensor:
        """As of any module; the planned call alone.

        Raises:
            ArgumentError: in another mode, or with other arguments, than were planned.
        """
        if self._variants is not None and not isinstance(batch, LocalBatch):
            self.flush()
            self.refuse_autocast()
            refuse_uncalled_hooks(self)
            args, kwargs = self.bound(*arguments_of(batch))
            _check_whole(self.inputs, self.plan.microbatches, bind_inputs(self.inputs, args, kwargs))
            if not self._variants.is_planned(self, Asked(args=args, kwargs=kwargs)):
                raise ArgumentError(
                    "stages train the call that was planned, in its mode and with its arguments; call module.train(), "
                    "or plan again with these arguments"
                )
        return super().train_step(batch)

    def _twin(self) -> "PipelinedModule":
        captor, empty = None if self._variants is None else self._variants.captor, without_values(self.captured)
        own: dict[str, Any] = {"seed": self.seed, "captor": captor, "outputs": self._outputs, "bare": self.bare}
        return type(self)(self._model, empty, sync=False, **own)

    def _make_variant(self, captured: CapturedModel, returned: Returned, gathers: bool) -> StagedVariant:
        assert self._variants is not None
        stages = self._variants.captor.stages(captured, gathers=gathers)
        mesh, own = self.plan.mesh, {stage.number: stage for stage in self.stages}
        axes = {names for _, local in stages for names in flattened_axes(local.graph, mesh)}
        groups = build_groups(mesh, self.device.type, axes, pipeline=self.plan.pipeline)[1]
        self.groups.groups.update(groups.groups)
        parts = {
            number: Part(self, own[number].state, local, Late(own[number].state.add_gradient))
            for number, local in stages
            if number in own
        }
        state = self.stages[0].state
        return StagedVariant(self.plan, stages, parts, state, self.pipeline_group, captured, returned)

    def step(self, inputs: Mapping[str, Tensor], *, is_local: bool = False) -> Tensor:
        if is_local:
            raise BatchError("a plan with stages takes the global batch on every rank, and was given a LocalBatch")
        self._begin(inputs)
        self._schedule.train()
        loss, scale = self._everyones_loss()
        for placeholder, gradient in self._gradients(scale).items():
            self._state_of(placeholder).add_gradient(placeholder, gradient)
        return loss

    def receive_buffers(self) -> Iterable[Tensor]:
        """Buffers of what this rank's stages receive; none before the first step."""
        return self._schedule.buffers()

    def local_gradient(self, placeholder: str) -> Tensor | None:
        """This rank's part of the gradient of a parameter that its stages have, None if there is none yet."""
        return self._state_of(placeholder).gradient(placeholder)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients of the model so that their norm together is at most `max_norm`; that norm before.

        As `torch.nn.utils.clip_grad_norm_`, which sees one rank's stages alone. All ranks call this.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        named = {spec.placeholder: state for state in self.states for spec in state.local.captured.parameters}
        for placeholder, state in named.items():
            gradient = state.parameters[placeholder].grad
            counted = self.plan.stage_rank(self._owners[placeholder][0]) == self.pipeline_rank
            if gradient is not None and counted:
                norm = torch.linalg.vector_norm(gradient)
                with among_ranks(f"summing the norm of {placeholder}"):
                    squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
        with among_ranks("summing the norms of stages"):
            dist.all_reduce(squares, group=self.pipeline_group)
        total = squares.sqrt()
        dtype = max((p.dtype for p in self.parameters()), key=lambda d: d.itemsize, default=total.dtype)
        nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, total.to(dtype))
        return total

    def _begin(self, inputs: Mapping[str, Tensor]) -> None:
        self.check_initialized()
        self.refuse_autocast()
        _check_whole(self.inputs, self.plan.microbatches, inputs)
        count = self.plan.microbatches
        parts = split_batch(self.inputs, count, inputs)
        draws = self.next_draws(count)
        for stage in self.stages:
            stage.begin(parts, draws)

    def _everyones_loss(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the step and what its gradients are scaled by, from the ranks of the last stage."""
        accumulation = self.captured.accumulation or ONE_BATCH
        source = self.plan.stage_rank(self.plan.num_stages - 1)
        told = torch.zeros(2, dtype=torch.float64, device=self.device)
        last = self.stages[-1]
        if self.pipeline_rank == source:
            told[0] = total_loss(accumulation, last.losses, last.counts)
            told[1] = 1.0 if (scale := gradient_scale(accumulation, last.counts)) is None else scale
        with among_ranks("telling all stages the loss"):
            dist.broadcast(told, group=self.pipeline_group, group_src=source)
        loss, scale = told.unbind()
        return loss.to(self._model.loss_dtype), None if accumulation.count is None else scale

    def _gradients(self, scale: Tensor | None) -> dict[str, Tensor]:
        """The step's gradients of this rank's parameters, by placeholder, summed over the stages that share them."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            for placeholder, gradient in stage.end(scale).items():
                found[placeholder] = found[placeholder].add_(gradient) if placeholder in found else gradient
        for placeholder, (ranks, group) in self._sharing.items():
            leaf = self._state_of(placeholder).stored[placeholder] if self.pipeline_rank in ranks else None
            if leaf is not None and leaf.requires_grad:
                own = found.get(placeholder)
                total = torch.zeros_like(leaf, requires_grad=False) if own is None else own.contiguous()
                self.groups.count("all_reduce", PIPELINE, total.numel() * total.element_size())
                with among_ranks(f"summing gradients of {placeholder}, which stages share,"):
                    dist.all_reduce(total, group=group)
                found[placeholder] = total
        return found

    def _state_of(self, placeholder: str) -> State:
        for state in self.states:
            if placeholder in state.specs:
                return state
        raise KeyError(f"{placeholder} is in none of the stages of pipeline rank {self.pipeline_rank}")

    def _take_first_ranks(self, values: Mapping[str, Tensor]) -> None:
        """Rank 0's values on all ranks, one whole tensor at a time."""
        for spec in _specs(self.captured):
            value = values[spec.placeholder]
            dtype = spec.storage if isinstance(spec, ParameterSpec) else spec.dtype
            if not value.is_meta:
                whole = first_ranks_value(value.detach().to(dtype), self.device)
                for state in self.states:
                    state.fill(self, spec.names[0], whole)


def _is_away(plan: Plan, number: int, other: int) -> bool:
    """Whether there is a stage `other`, and on another rank than stage `number`."""
    return 0 <= other < plan.num_stages and plan.stage_rank(other) != plan.stage_rank(number)


def _specs(captured: CapturedModel) -> tuple[ParameterSpec | BufferSpec, ...]:
    return (*captured.parameters, *captured.buffers)


def _check_whole(specs: Sequence[InputSpec], count: int, inputs: Mapping[str, Tensor]) -> None:
    """Raises BatchError, on every rank alike, for anything but the global batch: stages split it in different ways."""
    for spec in specs:
        rows = (spec.shape[0] * count, *spec.shape[1:]) if spec.shape else ()
        found = tuple(inputs[spec.placeholder].shape)
        if found != rows:
            raise BatchError(
                f"input {spec.path} has shape {found}; a plan with stages takes the global batch {rows} on every rank, "
                f"{count} micro-batches of {spec.shape}; give that (drop_last=True for a short last one) or plan again"
            )


def _facts(captured: CapturedModel, plan: Plan) -> dict[str, str]:
    """What must be equal on all ranks."""
    return {
        "torch": torch.__version__,
        "autopar": version("autopar"),
        "mesh": f"{plan.pipeline} of {plan.mesh}",
        "model": captured.fingerprint,
        "plan": hashlib.sha256(plan.with_estimate(Estimate()).to_json().encode()).hexdigest()[:16],
    }


def _everyones(axes: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Axes that collectives of any stage use together."""
    gathered: list[Any] = [None] * dist.get_world_size()
    with among_ranks("telling all stages which axes are joined"):
        dist.all_gather_object(gathered, sorted(axes))
    return {names for own in gathered for names in own}
