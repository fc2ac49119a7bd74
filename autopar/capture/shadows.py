"""Names of a user's module that are exchanged while its model is traced, so that numbers stay in the trace.

Python's `float()`, `int()`, `round()`, `max()`, `math.sqrt()` need a number of Python's own, where a trace has a
tensor. In modules that ask for one, these names stand for functions which do the same and take such tensors
(`numbers`). A module whose source uses `float` or `int` otherwise than to call them keeps its own.
"""

import ast
import builtins
import inspect
import linecache
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from torch import Tensor

from autopar.capture.counted import Counted
from autopar.capture.number_functions import FORMULAS, by_formula, extreme, in_iteration
from autopar.capture.numbers import Number
from autopar.capture.user_frame import is_machinery

LAYERS = "torch.nn.modules."
"""Modules of torch that are written as a user's are."""
_CALLED = ("float", "int")


class Ask(Protocol):
    """Who knows the values of tensors in a trace."""

    def number(self, value: Tensor | Number, kind: type) -> Any:
        """`kind` (float or int) of a tensor or number: of Python's own where it is known."""

    def value(self, tensor: Any) -> Tensor | None:
        """What a tensor holds, None where that is not known."""


@dataclass(slots=True)
class Shadows:
    """The globals of modules that have asked for numbers, over all traces of a model."""

    tables: dict[int, dict[str, Any]] = field(default_factory=dict)

    def may_add(self, frame: FrameType) -> bool:
        """Note the module of a frame that asks, and those that it imports; whether it is new."""
        table = frame.f_globals
        if id(table) in self.tables or not _is_open(table):
            return False
        self.tables[id(table)] = table
        for found in _imported(table):
            self.tables.setdefault(id(found), found)
        return True

    @contextmanager
    def exchanged(self, ask: Ask) -> Iterator[None]:
        """Inside, the names are exchanged in these modules."""
        saved: list[tuple[Any, str, Any]] = []

        def exchange(owner: Any, new: dict[str, Any]) -> None:
            for name, value in new.items():
                saved.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, value)

        try:
            for table in self.tables.values():
                exchange(_Globals(table), _exchanges(table, ask))
            yield
        finally:
            for owner, name, old in reversed(saved):
                if old is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


class _Globals:
    """The globals of a module, by attribute."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.__dict__ = table


_ABSENT = object()


def _is_open(table: dict[str, Any]) -> bool:
    """Whether a module's names may be exchanged."""
    file, name = table.get("__file__"), str(table.get("__name__"))
    return isinstance(file, str) and (name.startswith(LAYERS) or not is_machinery(Path(file)))


def _imported(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The globals of what a module imports, its classes and functions among that."""
    names = [v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in table.values()]
    modules = [sys.modules.get(name) for name in dict.fromkeys(names) if isinstance(name, str)]
    return [vars(module) for module in modules if module is not None and _is_open(vars(module))]


def _exchanges(table: dict[str, Any], ask: Ask) -> dict[str, Any]:
    only_called = _only_called(str(table.get("__file__")))
    found: dict[str, Any] = {}
    for name, make in _BUILTINS.items():
        own = table.get(name, getattr(builtins, name))
        if own is getattr(builtins, name) and (name not in _CALLED or name in only_called):
            found[name] = make(ask)
    for name, value in table.items():
        if value is math:
            found[name] = _Math(ask)
        elif inspect.isbuiltin(value) and value in FORMULAS:
            found[name] = _formula(value, ask)
    return found


@lru_cache(maxsize=256)
def _only_called(file: str) -> frozenset[str]:
    """Which of `float` and `int` a file does no more with than call them and ask for instances."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            allowed.add(id(node.func))
            if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and len(node.args) == 2:
                allowed |= {id(part) for part in ast.walk(node.args[1])}
        for places in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            allowed |= {id(part) for part in ast.walk(places)} if isinstance(places, ast.AST) else set()
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in _CALLED and id(n) not in allowed}
    return frozenset(_CALLED) - used


class _Math:
    """`math`, with functions that take tensors."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        value = getattr(math, name)
        return _formula(value, self._ask) if inspect.isbuiltin(value) and value in FORMULAS else value


def _formula(function: Any, ask: Ask) -> Any:
    def compute(*args: Any) -> Any:
        given = [ask.number(a, float) if isinstance(a, Tensor) else a for a in args]
        is_ours = any(type(a) is Number for a in given)
        return by_formula(function, tuple(given)) if is_ours else function(*given)

    return compute


class _Kind:
    """`float` or `int` as a function, and what they are asked for besides."""

    def __init__(self, kind: type, ask: Ask) -> None:
        self.kind, self._ask = kind, ask

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and (type(args[0]) is Number or isinstance(args[0], Tensor)):
            return self._ask.number(args[0], self.kind)
        return self.kind(*args, **kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, self.kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)

    def __or__(self, other: Any) -> Any:
        return self.kind | _plain(other)

    __ror__ = __or__


def _is_counted(value: Any) -> bool:
    return type(value) is Counted


def _extreme(name: str) -> Callable[[Ask], Any]:
    own = getattr(builtins, name)

    def make(ask: Ask) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            values = [] if kwargs else in_iteration(args)
            given = [value.tensor if type(value) is Number else value for value in values]
            tensors = [value for value in given if isinstance(value, Tensor)]
            plain: tuple[Any, ...] = (int, float, Number, Tensor)
            if any(t.dim() for t in tensors) or any(not isinstance(v, plain) or _is_counted(v) for v in values):
                return own(*args, **kwargs)
            if all(ask.value(t) is not None for t in tensors):
                return own(*args, **kwargs)
            return extreme(values, name == "max")

        return compute

    return make


def _len(_: Ask) -> Any:
    def compute(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)

    return compute


def _plain(kinds: Any) -> Any:
    if isinstance(kinds, tuple):
        return tuple(_plain(kind) for kind in kinds)
    return kinds.kind if isinstance(kinds, _Kind) else kinds


_BUILTINS: dict[str, Callable[[Ask], Any]] = {
    "float": lambda ask: _Kind(float, ask),
    "int": lambda ask: _Kind(int, ask),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "len": _len,
}
