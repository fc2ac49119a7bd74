"""What ordinary code does with losses, gradients and hooks, as operations of `ordinary_cases`."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.ordinary_cases import Run, batch, on_a_loss, operation


@operation
def forward_hooks(run: Run) -> None:
    def doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(2 * arg for arg in args), {name: 2 * arg if name == "x" else arg for name, arg in kwargs.items()}

    run.model.register_forward_pre_hook(doubled, with_kwargs=True)
    run.model.register_forward_hook(lambda m, args, output: output * 3)
    run.step()


@operation
def backward_hook(run: Run) -> None:
    run.model.register_full_backward_hook(lambda m, gi, go: run.keep("gradient", go[0]))
    run.step()


@operation
def backward_pre_hook(run: Run) -> None:
    run.model.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    run.step()


@operation
def hook_on_a_part(run: Run) -> None:
    run.part("norm").register_forward_hook(lambda m, args, output: output * 3)
    run.step()


@operation
def backward_hook_on_a_part(run: Run) -> None:
    run.part("norm").register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 3 for g in gi))
    run.step()


@operation
def hook_on_a_parameter(run: Run) -> None:
    if (own := run.parameter("a.weight")) is not None:
        own.register_hook(lambda g: g * 0.5)
    run.step()


@operation
def late_hook_on_a_parameter(run: Run) -> None:
    if run.steps:
        return
    loss = run.loss()
    run.parameter("a.weight").register_hook(lambda g: g * 0.5)
    loss.backward()


@operation
def hook_after_accumulation(run: Run) -> None:
    def halve(own: Tensor) -> None:
        own.grad.mul_(0.5)  # type: ignore[union-attr]

    if (own := run.parameter("a.weight")) is not None:
        own.register_post_accumulate_grad_hook(halve)
    run.step()


@on_a_loss
def hook_on_a_loss(run: Run) -> None:
    loss = run.loss()
    loss.register_hook(lambda g: g * 0.5)
    loss.backward()


@on_a_loss
def step_before_backward(run: Run) -> None:
    run.backward(1)
    loss = run.loss()
    run.optimizer.step()
    loss.backward()


@on_a_loss
def write_before_backward(run: Run) -> None:
    loss = run.loss()
    with torch.no_grad():
        run.parameter("b.weight").mul_(2)
    loss.backward()


@on_a_loss
def gradients_of_parameters(run: Run) -> None:
    for found in torch.autograd.grad(run.loss(), [run.parameter("a.weight"), run.parameter("b.bias")]):
        run.keep("gradient", found)


@on_a_loss
def gradients_of_parameters_or_none(run: Run) -> None:
    for found in torch.autograd.grad(
        run.loss(), [run.parameter("a.weight"), run.parameter("b.bias")], allow_unused=True
    ):
        run.keep("gradient", found)


@on_a_loss
def gradients_of_some(run: Run) -> None:
    run.loss().backward(inputs=[run.parameter("a.weight")])


@on_a_loss
def gradients_of_inputs(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    run.loss(x=x).backward()
    run.keep("x.grad", x.grad)


@on_a_loss
def gradients_of_inputs_asked_for(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    (found,) = torch.autograd.grad(run.loss(x=x), x)
    run.keep("x.grad", found)


@on_a_loss
def gradients_of_gradients(run: Run) -> None:
    x = batch()["x"].requires_grad_()
    loss = run.loss(x=x)
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + found.square().sum()).backward()


@on_a_loss
def gradients_with_a_graph(run: Run) -> None:
    run.loss().backward(create_graph=True)


@on_a_loss
def penalty_on_parameters(run: Run) -> None:
    loss = run.loss()
    (loss + 0.1 * sum(own.square().sum() for own in run.model.parameters())).backward()


@on_a_loss
def penalty_by_mean(run: Run) -> None:
    """Its gradient is alike on all ranks, or a summand on each, where the parameter is split."""
    loss = run.loss()
    (loss + 0.1 * sum(own.mean().square() + own.sum().sin() for own in run.model.parameters())).backward()


@on_a_loss
def penalty_first(run: Run) -> None:
    penalty = sum(own.square().sum() for own in run.model.parameters())
    loss = penalty * 0.1 + run.loss()
    run.keep("loss", loss)
    loss.backward()


@on_a_loss
def penalty_by_abs_norm(run: Run) -> None:
    loss = run.loss()
    for own in run.model.parameters():
        loss = loss + 0.01 * own.norm() + 0.1 * own.abs().mean()
    run.keep("loss", loss)
    loss.backward()


@operation
def penalty_alone(run: Run) -> None:
    run.backward()
    penalty = 0.1 * sum(own.square().sum() for own in run.model.parameters() if own.requires_grad)
    penalty.backward()


@on_a_loss
def weighted_loss(run: Run) -> None:
    (run.loss() * 0.5 + 1).backward(torch.tensor(3.0, dtype=torch.float64))


@on_a_loss
def two_forwards(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    (first + 2 * second).backward()


@on_a_loss
def two_forwards_two_backwards(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    second.backward()
    first.backward()


@on_a_loss
def forward_without_backward(run: Run) -> None:
    run.keep("loss", run.loss(1))
    run.backward(2)


@on_a_loss
def backward_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@on_a_loss
def backward_twice_without_retaining(run: Run) -> None:
    loss = run.loss()
    loss.backward()
    loss.backward()


@operation
def accumulate(run: Run) -> None:
    run.backward(0)
    run.backward(1)


@operation
def zeros_for_gradients(run: Run) -> None:
    run.step()
    run.backward(1)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(2)
    run.model.zero_grad(set_to_none=False)
    run.backward(3)


@operation
def zeros_of_the_module(run: Run) -> None:
    run.backward(1)
    run.model.zero_grad()
    run.backward(2)


@operation
def scale_gradients(run: Run) -> None:
    run.backward()
    for own in run.model.parameters():
        if own.grad is not None:
            own.grad.mul_(0.5)
            own.grad = own.grad + 1
    run.backward(1)


@operation
def own_gradients(run: Run) -> None:
    for own in run.model.parameters():
        if own.requires_grad:
            own.grad = torch.ones(own.shape, dtype=own.dtype)
    run.backward(1)


@operation
def clip_norm(run: Run) -> None:
    run.backward()
    run.keep("norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))


@operation
def clip_norm_infinite(run: Run) -> None:
    run.backward()
    run.keep(
        "norm", nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, norm_type=float("inf"), error_if_nonfinite=True)
    )


@operation
def clip_value(run: Run) -> None:
    run.backward()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


@operation
def gradient_norm(run: Run) -> None:
    run.backward()
    run.keep("norm", nn.utils.get_total_norm([own.grad for own in run.model.parameters() if own.grad is not None]))
