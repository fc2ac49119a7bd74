"""What does a training step compute before its optimizer? Of the unmodified module, and of a captured graph.

Both sides seed torch's default generator alike before each step: a graph whose random numbers are not bound draws them
from there, as the module does, in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.loss import LossModule
from autopar.capture.one_process import as_one_process
from autopar.capture.user_frame import user_frame
from autopar.errors import AutoparError, CaptureError, TurningFlagError
from autopar.oracle.reference import run_captured
from autopar.oracle.unchanged import unchanged
from autopar.values.graph import BufferSpec, CapturedModel, ParameterSpec
from autopar.values.guards import holds
from autopar.values.inputs import bind_inputs, flatten_inputs

SEED = 20_240_229


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One step: the loss, the gradient of each trainable parameter, and the state after it, by the names of the model.

    gradients: zeros where autograd leaves None.
    state: buffers, and parameters that are not trained or that forward writes.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one call."""


def module_steps(
    model: nn.Module,
    captured: CapturedModel,
    calls: Sequence[Arguments],
    loss_fn: Callable[..., Any] | None = None,
    context: Callable[[], Any] = nullcontext,
) -> tuple[TrainedStep, ...]:
    """Steps of the module itself, one after the other, in the mode that it is in; it is left as it was.

    Args:
        model: with values.
        captured: says by which names its tensors go.
        calls: a step each.
        loss_fn: as for `capture`.
        context: entered around each forward.

    Raises:
        CaptureError: if the module itself fails; names the line.
    """
    steps = []
    with unchanged(model):
        for number, (args, kwargs) in enumerate(calls):
            loss = module_loss(model, args, kwargs, loss_fn, SEED + number, context)
            _backward(model, loss)
            steps.append(_read(model, captured, loss))
            model.zero_grad(set_to_none=True)
    return tuple(steps)


def module_loss(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    seed: int,
    context: Callable[[], Any] = nullcontext,
) -> Tensor:
    """The loss of one eager call, on the device of the model."""
    named, rebuild = flatten_inputs(args, kwargs)
    leaves = [leaf for _, leaf in named]
    module = LossModule(model, leaves, rebuild, loss_fn)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    torch.manual_seed(seed)
    try:
        with as_one_process(), torch.enable_grad(), context():
            return module.loss(*(own_copy(leaf, device) for leaf in leaves if isinstance(leaf, Tensor)))
    except AutoparError:
        raise
    except Exception as error:
        raise _itself_fails(model, error, "on the example inputs") from error


def _backward(model: nn.Module, loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except AutoparError:
        raise
    except Exception as error:
        raise _itself_fails(model, error, "in its backward pass") from error


def _itself_fails(model: nn.Module, error: Exception, when: str) -> CaptureError:
    name = type(model).__name__
    return CaptureError(
        f"{user_frame(error) or name}: {name} itself fails {when}: {type(error).__name__}: {error}; give a model and "
        "inputs that one training step runs on"
    )


def own_copy(given: Tensor, device: torch.device) -> Tensor:
    """An input that forward may write in place."""
    return given.detach().clone().to(device).requires_grad_(given.requires_grad)


def _read(model: nn.Module, captured: CapturedModel, loss: Tensor) -> TrainedStep:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    trained = {spec.names[0] for spec in captured.parameters if spec.trainable}
    gradients = {
        name: torch.zeros_like(parameters[name]) if (grad := parameters[name].grad) is None else grad.detach().clone()
        for name in trained
    }
    state = {spec.names[0]: buffers[spec.names[0]] for spec in captured.buffers}
    state |= {spec.names[0]: parameters[spec.names[0]] for spec in captured.parameters}
    return TrainedStep(
        loss=loss.detach().clone(),
        gradients=gradients,
        state={name: value.detach().clone() for name, value in state.items()},
    )


Again = Callable[[Mapping[str, Tensor]], CapturedModel]
"""The graph of a model whose buffers have these values, by name."""


def graph_steps(
    captured: CapturedModel,
    values: Mapping[str, Tensor],
    calls: Sequence[Arguments],
    again: Again | None = None,
) -> tuple[TrainedStep, ...]:
    """The same steps of the graph.

    Args:
        captured: of the batch of the calls.
        values: whole parameters and buffers by placeholder; what steps write is written to copies.
        calls: a step each.
        again: captures another graph where a buffer that this one takes for granted has turned; once is enough.

    Raises:
        TurningFlagError: if a third would be needed.
    """
    parameters = {p.placeholder: values[p.placeholder].detach().clone() for p in captured.parameters}
    buffers = {b.placeholder: values[b.placeholder].detach().clone() for b in captured.buffers}
    specs: tuple[ParameterSpec | BufferSpec, ...] = (*captured.parameters, *captured.buffers)
    names = {spec.placeholder: spec.names[0] for spec in specs}
    steps, turned = [], False
    for number, (args, kwargs) in enumerate(calls):
        if again is not None and not _holds(captured, buffers):
            _check_turns(turned)
            captured, turned = (
                again({name: buffers[spec.placeholder] for spec in captured.buffers for name in spec.names}),
                True,
            )
        leaves = {name: value.detach().clone() for name, value in parameters.items()}
        for spec in captured.parameters:
            leaves[spec.placeholder].requires_grad_(spec.trainable)
        device = next((p.device for p in leaves.values()), torch.device("cpu"))
        given = bind_inputs(captured.inputs, args, kwargs)
        inputs = {name: own_copy(value, device) for name, value in given.items()}
        torch.manual_seed(SEED + number)
        with torch.enable_grad():
            loss, results = run_captured(captured, leaves, buffers, inputs)
            if loss.requires_grad:  # a graph that has lost its gradients is compared as it is
                loss.backward()  # type: ignore[no-untyped-call]
        written = {name: value.detach() for name, value in results.items()}
        parameters |= {name: value for name, value in written.items() if name in parameters}
        buffers |= {name: value for name, value in written.items() if name in buffers}
        gradients = {
            spec.names[0]: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for spec in captured.parameters
            if spec.trainable and (leaf := leaves[spec.placeholder]) is not None
        }
        state = {names[name]: value.clone() for name, value in (parameters | buffers).items()}
        steps.append(TrainedStep(loss=loss.detach(), gradients=gradients, state=state))
    if again is not None and turned and not _holds(captured, buffers):
        _check_turns(turned)
    return tuple(steps)


def _holds(captured: CapturedModel, buffers: Mapping[str, Tensor]) -> bool:
    """Whether buffers, by placeholder, have the values that the graph takes for granted."""
    named = _by_name(captured, buffers)
    return all(holds(guard, named[guard.name]) for guard in captured.guards)


def _by_name(captured: CapturedModel, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: buffers[spec.placeholder] for spec in captured.buffers for name in spec.names}


def _check_turns(turned: bool) -> None:
    if turned:
        raise TurningFlagError(
            "forward decides on a buffer that every step changes, so that no graph stands for the next step too; "
            "compute with the tensor (torch.where) instead of branching on it"
        )


def other_samples(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[Arguments]:
    """`count` calls that the model takes as it takes the one given, each of other samples of it from the second on.

    Every input takes the same samples, half of them twice, so that means over the batch change too. Inputs without a
    common first dim stay as they are.
    """
    named, rebuild = flatten_inputs(args, kwargs)
    rows = {leaf.shape[0] for _, leaf in named if isinstance(leaf, Tensor) and leaf.dim()}
    size = rows.pop() if len(rows) == 1 else 0

    def taken(leaf: Any, number: int) -> Any:
        if not number or not size or not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf[(torch.arange(size, device=leaf.device) // 2 + number) % size]

    return [rebuild([taken(leaf, number) for _, leaf in named]) for number in range(count)]
