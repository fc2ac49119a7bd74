"""What does a distributed module run for a call that is not the planned step? The model's graph of that call.

Captured again from the model itself: in another mode, at other sizes, with other arguments, with what the model returns
and with the values that buffers have by then. It lives under the plan's storage (`search.following`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api.captures import as_it_is_now, computed_model
from autopar.api.model_plan import ModelPlan
from autopar.capture.loss import accepted_inputs
from autopar.errors import ClusterError, PlanMismatchError
from autopar.lower.emit import emit, emit_stage
from autopar.runtime.parts import Described, described
from autopar.values.binding import as_planned
from autopar.values.calls import Call
from autopar.values.cluster import Cluster, load_preset, resized
from autopar.values.graph import BufferSpec, CapturedModel, ParameterSpec
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.precision import PRECISIONS, with_storage
from autopar.values.stage_plan import StagePlan


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A model that is captured again.

    call: the planned one. plans: what is decided of each stage of the step that was planned; planned:
    their graphs. precision: in which the model is computed. loss_fn: as given to `plan`.
    machine: of one stage. original: inside, the model is as it was before it was distributed. is_live: its parts' modes
    are those of the distributed module. captured_again: called after the model's forward ran to be captured.
    """

    model: nn.Module
    call: Call
    plans: Sequence[StagePlan]
    planned: Sequence[CapturedModel]
    precision: str
    loss_fn: Callable[..., Any] | None = None
    machine: Cluster | None = None
    original: Callable[[], AbstractContextManager[None]] = nullcontext
    is_live: bool = False
    captured_again: Callable[[], None] = _nothing

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments in the form of the planned call's.

        Raises:
            ArgumentError: if the model's forward does not take them.
        """
        return as_planned(self.model.forward, self.call, args, kwargs, has_loss_fn=self.loss_fn is not None)

    def returns_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has inputs for the loss function alone, and so returns the loss; without such a function the
        model returns what it does."""
        if self.loss_fn is None:
            return True
        own_args, own_kwargs = accepted_inputs(self.model, args, kwargs)
        return (len(own_args), len(own_kwargs)) != (len(args), len(kwargs))

    def modes(self) -> dict[str, bool]:
        """Whether each part of the model is in training mode."""
        with self.original():
            return {name: module.training for name, module in self.model.named_modules()}

    def parts(self) -> list[Described]:
        """What the model consists of."""
        with self.original():
            return described(self.model)

    def captured(
        self,
        call: Call,
        modes: Mapping[str, bool],
        buffers: Mapping[str, Tensor],
        *,
        gradients: bool,
        wants_loss: bool = False,
        then: Callable[[Any, list[Tensor]], Any] | None = None,
    ) -> tuple[CapturedModel, Returned]:
        """The graph of a call on the global batch, and the value around the tensors that it returns.

        Args:
            modes: of the model's parts. buffers: their values now, by name.
            gradients: whether anything gets some. wants_loss: return the loss, whatever the model returns.
            then: as for `capture_call`.

        Raises:
            CaptureError: if the call cannot be captured.
        """
        from autopar.capture import capture_call

        precision = PRECISIONS[self.precision]
        with torch.inference_mode(False), self.original(), as_it_is_now(self.model, modes, buffers), torch.no_grad():
            computed, own = computed_model(self.model, call, precision)
            captured, returned = capture_call(
                computed, own.args, own.kwargs, loss_fn=self.loss_fn, gradients=gradients, wants_loss=wants_loss,
                then=then, name=self.planned[0].name if len(self.planned) == 1 else None,
            )  # fmt: skip
        self.captured_again()
        return with_storage(captured, precision), returned

    def local(self, captured: CapturedModel, *, gathers: bool) -> LocalModel:
        """The graph that every rank runs; gathers: what it returns ends whole on every rank."""
        return emit(captured, self._following(captured, 0), gathers=gathers)

    def stages(self, captured: CapturedModel, *, gathers: bool) -> tuple[tuple[int, LocalModel], ...]:
        """The graphs of the stages that a call runs on, each with its number.

        Raises:
            PlanMismatchError: if stages cannot run it in turn.
        """
        from autopar.passes.split_stages import cuts_by_state, split_stages

        owners: dict[str, list[int]] = {}
        for number, stage in enumerate(self.planned):
            specs: list[ParameterSpec | BufferSpec] = [*stage.parameters]
            for spec in [*specs, *(b for b in stage.buffers if b.mutated_by is not None)]:
                for name in spec.names:
                    owners.setdefault(name, []).append(number)
        cuts = cuts_by_state(captured, owners)
        numbers = (0, *cuts)
        parts = split_stages(captured, tuple(cuts.values()))
        for number, part in zip(numbers, parts, strict=True):
            missing = {b.names[0] for b in part.buffers} - {n for b in self.planned[number].buffers for n in b.names}
            if missing:
                raise PlanMismatchError(
                    f"stage {number} of {captured.name} reads {', '.join(sorted(missing))} in this call, which it "
                    "does not have in training; plan without pipeline stages"
                )
        plans = [self._following(part, number) for number, part in zip(numbers, parts, strict=True)]
        return tuple((number, emit_stage(parts, plans, place, gathers=gathers)) for place, number in enumerate(numbers))

    def _following(self, captured: CapturedModel, number: int) -> StagePlan:
        from autopar.search.following import following_plan

        return following_plan(captured, self.plans[number], self.planned[number], self.cluster())

    def cluster(self) -> Cluster:
        """The plan's, or where only its name is left any of as many devices: for what is cheapest, not for whether."""
        plan, machine = self.plans[0], self.machine
        if machine is None:
            with suppress(ClusterError):
                machine = load_preset(plan.cluster)
        if machine is None or machine.num_devices != plan.mesh.size:
            machine = resized(load_preset("2xcpu"), 1, plan.mesh.size)
        return machine


def captor_of(plan: ModelPlan, model: nn.Module) -> Again:
    """The model of a bound plan, which other calls are captured from."""
    from autopar.search.pipeline_parts import part_of

    assert plan.call is not None
    return Again(
        model=model,
        call=plan.call.mapped(lambda tensor: tensor.detach().to("meta")),  # shapes alone are asked for
        plans=plan.stages,
        planned=plan.parts,
        precision=plan.config.precision,
        loss_fn=plan.loss_fn,
        machine=None if plan.machine is None else part_of(plan.machine, plan.pipeline),
    )
