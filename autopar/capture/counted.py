"""What does forward decide on a counter? Numbers that note each comparison, and may answer one of them otherwise.

`if self.step % 16 == 0` is another graph at some later call, which no call from here need be. So the next call is
traced once more for each comparison of a counter, with the other answer: where the graph stays the same, nothing that
is computed hangs on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MANY = 12
"""Comparisons that are answered otherwise one by one; with more, all of them are at once, too."""
_ARITHMETIC = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "neg", "abs", "round", "floor", "ceil"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool")


@dataclass(slots=True)
class Decisions:
    """How many comparisons of counters there were, and which are answered otherwise: None for none, -1 for all."""

    flipped: int | None = None
    asked: int = 0

    def answer(self, truth: bool) -> bool:
        """The answer to the next comparison."""
        number, self.asked = self.asked, self.asked + 1
        return truth is not (self.flipped in (number, -1))

    @property
    def others(self) -> tuple[int, ...]:
        """What to flip in further traces."""
        return (*range(min(self.asked, MANY)), *((-1,) if self.asked > MANY else ()))


def counted(value: int | float, decisions: Decisions) -> Any:
    """The number, whose comparisons, and those of what is computed with it, go to `decisions`."""
    made = _KINDS[type(value)](value)
    made.decisions = decisions
    return made


def _computing(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, f"__{name}__")

    def compute(self: Any, *others: Any) -> Any:
        result = method(self, *others)
        return counted(result, self.decisions) if type(result) in _KINDS else result

    return compute


def _comparing(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, f"__{name}__")

    def compare(self: Any, *others: Any) -> Any:
        truth = method(self, *others)
        return self.decisions.answer(truth) if type(truth) is bool else truth

    return compare


def _kind(kind: type) -> type:
    methods: dict[str, Any] = {"__hash__": kind.__hash__}
    methods |= {f"__{n}__": _computing(kind, n) for n in _ARITHMETIC if hasattr(kind, f"__{n}__")}
    methods |= {f"__{n}__": _comparing(kind, n) for n in _COMPARISONS}
    return type(f"Counted{kind.__name__}", (kind,), methods)


_KINDS: dict[type, Any] = {int: _kind(int), float: _kind(float)}
