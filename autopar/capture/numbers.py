"""What does forward do with a number that it took out of a tensor (`x.item()`)? A stand-in that computes as tensors do.

Arithmetic and comparisons of a `Number` are ops of the graph, in the width of Python's numbers; as an operand of torch
it is its tensor. What needs the number itself (a key, an index, text that is more than told, a branch) is asked of the
tensor, which answers or refuses (`answers`).
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from autopar.capture.counted import Counted

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_UNARY = ("neg", "pos", "abs", "invert")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ASKED = ("index", "int", "float", "complex", "bool")
_TEXTS = ("str", "repr", "format")
_ROUNDED = {"floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc}


class Number:
    """A tensor without dims in place of a Python number."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        wide = tensor.dtype if tensor.is_complex() or tensor.dtype == torch.bool else _kept(tensor)
        self.tensor = (
            tensor.detach().to(wide, copy=True).reshape(())
        )  # Python's numbers do not overflow or round sooner

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance holds as of the number
        return _kind(self.tensor)

    def __hash__(self) -> int:
        return hash(_asked(self))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        rounded = Number(torch.round(self.tensor, decimals=digits or 0))
        return rounded if digits is not None else Number(rounded.tensor.to(torch.int64))

    def is_integer(self) -> Any:
        return self == Number(torch.floor(self.tensor))

    def conjugate(self) -> "Number":
        return Number(torch.conj(self.tensor))

    @property
    def real(self) -> "Number":
        return Number(self.tensor.real) if self.tensor.is_complex() else self

    def __getattr__(self, name: str) -> Any:
        return getattr(_asked(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = as_tensors((args, kwargs or {}))
        return func(*args, **kwargs)


MANY = 4096
"""Elements of a tensor that become numbers one by one (`tolist`). With more, a trace is mostly made of them."""


def as_number(value: Any, kind: type | None) -> Number:
    """A tensor of one element, or a number, as one of the trace: of this kind, or of its own."""
    tensor = value.tensor if type(value) is Number else value
    if not isinstance(tensor, Tensor):
        wide = torch.complex128 if isinstance(tensor, complex) else torch.float64
        tensor = torch.scalar_tensor(tensor, dtype=torch.int64 if isinstance(tensor, int) else wide)
    return Number(tensor if kind is None else tensor.to(torch.float64 if kind is float else torch.int64))


def as_numbers(tensor: Tensor) -> Any:
    """What `tolist` makes of a tensor."""
    return [as_numbers(part) for part in tensor.unbind()] if tensor.dim() else Number(tensor)


def _kept(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.is_floating_point() else torch.int64


def _kind(tensor: Tensor) -> type:
    if tensor.is_complex():
        return complex
    return bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int


def _asked(number: Number) -> Any:
    """The number itself, which the tensor refuses where nobody knows it."""
    kind = _kind(number.tensor)
    return kind(number.tensor) if kind is not bool else bool(int(number.tensor))


def has_numbers(given: Any) -> bool:
    """Whether there is a number among arguments of torch."""
    numbers = list[Number]()
    _collect(given, numbers, [])
    return bool(numbers)


def as_tensors(given: Any) -> Any:
    """Arguments of torch with tensors in place of numbers, as wide as a number would make what it meets."""
    numbers, floats = list[Number](), list[Tensor]()
    _collect(given, numbers, floats)
    if not numbers:
        return given
    if any(tensor.dim() for tensor in floats):
        return _exchanged(given, None)  # a tensor without dims widens none that has some
    dtypes = [tensor.dtype for tensor in floats if tensor.is_floating_point()] or [torch.get_default_dtype()]
    return _exchanged(given, reduce(torch.promote_types, dtypes))


def _collect(given: Any, numbers: list[Number], floats: list[Tensor]) -> None:
    if type(given) is Number:
        numbers.append(given)
    elif isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex():
            floats.append(given)
    elif isinstance(given, tuple | list):
        for part in given:
            _collect(part, numbers, floats)
    elif type(given) is dict:
        _collect(list(given.values()), numbers, floats)
    elif type(given) is slice:
        _collect((given.start, given.stop, given.step), numbers, floats)


def _exchanged(given: Any, narrow: torch.dtype | None) -> Any:
    if type(given) is Number:
        is_wide = narrow is not None and given.tensor.dtype == torch.float64
        return given.tensor.to(narrow) if is_wide else given.tensor
    if type(given) is list:
        return [_exchanged(part, narrow) for part in given]
    if type(given) is tuple:
        return tuple(_exchanged(part, narrow) for part in given)
    if type(given) is dict:
        return {key: _exchanged(part, narrow) for key, part in given.items()}
    if type(given) is slice:
        return slice(*(_exchanged(part, narrow) for part in (given.start, given.stop, given.step)))
    return given


def _operand(other: Any, like: Tensor) -> Any:
    """The other operand as a tensor as wide as Python's; None for what is no number."""
    if type(other) is Number:
        return other.tensor
    if isinstance(other, bool | int | float | complex):
        wide = torch.complex128 if isinstance(other, complex) else torch.float64 if isinstance(other, float) else None
        return torch.scalar_tensor(other, dtype=wide or torch.int64, device=like.device)
    return None


def _computing(name: str, is_swapped: bool) -> Callable[[Number, Any], Any]:
    function = getattr(operator, f"__{name}__")

    def compute(self: Number, other: Any) -> Any:
        if type(other) is Counted:  # unknown both ways
            return other
        if isinstance(other, Tensor):
            return function(*as_tensors([other, self] if is_swapped else [self, other]))
        operand = _operand(other, self.tensor)
        if operand is None:
            return NotImplemented
        pair = [operand, self.tensor] if is_swapped else [self.tensor, operand]
        dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
        if name == "truediv" and not dtype.is_complex:
            dtype = torch.float64
        if name not in ("and", "or", "xor") and dtype == torch.bool:
            dtype = torch.int64
        return Number(function(*(part.to(dtype) for part in pair)))

    return compute


def _comparing(name: str) -> Callable[[Number, Any], Any]:
    function = getattr(operator, f"__{name}__")

    def compare(self: Number, other: Any) -> Any:
        if type(other) is Counted:  # as a branch that the data decide
            return other.undecided()
        if isinstance(other, Tensor):
            return function(*as_tensors([self, other]))
        operand = _operand(other, self.tensor)
        return NotImplemented if operand is None else Number(function(self.tensor, operand))

    return compare


def _asking(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, f"__{name}__")

    def ask(self: Number, *others: Any) -> Any:
        return method(self.tensor, *others)

    return ask


def _making(name: str) -> Callable[[Number], Number]:
    def make(self: Number) -> Number:
        if name in _ROUNDED:
            return Number(_ROUNDED[name](self.tensor).to(torch.int64))
        is_flag = self.tensor.dtype == torch.bool
        return Number(getattr(operator, f"__{name}__")(self.tensor.to(torch.int64) if is_flag else self.tensor))

    return make


for _name in _BINARY:
    setattr(Number, f"__{_name}__", _computing(_name, False))
    setattr(Number, f"__r{_name}__", _computing(_name, True))
for _name in _COMPARISONS:
    setattr(Number, f"__{_name}__", _comparing(_name))
for _name in (*_UNARY, *_ROUNDED):
    setattr(Number, f"__{_name}__", _making(_name))
for _name in (*_ASKED, *_TEXTS):
    setattr(Number, f"__{_name}__", _asking("repr" if _name == "str" else _name))
