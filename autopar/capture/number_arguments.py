"""Calls that take numbers where a trace has tensors (`numbers`): written with tensor operands, the same in value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.numbers import Number, as_number


def with_numbers(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a call that is given numbers, None where it takes tensors as well."""
    write = _WRITTEN.get(func)
    return None if write is None else write(func, args, kwargs)


def is_number(value: Any) -> bool:
    """Whether a number of the trace is given."""
    return type(value) is Number


def _kind(tensor: Tensor) -> torch.dtype:
    """What torch makes of such a number."""
    return torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype


def _full(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """full, full_like, new_full."""
    names = ("self", "place", "fill_value")[0 if func is Tensor.new_full else 1 :]
    rest: dict[str, Any] = {
        **{name: value for name, value in kwargs.items() if name in ("size", "input", "fill_value")},
        **dict(zip(names, args, strict=False)),
    }
    options = {name: value for name, value in kwargs.items() if name not in rest}
    value = rest["fill_value"]
    if not is_number(value) or value.tensor.is_complex():
        return None
    place: Any = rest.get("place", rest.get("size", rest.get("input")))
    if func is torch.full:
        options.setdefault("dtype", _kind(value.tensor))
        return torch.zeros(place, **options).fill_(value.tensor)
    made: Tensor = (
        torch.zeros_like(place, **options) if func is torch.full_like else rest["self"].new_zeros(place, **options)
    )
    return made.fill_(value.tensor)


def _tensor(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """torch.tensor and what is like it, of numbers in lists."""
    own, *given = args if func is Tensor.new_tensor else (None, *args)
    data = given[0] if given else kwargs.get("data")
    flat, shape = flat_values(data)
    if any(isinstance(value, Tensor) or not isinstance(value, int | float) for value in flat):
        return None
    if set(kwargs) - {"data", "dtype", "device", "requires_grad"} or len(given) > 1:
        return None
    parts = [as_number(value, None).tensor for value in flat]
    kind = parts[0].dtype
    for part, value in zip(parts, flat, strict=True):
        own_kind = torch.bool if isinstance(value, bool) else part.dtype
        kind = torch.promote_types(own_kind if part is parts[0] else kind, own_kind)
    kind = kwargs.get("dtype") or (
        own.dtype if own is not None else torch.get_default_dtype() if kind.is_floating_point else kind
    )
    made = torch.stack([part.to(kind) for part in parts]).reshape(shape)
    if kwargs.get("device") is not None:
        made = made.to(kwargs["device"])
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def flat_values(data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The values of nested lists, and their shape."""
    if not isinstance(data, list | tuple):
        return [data], ()
    parts = [flat_values(part) for part in data]
    return [value for values, _ in parts for value in values], (len(data), *(parts[0][1] if parts else ()))


def _scaled(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """add and sub with alpha."""
    alpha = kwargs.get("alpha")
    if not is_number(alpha) or len(args) != 2 or len(kwargs) != 1:
        return None
    return func(args[0], args[1] * alpha)  # type: ignore[no-any-return]


def _addc(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """addcmul and addcdiv with value."""
    value = kwargs.get("value")
    if not is_number(value) or len(args) != 3 or len(kwargs) != 1:
        return None
    product = args[1] * args[2] if "mul" in func.__name__ else args[1] / args[2]
    return args[0].add_(product * value) if func.__name__.endswith("_") else args[0] + product * value  # type: ignore[no-any-return]


def _clamp(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """clamp with bounds of which one is a number and one is not; what else it takes as it is."""
    given = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
    if set(given) - {"input", "min", "max"}:
        return None
    x = given["input"]
    bounds = [given.get("min"), given.get("max")]
    if not isinstance(x, Tensor) or any(isinstance(bound, Tensor) for bound in bounds):
        return None
    numbers = [None if bound is None else as_number(bound, None).tensor for bound in bounds]
    is_widened = not x.is_floating_point() and any(t is not None and t.is_floating_point() for t in numbers)
    if x.is_complex() or (is_widened and func.__name__.endswith("_")):
        return None
    kind = torch.get_default_dtype() if is_widened else x.dtype
    return func(x, *(None if t is None else t.to(kind) for t in numbers))  # type: ignore[no-any-return]


def _leaky(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    given = {**dict(zip(("input", "negative_slope", "inplace"), args, strict=False)), **kwargs}
    x, slope = given["input"], given.get("negative_slope", 0.01)
    return None if given.get("inplace") else torch.where(x > 0, x, x * slope)


def _lerp(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    return func(args[0], args[1], weight.tensor.to(args[0].dtype)) if is_number(weight) else None


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """F.batch_norm whose momentum is a number: statistics of the batch, then their share of the running ones."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    momentum: Any = given.get("momentum")
    running = [s for s in (given.get("running_mean"), given.get("running_var")) if s is not None]
    if not is_number(momentum) or not given.get("training") or len(running) < 2:
        return None
    own = [torch.zeros_like(statistic) for statistic in running]
    result = func(**{**given, "running_mean": own[0], "running_var": own[1], "momentum": 1.0})
    with torch.no_grad():
        for statistic, new in zip(running, own, strict=True):
            statistic.mul_(1 - momentum).add_(new * momentum)
    return result  # type: ignore[no-any-return]


_WRITTEN: dict[Any, Callable[[Any, Any, Any], Tensor | None]] = {
    **dict.fromkeys((torch.full, torch.full_like, Tensor.new_full), _full),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor), _tensor),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, torch.sub, Tensor.sub, Tensor.sub_), _scaled),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.addcdiv, Tensor.addcdiv), _addc),
    **dict.fromkeys((torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip), _clamp),
    **dict.fromkeys((torch.lerp, Tensor.lerp, Tensor.lerp_), _lerp),
    F.leaky_relu: _leaky,
    F.batch_norm: _batch_norm,
}
