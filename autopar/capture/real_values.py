"""How is something computed for real while a trace is on? (Private torch API, kept in this file.)"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ASSERTIONS = (torch._assert, torch._assert_async)
"""Functions that raise where a tensor is false."""


class RandomCallError(Exception):
    """A call draws numbers."""


class _Deterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomCallError
        return func(*args, **(kwargs or {}))


@contextmanager
def real_values() -> Iterator[None]:
    """Calls made inside are real: no trace sees them, and one that draws numbers fails."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), _Deterministic():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def outside_traces() -> Iterator[None]:
    """Calls made inside are real, whatever they are."""
    with _disable_current_modes():
        yield


@contextmanager
def real_run() -> Iterator[None]:
    """Calls made inside are real, may have gradients and draw numbers; what torch draws later is as without them."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def storage_of(value: Tensor) -> int:
    """A number for the storage that a tensor is a view of, as long as that lives."""
    return int(value.untyped_storage()._cdata)


def place_of(traced: Tensor) -> tuple[int, int]:
    """The storage that a traced tensor is a view of, and how often that has been written."""
    with torch._C.DisableTorchFunction():
        return storage_of(traced), -1 if traced.is_inference() else traced._version


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others inside torch.func."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
