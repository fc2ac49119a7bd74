"""What does forward decide on state that changes from call to call? Values that note each question about them.

`if self.step % 16 == 0` is another graph at some later call, which no call from here need be. So the next call is
traced once more for each comparison of such a value, with the other answer: where the graph stays the same, nothing
that is computed hangs on it. What no other answer can stand for (an index, a key, text, an operand of torch) is refused
where it is read, unless it is only told to a person.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from autopar.capture.told import is_told
from autopar.capture.user_frame import model_frame, place_of
from autopar.errors import CaptureError

MANY = 12
"""Comparisons that are answered otherwise one by one; with more, all of them are at once, too."""
ENDLESS = 1 << 16
"""Comparisons after which none is answered otherwise: a loop that waits for one ends."""
_ARITHMETIC = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift"),
    *("neg", "pos", "abs", "invert", "round", "floor", "ceil", "trunc"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool")
_NUMBERS = ("hash", "index", "int", "float", "complex")
_TEXTS = ("str", "repr", "format")


class ReadError(CaptureError):
    """State that changes from call to call is read. label: its name; where: the line that reads it."""

    def __init__(self, label: str, where: str) -> None:
        super().__init__(f"{where}: forward reads {label}, which changes from call to call; keep it in a buffer")
        self.label, self.where = label, where


@dataclass(slots=True)
class Decisions:
    """How many comparisons of changing values there were, and which are answered otherwise: None for none, -1 for all.

    refused: the first read that has no other answer, whatever the model made of the error.
    """

    flipped: int | None = None
    asked: int = 0
    refused: ReadError | None = None

    def answer(self, truth: bool) -> bool:
        """The answer to the next comparison."""
        number, self.asked = self.asked, self.asked + 1
        return truth is not (self.flipped in (number, -1) and number < ENDLESS)

    def read(self, label: str) -> None:
        """Something is read to which no other answer can be given.

        Raises:
            ReadError: if it is for more than telling.
        """
        frame = model_frame()
        if frame is None or is_told(frame):
            return
        self.refused = self.refused or ReadError(label, place_of(frame)[0])
        raise self.refused

    @property
    def others(self) -> tuple[int, ...]:
        """What to flip in further traces."""
        return (*range(min(self.asked, MANY)), *((-1,) if self.asked > MANY else ()))


class Counted:
    """A number, whose comparisons, and those of what is computed with it, go to `decisions`."""

    __slots__ = ("_decisions", "_label", "_number")

    def __init__(self, number: Any, label: str, decisions: Decisions) -> None:
        self._number, self._label, self._decisions = number, label, decisions

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance holds as of the number
        return type(self._number)

    def __getattr__(self, name: str) -> Any:
        self._decisions.read(self._label)
        return getattr(self._number, name)

    def undecided(self) -> bool:
        """The answer to a comparison with what nobody knows."""
        return self._decisions.answer(True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise refused_in((args, kwargs), cls)


def refused_in(given: Any, kind: Any) -> Exception:
    """What a value of `kind` among the arguments of a call of torch says to that."""
    own: Any = type(given)
    if own is kind:
        try:
            given._decisions.read(given._label)
        except ReadError as error:
            return error
        return TypeError(f"{given._label} changes from call to call")
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    found = (refused_in(part, kind) for part in parts)
    return next((error for error in found if error is not _NONE), _NONE)


_NONE = TypeError("no such argument")


def _computing(name: str) -> Callable[..., Any]:
    def compute(self: Any, *others: Any) -> Any:
        plain = (other._number if type(other) is Counted else other for other in others)
        method = getattr(type(self._number), f"__{name}__", None)
        result = NotImplemented if method is None else method(self._number, *plain)
        return Counted(result, self._label, self._decisions) if type(result) in (int, float, bool) else result

    return compute


def _comparing(name: str) -> Callable[..., Any]:
    def compare(self: Any, *others: Any) -> Any:
        plain = (other._number if type(other) is Counted else other for other in others)
        truth = getattr(type(self._number), f"__{name}__", bool)(self._number, *plain)
        return self._decisions.answer(truth) if type(truth) is bool else truth

    return compare


def _reading(name: str) -> Callable[..., Any]:
    def read(self: Any, *others: Any) -> Any:
        self._decisions.read(self._label)
        return getattr(self._number, f"__{name}__")(*others)

    return read


for _name in _ARITHMETIC:
    setattr(Counted, f"__{_name}__", _computing(_name))
for _name in _COMPARISONS:
    setattr(Counted, f"__{_name}__", _comparing(_name))
for _name in (*_NUMBERS, *_TEXTS):
    setattr(Counted, f"__{_name}__", _reading(_name))
