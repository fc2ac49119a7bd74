"""How does a model on the meta device get its first values? Module by module, each rank keeping its part.

As with FSDP2, a module that owns parameters is given real memory and its `reset_parameters()` (or the user's `init`) is
called. Here that happens for one module at a time on every rank, under one seed, so that no rank ever holds the whole
model and all ranks draw the same numbers.

A checkpoint has no buffers that are registered with persistent=False. `reset_buffers` has the model's own constructor
compute them again, without memory for its parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.runtime.agreement import shared_number
from autopar.runtime.trainable import DECORATED, Trainable

Init = Callable[[nn.Module], None]


def reset_parameters(module: Trainable, model: nn.Module, init: Init | None = None) -> None:
    """Give parameters and buffers of `module` first values; all ranks call this. Drawn under rank 0's seed.

    model: the original model, on the meta device (it stays there).
    init: called with each submodule that owns parameters or buffers, as `model.apply` would; by default the
        submodule's own `reset_parameters()`. For transformers' models: `init=model._init_weights`.

    Raises:
        ArgumentError: if a submodule that owns parameters or buffers has no `reset_parameters` and no `init` is given.
    """
    without = [name for name, part in model.named_modules() if _owns(part) and not _resets(part)]
    if init is None and without:
        raise ArgumentError(
            f"submodules {', '.join(repr(name) for name in without[:3])} have no reset_parameters(); "
            "give reset_parameters(module, model, init=...), or load a state dict instead"
        )
    seed = shared_number(int(torch.randint(2**62, ())))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for path, part in model.named_modules():
            if _owns(part):
                with _materialized(part):
                    (init or _reset)(part)
                    values = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
                    for name, value in values:
                        _fill(module, f"{path}.{name}" if path else name, value)


def reset_buffers(module: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Give buffers that have no value the one that the model's constructor computes; all ranks call this.

    module: distributed, or a decorated model that is.
    build: makes the model as it was made before, but not on the meta device: `lambda: Net(config)`. Its parameters go
        to the meta device as they are made, so that no rank holds the whole model. Random numbers are drawn
        under rank 0's seed.

    Raises:
        ArgumentError: if the model that it makes lacks such a buffer, or has no value for it.
    """
    seed = shared_number(int(torch.randint(2**62, ())))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), parameters_on_meta():
        torch.manual_seed(seed)
        made = build()
    known = dict(made.named_buffers(remove_duplicate=False))
    own = vars(module).get(DECORATED, module)
    buffers = dict(own.named_buffers(remove_duplicate=False))
    for name in sorted(own.still_empty() & set(buffers)):
        value = known.get(name)
        if value is None or value.is_meta or value.shape != buffers[name].shape:
            found = "none" if value is None else f"one of shape {tuple(value.shape)} on the {value.device} device"
            raise ArgumentError(
                f"build() was to make buffer {name} {tuple(buffers[name].shape)}, and made {found}; have it make the "
                "whole model on a real device (a buffer made of parameters is loaded, or written by copy_)"
            )
        _fill(own, name, value)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules keep the shapes of their parameters alone."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and not value.is_meta:
            value = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        register(self, name, value)

    nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _owns(part: nn.Module) -> bool:
    return bool([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])


def _reset(part: nn.Module) -> None:
    reset = part.reset_parameters
    assert callable(reset)
    reset()


def _resets(part: nn.Module) -> bool:
    return callable(getattr(part, "reset_parameters", None))


@contextmanager
def _materialized(part: nn.Module) -> Iterator[None]:
    """The submodule's own parameters and buffers in CPU memory; its meta tensors, perhaps tied, come back after."""
    parameters, buffers = dict(part._parameters), dict(part._buffers)
    try:
        for name, parameter in parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                )
        for name, buffer in buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros_like(buffer, device="cpu")
        yield
    finally:
        part._parameters.update(parameters)
        part._buffers.update(buffers)


def _fill(module: Trainable, name: str, value: Tensor) -> None:
    """Put a whole value where `module` keeps its part of it, if it has one."""
    for state in module.states:
        if state.fill(module, name, value):
            module.uninitialized -= state.names_of(name)
            return
