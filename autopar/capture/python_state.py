"""What does forward leave behind in Python? Attributes and lists that it changed, and numbers drawn outside torch.

A run of forward leaves a model as it was. Where the run changed something, the model is traced again from there: if
that gives the same graph, the change is a note that nobody reads (or a constant that is made once); if not, one graph
cannot stand for the model. Looked at are attributes of modules, lists and dicts among them, what such a list or object
holds (one level deep), and lists that hooks close over. What changes in globals or by the clock is not seen.
"""

import inspect
import random
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.capture.counted import Decisions, counted
from autopar.capture.fake_twin import is_fake
from autopar.capture.gradient_hooks import held_by
from autopar.capture.numbers import marked
from autopar.capture.user_frame import innermost
from autopar.errors import CaptureError
from autopar.inputs import leaves_of, mapped_tensors

_LISTS = (list, dict, set, deque, OrderedDict)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CLOSED = (nn.Module, Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
"""What is not looked into: it is looked at elsewhere, or does not change."""
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute of a module that a run changed: `owner` holds what is now `value` under `name`."""

    module: nn.Module
    name: str
    was: Any
    value: Any

    def where(self) -> str:
        """`file:line: Class.name`, the line that is likely to have written it."""
        pattern = re.compile(rf"\.{re.escape(self.name)}\b\s*([-+*/%&|@]?=[^=]|\[.*\]\s*=|\.(append|add|extend|insert|"
                             r"update|pop|popleft|appendleft|setdefault|clear)\b)")  # fmt: skip
        for cls in type(self.module).__mro__:
            try:
                lines, first = inspect.getsourcelines(cls)
            except (OSError, TypeError):
                continue
            starts = [i for i, line in enumerate(lines) if "def " in line and "def __init__" not in line]
            for number, line in enumerate(lines):
                if starts and number >= starts[0] and pattern.search(line) and _method(lines, number) != "__init__":
                    return f"{inspect.getsourcefile(cls)}:{first + number}: {cls.__name__}.{self.name}"
        return f"{type(self.module).__name__}.{self.name}"


def _method(lines: Sequence[str], number: int) -> str:
    """The name of the method that a line of a class is in."""
    for line in reversed(lines[: number + 1]):
        if found := re.match(r"\s*def (\w+)", line):
            return found[1]
    return ""


@dataclass(slots=True)
class PythonState:
    """What runs left behind. begin: values to begin with, in place of the model's; changes: of the last run; moved:
    whose random numbers were drawn."""

    begin: list[Change] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    moved: str = ""

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """Inside, forward runs from `begin`; afterwards the model is as it was before."""
        before = Snapshot(model)
        draws = _draws()
        python, numpy = random.getstate(), np.random.get_state()
        for change in self.begin:
            _put(change)
        started = Snapshot(model) if self.begin else before
        try:
            yield
        finally:
            self.changes = started.changes()
            now = _draws()
            self.moved = "" if now == draws else "Python's" if now[0] != draws[0] else "NumPy's"
            before.restore()
            random.setstate(python)
            np.random.set_state(numpy)


class Snapshot:
    """Attributes of all modules of a model, and what lists and objects among them hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(module, dict(vars(module))) for module in model.modules()]
        self.held: dict[int, tuple[Any, Any, nn.Module, str]] = {}
        for module, own in self.modules:
            for name, value in own.items():
                if name in _TABLES:
                    continue
                self._hold(value, module, name)
                if name in ("_forward_hooks", "_forward_pre_hooks"):
                    for hook in value.values():
                        is_ours = str(getattr(hook, "__module__", "")).startswith("autopar.")
                        for place in () if is_ours else held_by(hook):
                            self._hold(place, module, getattr(hook, "__name__", name), deep=False)

    def _hold(self, value: Any, module: nn.Module, name: str, *, deep: bool = True) -> None:
        if id(value) in self.held or isinstance(value, _PLAIN):
            return
        if type(value) in _LISTS:
            self.held[id(value)] = value, _copied(value), module, name
            if deep and type(value) is not set and len(value) <= 64:
                for part in list(value.values()) if isinstance(value, dict) else list(value):
                    self._hold(part, module, name, deep=False)
        elif not isinstance(value, _CLOSED) and (state := _inside(value)) is not None:
            self.held[id(value)] = value, state, module, name

    def changes(self) -> list[Change]:
        """What is not as it was."""
        found = []
        for module, own in self.modules:
            now = vars(module)
            for name in {**own, **now}:
                was, value = own.get(name, _MISSING), now.get(name, _MISSING)
                if name not in _TABLES and not _alike(was, value):
                    found.append(Change(module, name, was, value))
        seen = {(id(change.module), change.name) for change in found}
        for value, state, module, name in self.held.values():
            now_inside: Any = _copied(value) if type(value) in _LISTS else _inside(value)
            if not _all_alike(state, now_inside) and (id(module), name) not in seen:
                found.append(Change(module, name, _Inside(value, state), _Inside(value, now_inside)))
        return found

    def restore(self) -> None:
        """Put everything back."""
        for module, own in self.modules:
            now = vars(module)
            if len(now) != len(own) or any(now.get(name, _MISSING) is not value for name, value in own.items()):
                now.clear()
                now.update(own)
        for value, state, _, _ in self.held.values():
            _fill(value, state)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class _Inside:
    """What a list or object holds at some time."""

    owner: Any
    state: Any

    def __repr__(self) -> str:
        return f"{type(self.owner).__name__} of {len(self.state)}"


def _put(change: Change) -> None:
    if isinstance(change.value, _Inside):
        _fill(change.value.owner, _traced(change.value.state))
    elif change.value is _MISSING:
        vars(change.module).pop(change.name, None)
    else:
        vars(change.module)[change.name] = _traced(change.value)


def _copied(value: Any) -> Any:
    return type(value)(value) if not isinstance(value, deque) else deque(value, value.maxlen)


def _inside(value: Any) -> Any:
    """What an object holds; None where nobody can tell."""
    if isinstance(value, random.Random):
        return {"state": value.getstate()}
    if isinstance(value, np.random.Generator):
        return {"state": value.bit_generator.state}
    if isinstance(value, np.random.RandomState):
        return {"state": value.get_state()}
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _fill(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state["state"])
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state["state"]
    elif isinstance(value, np.random.RandomState):
        value.set_state(state["state"])
    elif type(value) not in _LISTS:
        if not _all_alike(state, vars(value)):
            vars(value).clear()
            vars(value).update(state)
    elif not _all_alike(state, _copied(value)):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(state)


def _alike(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if isinstance(was, _PLAIN) and type(was) is type(now):
        return bool(was == now) or (was != was and now != now)
    return isinstance(was, MethodType) and was == now


def _all_alike(was: Any, now: Any) -> bool:
    if isinstance(was, set):
        return bool(was == now)
    if isinstance(was, dict):
        return list(was) == list(now) and all(_same(value, now[key]) for key, value in was.items())
    return len(was) == len(now) and all(map(_same, was, now))


def _same(was: Any, now: Any) -> bool:
    """Alike, or states of generators, which are plain through and through."""
    if _alike(was, now):
        return True
    if isinstance(was, tuple | dict) and not isinstance(was, torch.Size) and type(was) is type(now):
        return repr(was) == repr(now) and "Tensor" not in repr(was)
    return False


class _Unknown:
    """In place of a tensor that a call left behind: whoever reads it is told which it is."""

    def __init__(self, change: Change) -> None:
        vars(self)["_change"] = change

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        change: Change = vars(self)["_change"]
        raise CaptureError(
            f"{change.where()} is a tensor that forward leaves behind and the next call reads, which one graph does "
            "not; register it as a buffer"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __float__ = __int__ = __index__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise next(_error(leaf) for leaf in leaves_of((args, kwargs or {})) if isinstance(leaf, cls))


def _error(unknown: _Unknown) -> CaptureError:
    try:
        unknown._refuse()
    except CaptureError as error:
        return error


@dataclass(frozen=True, slots=True)
class _Number:
    """In place of a tensor without dims that a call left behind: in a trace, one that nobody knows."""

    dtype: torch.dtype


def _traced(value: Any) -> Any:
    """What a call begins with, numbers as tensors of its trace."""
    if isinstance(value, _Number):
        return marked(torch.empty((), dtype=value.dtype))
    if isinstance(value, deque):
        return deque(map(_traced, value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(map(_traced, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _traced(part)) for key, part in value.items())
    return value


class Constants(TorchDispatchMode):
    """Real values of what a run on fake tensors makes of constants alone, by the fake tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in leaves_of((args, kwargs or {})) if isinstance(leaf, Tensor)]
        is_known = all(not is_fake(leaf) or id(leaf) in self.values for leaf in leaves)
        if not is_known or torch.Tag.nondeterministic_seeded in func.tags:
            for leaf in leaves:  # written, perhaps
                if func._schema.is_mutable:
                    self.values.pop(id(leaf), None)
            return made

        def real(leaf: Any) -> Any:
            return self.values[id(leaf)][1] if is_fake(leaf) else leaf

        given = mapped_tensors(real, (args, kwargs or {}))
        try:
            with _disable_current_modes():
                values = func(*given[0], **given[1])
        except Exception:  # no value is known then
            return made
        for fake, value in zip(leaves_of(made), leaves_of(values), strict=True):
            if is_fake(fake) and isinstance(value, Tensor):
                self.values[id(fake)] = fake, value
        return made


def next_begin(changes: Sequence[Change], constants: Constants, decisions: Decisions) -> list[Change]:
    """What the next call begins with, after a run that left `changes`: constants as they are, other tensors unknown,
    and counters that tell `decisions` what is decided on them."""

    def known(value: Any, change: Change, was: Any) -> Any:
        if type(value) in (int, float) and type(was) in (int, float) and value != was:
            return counted(value, decisions)
        if isinstance(value, torch.SymInt):
            return _Number(torch.int64)
        if is_fake(value) and id(value) in constants.values:
            return constants.values[id(value)][1]
        if is_fake(value):
            return _Unknown(change) if value.dim() else _Number(value.dtype)
        if isinstance(value, _Inside):
            return _Inside(value.owner, known(value.state, change, getattr(was, "state", None)))
        if isinstance(value, deque):
            return deque((known(part, change, None) for part in value), value.maxlen)
        if type(value) in (list, tuple):
            before = was if type(was) is type(value) and len(was) == len(value) else (None,) * len(value)
            return type(value)(known(part, change, b) for part, b in zip(value, before, strict=True))
        if type(value) in (dict, OrderedDict):
            before = was if isinstance(was, dict) else {}
            return type(value)((key, known(part, change, before.get(key))) for key, part in value.items())
        return value

    return [Change(c.module, c.name, c.was, known(c.value, c, c.was)) for c in changes]


def drawn_at(run: Callable[[], Any]) -> str | None:
    """`file:line` of the user's first line in a run after which Python's or NumPy's generators stand elsewhere."""
    found: list[str] = []
    seen: dict[str, Any] = {"line": None, "draws": _draws()}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found or innermost([(frame.f_code.co_filename, frame.f_lineno)]) is None:
            return None
        if _draws() != seen["draws"] and seen["line"] is not None:
            found.append(seen["line"])
            return None
        seen.update(line=f"{frame.f_code.co_filename}:{frame.f_lineno}", draws=_draws())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except Exception:
        pass
    finally:
        sys.settrace(before)
    return found[0] if found else None


def _draws() -> tuple[Any, ...]:
    kind, keys, position, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, tuple(rest)
