"""NumPy in forward, of tensors whose values the data decide: arrays that compute in the trace.

`x.cpu().numpy()` is an array of `torch._numpy`, which does with tensors what NumPy does; functions of `np` in a user's
module go there where they are given one. (Private torch API, kept in this file: `torch._numpy`.)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import _numpy as traced

from autopar.capture.number_arguments import flat_values
from autopar.capture.numbers import is_number, marked

Array: Any = traced.ndarray  # type: ignore[attr-defined]


def as_array(tensor: Tensor) -> Any:
    """What `Tensor.numpy` gives: it shares the tensor's memory."""
    return Array(tensor)


def exchanged_in_arrays() -> dict[str, Any]:
    """Methods of arrays that are given NumPy's dtypes."""
    own = Array.astype
    return {"astype": lambda array, dtype, *args, **kwargs: own(array, np.dtype(dtype).name)}


def exchanged_in_torch() -> dict[str, Any]:
    """Functions of torch that look at what they are given."""

    def tensor_of(array: Any) -> Any:
        return array.tensor if isinstance(array, Array) else array

    own, shared, by_array = torch.tensor, torch.as_tensor, torch.from_numpy

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        if not isinstance(data, Array):
            return own(data, **kwargs)
        made: Tensor = data.tensor.to(kwargs.get("dtype") or data.tensor.dtype, copy=True)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    return {
        "is_tensor": lambda value: isinstance(value, Tensor) and not is_number(value),
        "from_numpy": lambda array: array.tensor if isinstance(array, Array) else by_array(array),
        "as_tensor": lambda data, *args, **kwargs: shared(tensor_of(data), *args, **kwargs),
        "tensor": tensor,
    }


class Numpy:
    """`numpy`, with functions that take arrays and numbers of the trace."""

    def __getattr__(self, name: str) -> Any:
        value, twin = getattr(np, name), getattr(traced, name, None)
        if isinstance(value, type) or not callable(value) or not callable(twin):
            return value

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not any(_is_traced(part) for part in flat_values((args, list(kwargs.values())))[0]):
                return value(*args, **kwargs)
            made = twin(*map(_given, args), **{key: _given(part) for key, part in kwargs.items()})
            return tuple(map(_result, made)) if isinstance(made, tuple) else _result(made)

        return compute


def _is_traced(value: Any) -> bool:
    return isinstance(value, Array | Tensor)


def _given(value: Any) -> Any:
    """An argument, lists that hold numbers as arrays, dtypes by name."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if not isinstance(value, list | tuple):
        return value
    flat, shape = flat_values(value)
    if not any(isinstance(part, Tensor) for part in flat) or any(isinstance(p, Tensor) and p.dim() for p in flat):
        return value
    is_whole = all(not p.is_floating_point() if isinstance(p, Tensor) else isinstance(p, int) for p in flat)
    wide = torch.int64 if is_whole else torch.float64
    parts = [p.to(wide) if isinstance(p, Tensor) else torch.full((), p, dtype=wide) for p in flat]
    return Array(torch.stack(parts).reshape(shape))


def _result(made: Any) -> Any:
    return marked(made.tensor) if isinstance(made, Array) and not made.ndim else made
