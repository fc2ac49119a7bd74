"""How does a model on the meta device get its first values? Module by module, each rank keeping its part.

As with FSDP2, a module that owns parameters is given real memory and its `reset_parameters()` (or the user's `init`) is
called. Here that happens for one module at a time on every rank, under one seed, so that no rank ever holds the whole
model and all ranks draw the same numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.runtime.agreement import shared_number
from autopar.runtime.trainable import Trainable

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
