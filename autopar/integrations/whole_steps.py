"""How does a loop that calls `backward()` itself train in micro-batches and stages? The call runs the whole step, and
the loss that it returns hands the gradients over.

`train_step` of a plan with micro-batches or stages runs forward and backward of all parts. A loop that calls the model,
clears old gradients and then calls `loss.backward()` would clear those. So the step's gradients are put aside, and come
back, times the gradient of the loss, in that `backward()`: a loss that is scaled or divided gives what it would in one
process.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.runtime.data import LocalBatch
from autopar.runtime.pipeline import PipelinedModule
from autopar.runtime.trainable import Output, Trainable

Gradients = list[tuple[nn.Parameter, Tensor]]


def runs_whole_steps(module: Trainable) -> bool:
    """Whether the plan of a module leaves no backward pass to the loop."""
    return isinstance(module, PipelinedModule) or cast(Any, module).plan.microbatches > 1


def step_loss(module: Trainable, batch: Any) -> Tensor:
    """The loss of a step that has run forward and backward; its `backward()` adds the gradients to the parameters'.

    Args:
        module: distributed, under any plan.
        batch: the global batch, as `train_step` takes it.

    Raises:
        BatchError, ArgumentError: as `train_step`.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = module.train_step(batch)
    finally:
        made = [(p, p.grad) for p in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    gradients = [(parameter, gradient) for parameter, gradient in made if gradient is not None]
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    handed: Tensor = _HandedOver.apply(anchor, loss, gradients)  # type: ignore[no-untyped-call]
    return handed


class _HandedOver(torch.autograd.Function):
    """The loss of a step that has run, and the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Gradients) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        if ctx.gradients is None:
            raise ArgumentError(
                "a step in micro-batches or stages gave its gradients already; call backward() once, or call the model "
                "again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            for parameter, gradient in gradients:
                scaled = gradient.mul_(float(scale))
                if parameter.grad is None:
                    parameter.grad = scaled
                else:
                    parameter.grad.add_(scaled)
        return None, None, None


def called_in_whole_steps(module: Trainable, *args: Any, **kwargs: Any) -> Any:
    """What a loop's call of a distributed module returns: in training a whole step's loss (`step_loss`), in the form
    in which the module returns it; else what the module returns.

    Raises:
        ArgumentError: in training, for inputs by position and by keyword together.
    """
    if not (module.training and torch.is_grad_enabled()):
        return module(*args, **kwargs)
    if args and kwargs:
        raise ArgumentError(
            f"a step of the plan takes one batch, and was called with {len(args)} positions and the keywords "
            f"{', '.join(kwargs)}; give all inputs as positions or all as keywords"
        )
    is_local = len(args) == 1 and isinstance(args[0], LocalBatch)
    loss = step_loss(module, args[0] if is_local else kwargs or args)
    return loss if cast(Any, module).bare else Output(loss)
