"""What are `math`'s functions, `max` and `min` of numbers that the data decide (`numbers`)? Ops of the trace."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.capture.numbers import Number, as_number


def _whole(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).to(torch.int64)


def _log(x: Tensor, base: Tensor | None = None) -> Tensor:
    return torch.log(x) if base is None else torch.log(x) / torch.log(base)


_UNARY = (
    *("sqrt", "exp", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "erf", "isnan", "isinf", "isfinite"),
)
FORMULAS: dict[Any, Callable[..., Tensor]] = {
    **{getattr(math, name): getattr(torch, name) for name in _UNARY},
    math.fabs: torch.abs,
    math.floor: _whole(torch.floor),
    math.ceil: _whole(torch.ceil),
    math.trunc: _whole(torch.trunc),
    math.log: _log,
    math.pow: torch.pow,
    math.atan2: torch.atan2,
}
"""What functions of `math` are of numbers."""


def by_formula(function: Any, args: tuple[Any, ...]) -> Number:
    """A function of `math` of numbers."""
    return Number(FORMULAS[function](*(as_number(a, float).tensor for a in args)))


def extreme(values: list[Any], is_larger: bool) -> Any:
    """`max` or `min` of numbers and tensors without dims: the first that none is beyond."""
    found = values[0]
    for value in values[1:]:
        beyond = value > found if is_larger else value < found
        if not isinstance(beyond, Tensor) and type(beyond) is not Number:
            found = value if beyond else found
            continue
        bounds = [bound for part in (value, found) if (bound := least(part)) is not None]
        found = _chosen(beyond, value, found)
        if is_larger and bounds:
            _set_least(found, max(bounds))
    return found


_LEAST = "_is_at_least"


def least(value: Any) -> float | None:
    """What a number is at least, where that is known."""
    if type(value) is Number:
        value = value.tensor
    return getattr(value, _LEAST, None) if isinstance(value, Tensor) else value


def _set_least(value: Any, bound: float) -> None:
    setattr(value.tensor if type(value) is Number else value, _LEAST, bound)


def _chosen(beyond: Any, value: Any, other: Any) -> Any:
    """One of two, of which one at least is a tensor or a number of the trace."""
    test = beyond.tensor if type(beyond) is Number else beyond
    tensors = [part for part in (value, other) if isinstance(part, Tensor)]
    if not tensors:
        one, two = (as_number(part, None).tensor for part in (value, other))
        return Number(torch.where(test, one, two))
    plain = [part if isinstance(part, Tensor) else as_number(part, None).tensor for part in (value, other)]
    kind = tensors[0].dtype
    for part, wide in zip((value, other), plain, strict=True):
        if isinstance(part, Tensor):
            kind = torch.promote_types(kind, part.dtype)
        elif wide.is_floating_point() and not kind.is_floating_point:
            kind = torch.get_default_dtype()
    return torch.where(test, *(part.to(kind) for part in plain))


def in_iteration(args: tuple[Any, ...]) -> list[Any]:
    """The values that `max` or `min` is given."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else list(args)
