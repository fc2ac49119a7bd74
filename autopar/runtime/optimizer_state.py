"""Which optimizer state is written, and which is read? That of the parameters that have some, and no more.

torch makes state for all parameters before it says what there is, by a step with gradients of zero: it would count as
one, and ask a checkpoint for state of parameters that had none (nothing reads them, they were frozen, no step was
made). What it made is taken back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

Tensors = dict[str, Any]


def written_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, Tensors]:
    """The module's tensors and the optimizer's by name, which is as it was."""
    had_none = not optimizer.state
    with _without_gradients(optimizer):
        model, optim = get_state_dict(module, optimizer, options=OPTIONS)
    if had_none:
        optimizer.state.clear()
        optim = {name: value for name, value in optim.items() if not name.startswith("state.")}
    return model, optim


def asked_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, index: Metadata
) -> tuple[Tensors, Tensors, Tensors, list[nn.Parameter]]:
    """What is read of a checkpoint.

    Returns:
        The module's tensors, those of the optimizer that the checkpoint has, all that torch sets of it, which are the
        same and others that are made up, and the parameters whose state is made up.
    """
    optimizer.state.clear()
    with _without_gradients(optimizer):
        model, optim = get_state_dict(module, optimizer, options=OPTIONS)
    there = {name.removeprefix("optimizer.") for name in index.state_dict_metadata}
    absent = {
        name: parameter
        for name, parameter in module.named_parameters()
        if not any(key.startswith(f"state.{name}.") for key in there)
    }
    made_up = tuple(f"state.{name}." for name in absent)
    read = {name: value for name, value in optim.items() if not name.startswith(made_up)}
    return model, read, dict(optim), list(absent.values())


@contextmanager
def kept_if_it_fails(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """The optimizer has the state that it had, if what is done inside raises."""
    before: Mapping[Any, Any] = {} if optimizer is None else dict(optimizer.state)
    try:
        yield
    except BaseException:
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(before)
        raise


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch makes no state where there are gradients."""
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
