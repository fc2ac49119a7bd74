"""What stands for a Python number whose value the data decide? A tensor without dims, of float64 or int64.

`loss.item()`, `float(x.mean())`, `math.sqrt(number)` are such numbers in a trace. They compute as Python's do: a
tensor of a lower dtype keeps it beside a number, whole numbers divide in float64, and `n += 1` leaves alone what else
holds `n`. Whatever needs a number of Python's own asks again (`answers`).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.capture.known_values import tensors_in
from autopar.inputs import mapped_tensors

_MARK, _LEAST = "_stands_for_a_number", "_is_at_least"
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
MANY = 4096
"""Elements of a tensor that become numbers one by one (`tolist`). With more, a trace is mostly made of them."""


def is_number(value: Any) -> bool:
    """Whether a tensor stands for a number."""
    return isinstance(value, Tensor) and getattr(value, _MARK, False)


def marked(tensor: Tensor) -> Tensor:
    """The tensor, which stands for a number from here on."""
    setattr(tensor, _MARK, True)
    return tensor


def as_number(tensor: Tensor) -> Tensor:
    """The one value of a tensor as it is now, without gradient: Python's numbers do not overflow or round sooner."""
    wide = tensor.dtype if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    return marked(tensor.detach().to(wide, copy=True).reshape(()))


def as_numbers(tensor: Tensor) -> Any:
    """What `tolist` makes of a tensor."""
    if not tensor.dim():
        return as_number(tensor)
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    flat = iter(tensor.detach().to(wide, copy=True).reshape(-1).unbind())

    def rows(shape: torch.Size) -> Any:
        return [rows(shape[1:]) for _ in range(shape[0])] if shape else marked(next(flat))

    return rows(tensor.shape)


def compute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of which some operands are numbers."""
    if args and is_number(args[0]):
        func = _out_of_place(func)
    others = [t for t in tensors_in((args, kwargs)) if not is_number(t)]
    if others:
        return func(*_fitted(args, others), **_fitted(kwargs, others))
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor) or result.dim():
        return result
    if result.is_floating_point() and result.dtype != torch.float64:  # of whole numbers alone
        wide = mapped_tensors(lambda t: t.to(torch.float64), (args, kwargs))
        result = func(*wide[0], **wide[1])
    return marked(result)


def _out_of_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """`n += 1`, which torch writes into a tensor, as `n + 1`; anything else as it is."""
    name = func.__name__
    if name in _IN_PLACE:
        return getattr(Tensor, name.replace("__i", "__", 1))  # type: ignore[no-any-return]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return getattr(Tensor, name.removesuffix("_")) if is_in_place else func


def _fitted(given: Any, others: list[Tensor]) -> Any:
    """Numbers in the dtype that a Python number takes beside other tensors."""
    if not any(is_number(t) for t in tensors_in(given)):
        return given
    kind = others[0].dtype
    for other in others[1:]:
        kind = torch.promote_types(kind, other.dtype)
    is_flat = all(not other.dim() for other in others)

    def fit(value: Tensor) -> Tensor:
        if not is_number(value) or value.dtype == torch.bool:
            return value
        if not value.is_floating_point():
            return value.to(kind) if is_flat and not kind.is_floating_point and kind != torch.bool else value
        if kind.is_floating_point:
            return value.to(kind) if is_flat else value
        return value if kind.is_complex else value.to(torch.get_default_dtype())

    return mapped_tensors(fit, given)


def extreme(values: list[Any], is_larger: bool) -> Any:
    """`max` or `min` of numbers and tensors without dims: the first that none is beyond."""
    found = values[0]
    for value in values[1:]:
        beyond = value > found if is_larger else value < found
        if not isinstance(beyond, Tensor):
            found = value if beyond else found
            continue
        alike = [_like(part, [value, found]) for part in (value, found)]
        bounds = [bound for part in (value, found) if (bound := least(part)) is not None]
        found = torch.where(beyond, *alike)
        if is_larger and bounds:
            setattr(found, _LEAST, max(bounds))
    return found


def least(value: Any) -> float | None:
    """What a number is at least, where that is known."""
    return getattr(value, _LEAST, None) if isinstance(value, Tensor) else value


def _like(value: Any, among: list[Any]) -> Tensor:
    """A number of Python's as a tensor beside which it stands."""
    if isinstance(value, Tensor):
        return value
    tensor = next(t for t in among if isinstance(t, Tensor))
    wide = torch.float64 if isinstance(value, float) else tensor.dtype
    if is_number(tensor):
        return marked(torch.full((), value, dtype=wide))
    return torch.full((), value, dtype=tensor.dtype)


def _whole(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).to(torch.int64)


def _log(x: Any, base: Any = None) -> Any:
    return torch.log(_wide(x)) if base is None else torch.log(_wide(x)) / torch.log(_wide(base))


def _wide(value: Any) -> Tensor:
    return value.to(torch.float64) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)


_UNARY = (
    *("sqrt", "exp", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "erf", "isnan", "isinf", "isfinite"),
)
FORMULAS: dict[Any, Callable[..., Any]] = {
    **{getattr(math, name): getattr(torch, name) for name in _UNARY},
    math.fabs: torch.abs,
    math.floor: _whole(torch.floor),
    math.ceil: _whole(torch.ceil),
    math.trunc: _whole(torch.trunc),
    math.log: _log,
    math.pow: lambda x, y: torch.pow(_wide(x), _wide(y)),
    math.atan2: lambda x, y: torch.atan2(_wide(x), _wide(y)),
}
"""What functions of `math` are of numbers."""


def by_formula(function: Any, args: tuple[Any, ...]) -> Any:
    """A function of `math` of numbers or tensors of one element, as a number."""
    given = [as_number(a) if isinstance(a, Tensor) and not is_number(a) else a for a in args]
    wide = [a.to(torch.float64) if isinstance(a, Tensor) else a for a in given]
    return marked(FORMULAS[function](*wide))


def rounded(number: Tensor, digits: int | None) -> Tensor:
    """`round` of a number."""
    if not number.is_floating_point():
        return number
    return marked(number.round().to(torch.int64) if digits is None else torch.round(number, decimals=digits))


def in_iteration(args: tuple[Any, ...]) -> list[Any]:
    """The values that `max` or `min` is given."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else list(args)
