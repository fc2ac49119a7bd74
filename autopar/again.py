"""What does a distributed module run for a call that is not the planned step? The model's graph of that call.

Captured again from the model itself: in another mode, at other sizes, with other arguments, with what the model returns
and with the values that buffers have by then. It lives under the plan's storage (`search.following`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.binding import as_planned
from autopar.calls import Call
from autopar.capture.loss import accepted_inputs
from autopar.captures import as_it_is_now, computed_model
from autopar.cluster import Cluster, load_cluster, resized
from autopar.errors import ClusterError
from autopar.graph import CapturedModel, LocalModel
from autopar.model_plan import ModelPlan
from autopar.outputs import Returned
from autopar.plan import Plan
from autopar.precision import PRECISIONS, with_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A model that is captured again. planned, plan, call: the step that was planned; loss_fn: as given to `plan`."""

    model: nn.Module
    plan: Plan
    planned: CapturedModel
    call: Call
    loss_fn: Callable[..., Any] | None = None
    machine: Cluster | None = None
    original: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, the model is as it was before it was distributed."""

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

    def local(
        self,
        call: Call,
        modes: Mapping[str, bool],
        buffers: Mapping[str, Tensor],
        *,
        gradients: bool,
        wants_loss: bool,
    ) -> tuple[LocalModel, Returned]:
        """The graph that every rank runs for a call on the global batch, and the value around its tensors.

        Args:
            modes: of the model's parts. buffers: their values now, by name.
            gradients: whether anything gets some. wants_loss: return the loss, whatever the model returns.

        Raises:
            CaptureError: if the call cannot be captured.
        """
        from autopar.capture import capture_call
        from autopar.passes.insert_collectives import insert_collectives
        from autopar.search.following import following_plan

        precision = PRECISIONS[self.plan.config.precision]
        with torch.inference_mode(False), self.original(), as_it_is_now(self.model, modes, buffers):
            computed, own = computed_model(self.model, call, precision)
            captured, returned = capture_call(
                computed, own.args, own.kwargs, loss_fn=self.loss_fn, gradients=gradients, wants_loss=wants_loss,
                name=self.planned.name,
            )  # fmt: skip
        captured = with_storage(captured, precision)
        plan = following_plan(captured, self.plan, self.planned, self._cluster())
        return insert_collectives(captured, plan), returned

    def _cluster(self) -> Cluster:
        """The plan's, or where only its name is left any of as many devices: for what is cheapest, not for whether."""
        if self.machine is not None:
            return self.machine
        try:
            return load_cluster(self.plan.cluster)
        except ClusterError:
            return resized(load_cluster("2xcpu"), 1, self.plan.mesh.size)


def captor_of(plan: ModelPlan, model: nn.Module) -> Again:
    """The model of a bound plan, which other calls are captured from."""
    assert plan.call is not None
    return Again(model=model, plan=plan, planned=plan.graph, call=plan.call, loss_fn=plan.loss_fn, machine=plan.machine)
