"""Is a call the one that was planned, written otherwise? Positions, keywords and defaults, by the model's signature."""

import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.values.calls import Call

_EMPTY = inspect.Parameter.empty


def as_planned(
    forward: Callable[..., Any], planned: Call, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_loss_fn: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in the form of `planned`: what it gave by position so, all others by keyword.

    Defaults that one of both gives and the other leaves out are given as `planned` has them.

    Args:
        forward: the model's.
        has_loss_fn: arguments that forward does not take are for the loss function.

    Raises:
        ArgumentError: if forward does not take the arguments, or lacks one.
    """
    signature = inspect.signature(forward)
    if not has_loss_fn:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"the model cannot be called so: {error}; its forward takes {signature}") from error
    parameters = signature.parameters
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    rest = tuple(args[len(positional) :])
    for name in (*positional[: len(planned.args)], *planned.kwargs):
        if name not in given and name in parameters and parameters[name].default is not _EMPTY:
            given[name] = parameters[name].default
    first = []
    for name in positional[: len(planned.args)]:
        if name not in given:
            break
        first.append(given.pop(name))
    kept = {
        name: value
        for name, value in given.items()
        if name in planned.kwargs or name not in parameters or not _is_default(value, parameters[name].default)
    }
    return (*first, *rest), kept


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    plain = (bool, int, float, str)
    return type(value) is type(default) and isinstance(value, plain) and bool(value == default)


def is_alike(value: Any, planned: Any) -> bool:
    """Whether two arguments that are no tensors are the same constant."""
    if isinstance(value, Tensor) or isinstance(planned, Tensor):
        return False
    return value is planned or constant_key(value) == constant_key(planned)


def form_of(value: Any) -> tuple[Any, ...]:
    """What of an argument a graph depends on: shape, dtype and whether it needs a gradient; any other whole."""
    if isinstance(value, Tensor):
        needs = value.requires_grad and torch.is_grad_enabled()
        return tuple(value.shape), str(value.dtype), needs
    return constant_key(value)


def constant_key(value: Any) -> tuple[Any, ...]:
    """Equal for equal constants: values of Python, and of what cannot be hashed (arrays) the whole contents."""
    try:
        hash(value)
    except TypeError:
        return type(value).__name__, hashlib.sha256(pickle.dumps(value)).hexdigest()
    return type(value).__name__, value
