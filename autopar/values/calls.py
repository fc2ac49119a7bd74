"""How is the model called? The example arguments of one call: re-batched, described as JSON, and made again from that.

Tensors count by shape and dtype only; other values (`use_cache=False`) are constants of the captured graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ArgumentError, BatchError, PlanFileError
from autopar.values.divisors import divisors
from autopar.values.inputs import flatten_inputs
from autopar.values.precision import dtype_named, in_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`model(*args, **kwargs)` on one global batch."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False
    """The model (or loss_fn) returns the loss itself, not an object with a field `loss`."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensor arguments by path (`input_ids`, `0`, `batch.x`)."""
        return {path: leaf for path, leaf in flatten_inputs(self.args, self.kwargs)[0] if isinstance(leaf, Tensor)}

    def batch(self) -> int | None:
        """Samples in the batch: what dim 0 of every tensor has in common, None if it has nothing."""
        sizes = {tensor.shape[0] for tensor in self.tensors().values() if tensor.dim()}
        return sizes.pop() if len(sizes) == 1 else None

    def with_batch(self, num_samples: int) -> "Call":
        """The same call on `num_samples` samples, as meta tensors.

        Raises:
            BatchError: if the tensors have no batch dim in common.
        """
        if num_samples < 1:
            raise BatchError(f"global batch {num_samples} is not a positive number of samples")
        if self.batch() == num_samples:
            return self
        if self.batch() is None:
            shapes = ", ".join(f"{path} {tuple(t.shape)}" for path, t in self.tensors().items())
            raise BatchError(
                f"global batch {num_samples} was asked of inputs whose dim 0 differs ({shapes}); give example inputs "
                "with the batch first in every tensor, or of the global batch's own shapes"
            )
        try:
            return self.mapped(
                lambda t: torch.empty((num_samples, *t.shape[1:]) if t.dim() else (), dtype=t.dtype, device="meta")
            )
        except RuntimeError as error:  # more bytes than torch counts
            raise BatchError(f"global batch {num_samples} is too large for tensors: {error}; give a smaller") from error

    def microbatch(self, count: int) -> "Call":
        """One of `count` equal parts of the batch.

        Raises:
            BatchError: if the tensors have no batch in common, or `count` does not divide it.
        """
        batch = self.batch()
        if count < 1 or (count > 1 and (batch is None or batch % count)):
            size = "the inputs have no batch in common" if batch is None else f"the global batch has {batch} samples"
            fits = [str(n) for n in divisors(batch or 1)]
            raise BatchError(
                f"{count} micro-batches were asked, but {size}; choose one of {', '.join(fits[:8])} micro-batches"
            )
        return self if count == 1 or batch is None else self.with_batch(batch // count)

    def in_dtype(self, dtype: torch.dtype) -> "Call":
        """The same call with floating tensors in `dtype`, complex ones in the complex dtype that goes with it."""
        return self.mapped(lambda t: in_dtype(t, dtype))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Call":
        leaves, rebuild = flatten_inputs(self.args, self.kwargs)
        args, kwargs = rebuild([function(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in leaves])
        return replace(self, args=args, kwargs=kwargs)

    def to_json(self) -> Any:
        """JSON form; None if an argument has none."""
        try:
            return {"args": _encode(self.args), "kwargs": _encode(dict(self.kwargs)), "bare": self.bare}
        except TypeError:
            return None


def call_from_json(body: Any) -> Call:
    """The inverse of `Call.to_json`, with meta tensors.

    Raises:
        PlanFileError: if it is none, with its path in the plan's file.
    """
    if not isinstance(body, dict) or body.keys() != {"args", "kwargs", "bare"} or not isinstance(body["bare"], bool):
        raise PlanFileError("call: expected null, or args, kwargs and bare")
    args, kwargs = _decode(body["args"], "call.args"), _decode(body["kwargs"], "call.kwargs")
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise PlanFileError("call: expected a tuple of args and a dict of kwargs")
    return Call(args=args, kwargs=kwargs, bare=body["bare"])


def call_of(inputs: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Call:
    """A call given as one value: a mapping is keywords, a tuple or list positions, a tensor the only position.

    Raises:
        ArgumentError: if inputs come both ways, or not at all.
    """
    if inputs is not None and (args or kwargs):
        raise ArgumentError("give example_inputs, or args and kwargs, not both")
    if inputs is None:
        if not args and not kwargs:
            raise ArgumentError(
                "planning needs the inputs of one call: example_inputs={'input_ids': ..., 'labels': ...}"
            )
        return Call(args=tuple(args), kwargs=dict(kwargs or {}))
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, Mapping):
        return Call(kwargs=dict(inputs))
    return Call(args=tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if type(value) is dict:
        if not all(isinstance(key, str) and key.isprintable() for key in value):
            raise TypeError("keys are printable texts")
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if type(value) is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if type(value) is list:
        return [_encode(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _decode(value: Any, path: str = "call") -> Any:
    if isinstance(value, list):
        return [_decode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor": list(shape), "dtype": str(name), **rest} if not rest:
            return _tensor(shape, name, path)
        case {"torch": str(name), **rest} if not rest:
            return dtype_named(name, path)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_decode(item, f"{path}[{i}]") for i, item in enumerate(items))
        case {"dict": dict(items), **rest} if not rest:
            return {key: _decode(item, f"{path}.{key}") for key, item in items.items()}
    raise PlanFileError(f"{path}: expected a tensor, a dtype, a tuple or a dict, found keys {', '.join(value)[:60]}")


def _tensor(shape: list[Any], name: str, path: str) -> Tensor:
    sizes = [size if type(size) is int and 0 <= size < 1 << 40 else None for size in shape]
    if None in sizes or math.prod(filter(None, sizes)) >= 1 << 55:
        raise PlanFileError(f"{path}: expected the sizes of a tensor, found {str(shape)[:60]}")
    return torch.empty(shape, dtype=dtype_named(name, path), device="meta")
