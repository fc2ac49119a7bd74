"""Which Python state can forward reach? What a model's modules hold, and what their methods' code names.

From the attributes of modules the walk goes into containers, objects and functions; from classes into their attributes
and methods; from functions into what they close over, their defaults, and those globals that their code names. torch,
Python's library, autopar itself, and installed packages that no module of the model is of (progress bars, clients of
the web) are not entered. Each container or object found is a `Holder`, whose parts can be
read and put back.
"""

import os
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from threading import local
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn

from autopar.capture.reached_values import CACHED, is_advanced, is_cache, is_whole, put_whole, stand_in, whole
from autopar.capture.user_frame import is_machinery

TABLES = ("_parameters", "_buffers", "_modules")
PLAIN = (type(None), bool, int, float, complex, str, bytes)
CONTAINERS = (list, dict, set, deque)
LARGEST = 4096
"""Parts of a container that are looked into; of a larger one only its own parts are compared."""
_CLOSED = (Tensor, BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, property)
_MISSING = object()


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A container, an object, or a part of one. label: how a message names it; names: the parts looked at, of a
    namespace whose others belong to nobody here; whole: it has one part, its state."""

    owner: Any
    label: str
    names: tuple[str, ...] = ()
    whole: bool = False

    def parts(self) -> dict[Any, Any]:
        """What it holds now, by position, key or name."""
        owner = self.owner
        if self.whole:
            return {"": whole(owner)}
        if isinstance(owner, list):
            return dict(enumerate(list.__iter__(owner)))
        if isinstance(owner, deque):
            return dict(enumerate(deque.__iter__(owner)))
        if isinstance(owner, set):
            return dict.fromkeys(set.__iter__(owner))
        if isinstance(owner, CellType):
            return {"": owner.cell_contents} if _is_filled(owner) else {}
        if isinstance(owner, type):
            return {name: value for name, value in vars(owner).items() if _is_state(name, value)}
        table = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if self.names and isinstance(owner, dict | ModuleType):
            return {name: table[name] for name in self.names if name in table}
        found = dict(dict.items(table))
        for name in self.names:
            if (value := getattr(owner, name, _MISSING)) is not _MISSING:
                found[name] = value
        return found

    def put(self, parts: dict[Any, Any]) -> None:
        """Let it hold these."""
        owner = self.owner
        if self.whole:
            if parts != self.parts():
                put_whole(owner, parts[""])
        elif isinstance(owner, list):
            list.__setitem__(owner, slice(None), list(parts.values()))
        elif isinstance(owner, deque):
            owner.clear()
            owner.extend(parts.values())
        elif isinstance(owner, set):
            owner.clear()
            owner.update(parts)
        elif isinstance(owner, CellType):
            if parts:
                owner.cell_contents = parts[""]
        elif isinstance(owner, dict) and not self.names:
            dict.clear(owner)
            dict.update(owner, parts)
        else:
            now = self.parts()
            for name in [*now, *parts]:
                if name not in parts:
                    self._delete(name)
                elif now.get(name, _MISSING) is not parts[name]:
                    self.set(name, parts[name])

    def set(self, key: Any, value: Any) -> None:
        """Exchange one part."""
        owner = self.owner
        if isinstance(owner, CellType):
            owner.cell_contents = value
        elif isinstance(owner, dict):
            dict.__setitem__(owner, key, value)
        elif isinstance(owner, list | deque):
            owner[key] = value
        elif isinstance(owner, type):
            type.__setattr__(owner, key, value)
        elif key in self.names and not isinstance(owner, ModuleType):
            object.__setattr__(owner, key, value)
        else:
            vars(owner)[key] = value

    def _delete(self, name: str) -> None:
        owner = self.owner
        if isinstance(owner, type):
            type.__delattr__(owner, name)
        elif isinstance(owner, dict):
            dict.pop(owner, name, None)
        elif name in self.names and not isinstance(owner, ModuleType):
            object.__delattr__(owner, name)
        else:
            vars(owner).pop(name, None)

    def where(self, key: Any) -> str:
        """`Net.step`, `Net.table['n']`, `COUNT`."""
        if self.whole or isinstance(self.owner, CellType | set):
            return self.label
        if isinstance(self.owner, CONTAINERS) and not self.names:
            return f"{self.label}[{key!r}]"
        return f"{self.label}.{key}" if self.label else str(key)


@dataclass(slots=True)
class Reached:
    """All holders that a model's forward can reach. parents: where an owner is a part of others, by its id; exchanged:
    where iterators and caches are."""

    holders: dict[Any, Holder] = field(default_factory=dict)
    parents: dict[int, list[tuple[Holder, Any]]] = field(default_factory=dict)
    exchanged: list[tuple[Holder, Any]] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)
    _globals: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)
    _called: set[str] = field(default_factory=lambda: {"forward"})
    _waiting: dict[str, list[tuple[Any, str]]] = field(default_factory=dict)
    """Methods by name, until code that is reached names one: most of a library's class forward never calls."""
    _packages: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> "Reached":
        found = cls(_packages=frozenset(type(module).__module__.split(".")[0] for module in model.modules()))
        todo: deque[tuple[Any, str]] = deque((module, type(module).__name__) for module in model.modules())
        found.holders["environ"] = Holder(os.environ, "os.environ", whole=True)
        while todo:
            value, label = todo.popleft()
            todo.extend(found._look(value, label))
        return found

    def _look(self, value: Any, label: str) -> Iterator[tuple[Any, str]]:
        """Enter a value, and give what it leads to."""
        if isinstance(value, (*PLAIN, *_CLOSED)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield from self._hold(value, label, ())
            yield type(value), type(value).__name__
        elif isinstance(value, CONTAINERS):
            yield from self._hold(value, label, ())
        elif is_whole(value):
            self.holders[id(value)] = Holder(value, label, whole=True)
        elif isinstance(value, tuple):
            yield from ((part, label) for part in value)
        elif isinstance(value, FunctionType):
            yield from self._function(value, label)
        elif isinstance(value, CodeType):
            yield from ()
        elif isinstance(value, MethodType):
            yield from ((value.__func__, value.__func__.__qualname__), (value.__self__, label))
        elif isinstance(value, partial):
            yield from ((part, label) for part in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, CellType):
            yield from self._hold(value, label, ())
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, ModuleType):
            return
        elif type(value) is CACHED:
            yield value.__wrapped__, getattr(value, "__qualname__", label)
        elif isinstance(value, classmethod | staticmethod):
            yield value.__func__, label
        else:
            names = tuple(n for cls in type(value).__mro__ for n in _slots(cls))
            is_ours = not is_foreign(type(value))
            if (names and is_ours) or (type(getattr(value, "__dict__", None)) is dict and (is_ours or _is_bag(value))):
                yield from self._hold(value, label, names if is_ours else ())
                yield type(value), type(value).__name__

    def _hold(self, owner: Any, label: str, names: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
        holder = self.holders[id(owner)] = Holder(owner, label, names)
        parts = holder.parts()
        if len(parts) > LARGEST:
            return
        for key, part in parts.items():
            if isinstance(owner, nn.Module) and key in TABLES:
                continue
            if is_advanced(part):
                self.exchanged.append((holder, key))
            elif is_cache(part):
                self.exchanged.append((holder, key))
                yield part, holder.where(key)
            elif not isinstance(part, PLAIN):
                self.parents.setdefault(id(part), []).append((holder, key))
                yield part, holder.where(key)

    def stand_ins(self) -> Iterator[tuple[Holder, Any, Any]]:
        """What is put in place of iterators and caches for one run."""
        for holder, key in self.exchanged:
            yield holder, key, stand_in(holder.parts()[key], holder.where(key))

    def _class(self, cls: type) -> Iterator[tuple[Any, str]]:
        if is_foreign(cls) or self._is_elsewhere(cls.__module__):
            return
        yield from ((base, base.__name__) for base in cls.__mro__[1:])
        yield from self._hold(cls, cls.__name__, ())
        for name, value in list(vars(cls).items()):
            if isinstance(value, property):
                methods = [(f, f.__qualname__) for f in (value.fget, value.fset) if isinstance(f, FunctionType)]
            else:
                methods = [] if _is_state(name, value) else [(value, f"{cls.__name__}.{name}")]
            if name in self._called or name.startswith("__"):
                yield from methods
            elif methods:
                self._waiting.setdefault(name, []).extend(methods)

    def _function(self, function: FunctionType, label: str) -> Iterator[tuple[Any, str]]:
        if _is_machinery(function.__code__.co_filename) or self._is_elsewhere(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield cell, name
        yield from self._hold(function, label, ())
        names = [p for p in function.__code__.co_varnames]
        for name, value in zip(reversed(names[: function.__code__.co_argcount]),
                               reversed(function.__defaults__ or ()), strict=False):  # fmt: skip
            yield value, name
        yield from ((value, name) for name, value in (function.__kwdefaults__ or {}).items())
        named = _names_in(function.__code__)
        yield from self._named(function.__globals__, named)
        for name in sorted(named - self._called):
            self._called.add(name)
            yield from self._waiting.pop(name, ())

    def _is_elsewhere(self, module: str | None) -> bool:
        """Whether a module is of an installed package that no part of the model is of."""
        file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
        is_installed = "site-packages" in file or "dist-packages" in file
        return is_installed and (module or "").split(".")[0] not in self._packages

    def _named(self, table: dict[str, Any], names: frozenset[str]) -> Iterator[tuple[Any, str]]:
        """Globals that code names, and attributes of modules among them."""
        known = self._globals.setdefault(id(table), (table, set()))[1]
        new = names - known
        if not new:
            return
        known |= new
        key = id(table), "globals"
        holder = self.holders[key] = Holder(table, "", tuple(sorted(known)))
        for name in sorted(new & table.keys()):
            value = table[name]
            if isinstance(value, ModuleType):
                file = getattr(value, "__file__", None)
                if file is not None and not (_is_machinery(file) or self._is_elsewhere(value.__name__)):
                    yield from self._named(vars(value), names)
            elif is_advanced(value):
                self.exchanged.append((holder, name))
            elif is_cache(value):
                self.exchanged.append((holder, name))
                yield value, name
            elif not isinstance(value, PLAIN):
                self.parents.setdefault(id(value), []).append((holder, name))
                yield value, name


def _is_bag(value: Any) -> bool:
    """Whether an object of Python's library is there to hold what its user likes."""
    return isinstance(value, SimpleNamespace | Namespace | local)


def is_foreign(cls: type) -> bool:
    """Whether a class is torch's, ours or of Python's library."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return cls.__module__ != "__main__" and (file is None or _is_machinery(file))


@lru_cache(maxsize=4096)
def _is_machinery(file: str) -> bool:
    return is_machinery(Path(file))


@lru_cache(maxsize=16_384)
def _names_in(code: CodeType) -> frozenset[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)  # getattr(self, "step")
    return frozenset(found)


def _slots(cls: type) -> tuple[str, ...]:
    own = vars(cls).get("__slots__", ())
    names = (own,) if isinstance(own, str) else tuple(own)
    return tuple(
        f"_{cls.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n
        for n in names
        if n not in ("__dict__", "__weakref__")
    )


def _is_state(name: str, value: Any) -> bool:
    """Whether an entry of a class is a value, not code; caches are."""
    if is_cache(value):
        return True
    is_code = isinstance(value, FunctionType | classmethod | staticmethod | property) or hasattr(type(value), "__get__")
    return not is_code and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not _MISSING
    except ValueError:
        return False
