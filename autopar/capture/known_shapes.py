"""Shapes, sizes and indices that follow from known values: such calls are made with numbers and integer indices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.answers import ASK, Handler, both
from autopar.capture.knowledge import Knowledge
from autopar.capture.real_values import real_values
from autopar.capture.sliced_one_hot import one_hot
from autopar.capture.user_frame import asker, place_of
from autopar.ops.checked import ERROR


def _shaped(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """A call whose result has a shape that follows from values: where all are known, it is a constant."""
    if func in (torch.where, Tensor.where) and len(args) + len(kwargs) > 1:
        is_byte = len(args) == 3 and func is torch.where and args[0].dtype == torch.uint8
        return func(args[0] != 0, *args[1:]) if is_byte else ASK  # kernels take it, a fake one does not
    given = [questions.known.value(a) if isinstance(a, Tensor) else (a, frozenset[str]()) for a in args]
    named = {k: questions.known.value(a) if isinstance(a, Tensor) else (a, frozenset[str]()) for k, a in kwargs.items()}
    if any(one is None for one in (*given, *named.values())):
        return ASK
    for one in (*given, *named.values()):
        questions.guard(one[1])  # type: ignore[index]
    with real_values():
        found = func(*(one[0] for one in given), **{k: one[0] for k, one in named.items()})  # type: ignore[index]
    return tuple(map(questions.constant, found)) if isinstance(found, tuple) else questions.constant(found)


def _indexed(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """x[index] and x[index] = y: known masks as integer indices, known numbers as numbers."""
    index = args[1]
    parts = index if type(index) is tuple else (index,)
    if all(not isinstance(p, Tensor | slice | list) for p in parts):
        return ASK
    found: list[Any] = []
    for part in parts:
        found += _index(questions, part)
    if len(found) == len(parts) and all(one is other for one, other in zip(found, parts, strict=True)):
        return ASK
    result = func(args[0], tuple(found), *args[2:])
    questions.known.note(func, (args[0], tuple(found), *args[2:]), {}, result)
    return result


def _index(questions: Knowledge, part: Any) -> Sequence[Any]:
    if type(part) is slice:
        ends = [_as_number(questions, end) for end in (part.start, part.stop, part.step)]
        is_same = all(one is other for one, other in zip(ends, (part.start, part.stop, part.step), strict=True))
        return [part if is_same else slice(*ends)]
    if not isinstance(part, Tensor):
        return [part]
    if part.dtype in (torch.bool, torch.uint8) and part.dim():
        value = questions.value(part)
        if value is None:
            return [part]
        with real_values():
            places = value.nonzero(as_tuple=True)
        return [questions.constant(place) for place in places]
    return [_as_number(questions, part)]


def _as_number(questions: Knowledge, part: Any) -> Any:
    """A known tensor of one whole number as that number; anything else as it is."""
    if not isinstance(part, Tensor) or part.dim() or part.is_floating_point() or part.dtype == torch.bool:
        return part
    value = questions.value(part)
    if value is None:
        return part
    with real_values():
        return value.item()


def _masked(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """masked_select by a known mask."""
    if kwargs or len(args) != 2 or (mask := questions.value(args[1])) is None:
        return ASK
    shape = torch.broadcast_shapes(args[0].shape, mask.shape)  # type: ignore[no-untyped-call]
    with real_values():
        places = mask.expand(shape).nonzero(as_tuple=True)
    return args[0].expand(shape)[tuple(questions.constant(place) for place in places)]


def _counted(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """bincount: of unknown values as many counts as `minlength` says, with a check that there are no more."""
    given = {**dict(zip(("input", "weights", "minlength"), args, strict=False)), **kwargs}
    values, weights, size = given["input"], given.get("weights"), given.get("minlength", 0)
    if not isinstance(size, int) or not size or questions.value(values) is not None:
        return _shaped(questions, func, args, kwargs)
    place, _ = place_of(asker())
    message = f"{ERROR}{place}: bincount(minlength={size}) of values that are {size} or larger has more entries"
    torch.ops.aten._assert_async.msg((values < size).all(), message)
    if weights is None:
        weights = torch.ones_like(values, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    return torch.zeros(size, dtype=weights.dtype).index_add(0, values.long().clamp(max=size - 1), weights.detach())


def _one_hot(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    made = one_hot(questions, func, args, kwargs)
    return ASK if made is None else made


def _repeated(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """repeat_interleave by known numbers."""
    given = dict(zip(("self", "repeats", "dim"), args, strict=False)) | kwargs
    source = given.get("self", given.get("input"))
    if "repeats" not in given and isinstance(source, Tensor):
        return _shaped(questions, func, args, kwargs)
    repeats = given.get("repeats")
    if not isinstance(source, Tensor) or not isinstance(repeats, Tensor) or (value := questions.value(repeats)) is None:
        return ASK
    dim = given.get("dim")
    flat, along = (source.flatten(), 0) if dim is None else (source, dim)
    with real_values():
        places = torch.repeat_interleave(value.expand(flat.shape[along]))
    return flat.index_select(along, questions.constant(places))


def _sized(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that takes sizes, dims or bounds: known tensors among them as numbers."""

    def number(part: Any) -> Any:
        if isinstance(part, Tensor):
            return _as_number(questions, part)
        return type(part)(number(p) for p in part) if type(part) in (tuple, list) else part

    kept = 0 if func in _CREATE else 1  # what the call is about is no size
    found = [*args[:kept], *(number(a) for a in args[kept:])]
    named = {key: number(a) for key, a in kwargs.items()}
    if _same(found, args) and all(_same([a], [kwargs[k]]) for k, a in named.items()):
        return ASK
    result = func(*found, **named)
    questions.known.note(func, tuple(found), named, result)
    return result


def _same(found: Any, given: Any) -> bool:
    return all(
        _same(one, other) if type(other) in (tuple, list) else one is other
        for one, other in zip(found, given, strict=True)
    )


def _shape_only(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that reads no more of its operand than its shape and dtype: noted as one without it."""
    if not args:
        return ASK
    result = func(*args, **kwargs)
    source, *rest = args
    own = {"dtype": source.dtype, **{key: value for key, value in kwargs.items() if key != "memory_format"}}
    shape = [tuple(source.shape)] if func.__name__.endswith("_like") else []
    questions.known.note(_PLAIN[func.__name__], (*shape, *rest), own, result)
    return result


def _as_other(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """x.to(other), x.expand_as(other) and the like: noted with what they read of the other."""
    if kwargs or len(args) != 2 or not isinstance(args[1], Tensor):
        return ASK
    result = func(*args)
    read, kind = _AS_OTHER[func]
    questions.known.note(read, (args[0], getattr(args[1], kind)), {}, result)
    return result


_PLAIN: dict[str, Any] = {
    "zeros_like": torch.zeros,
    "ones_like": torch.ones,
    "full_like": torch.full,
    "empty_like": torch.empty,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_full": torch.full,
    "new_empty": torch.empty,
    "new_tensor": torch.tensor,
}
_AS_OTHER: dict[Any, tuple[Any, str]] = {
    Tensor.to: (Tensor.to, "dtype"),
    Tensor.type_as: (Tensor.to, "dtype"),
    Tensor.expand_as: (Tensor.expand, "shape"),
    Tensor.view_as: (Tensor.view, "shape"),
    Tensor.reshape_as: (Tensor.reshape, "shape"),
}
_SIZED = (
    *("view", "reshape", "expand", "repeat", "tile", "narrow", "select", "roll", "unflatten", "split", "chunk", "topk"),
    *("flatten", "unsqueeze", "squeeze", "sum", "mean", "cumsum"),
)

_CREATE = (
    *(torch.arange, torch.range, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace, torch.eye),
    *(torch.rand, torch.randn, torch.randperm),
)

SHAPES: dict[Any, Handler] = {
    **dict.fromkeys((*both(*_SIZED), *_CREATE), _sized),
    **dict.fromkeys(both(*_PLAIN), _shape_only),
    **dict.fromkeys(_AS_OTHER, _as_other),
    **dict.fromkeys(both("nonzero", "argwhere", "where", "unique", "unique_consecutive"), _shaped),
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), _indexed),
    **dict.fromkeys(both("masked_select"), _masked),
    **dict.fromkeys(both("repeat_interleave"), _repeated),
    **dict.fromkeys(both("bincount"), _counted),
    F.one_hot: _one_hot,
}
