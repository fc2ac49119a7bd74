"""What does forward leave behind in Python? State that it changed, and numbers drawn outside torch.

A run of forward leaves the model, and whatever else of Python its code reaches (`reached`), as it was. Where the run
changed something, another run begins from there. What that one leaves alone has settled: the model is traced again
with it, and the same graph stands for all further calls. What changes again goes on changing: it is traced with
stand-ins that note what is asked of it (`counted`, `tracked`), and refused where an answer changes the graph. What
changes by the clock, or outside Python, is not seen.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.capture.counted import Counted, Decisions
from autopar.capture.fake_twin import is_fake
from autopar.capture.numbers import Number
from autopar.capture.reached import CONTAINERS, PLAIN, TABLES, Holder, Reached
from autopar.capture.tracked import Unknown, tracked
from autopar.capture.user_frame import innermost
from autopar.errors import CaptureError
from autopar.values.inputs import leaves_of, mapped_tensors

NOBODYS = -0x6E6F626F6479
"""A number that stands for one that nobody knows, in text and in what a call left behind."""
Begin = Callable[[nn.Module], None]
"""What is done to a model before a run."""
_PLAIN = (*PLAIN, torch.dtype, torch.device, torch.Size, np.generic)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class StateChange:
    """What a run changed of a holder: all its parts before and after."""

    holder: Holder
    was: dict[Any, Any]
    now: dict[Any, Any]

    @property
    def keys(self) -> list[Any]:
        """Of the parts that changed."""
        return [k for k in {**self.was, **self.now} if not _alike(self.was.get(k, _MISSING), self.now.get(k, _MISSING))]

    @property
    def places(self) -> set[Any]:
        """What stands in for it stands in for."""
        own = id(self.holder)
        return {own} if self.has_other_parts or self.holder.whole else {(own, key) for key in self.keys}

    @property
    def has_other_parts(self) -> bool:
        """Whether a container has more, fewer or other parts than before."""
        is_container = isinstance(self.holder.owner, CONTAINERS) and not self.holder.names
        return is_container and self.was.keys() != self.now.keys()

    @property
    def label(self) -> str:
        return self.holder.label if self.has_other_parts or self.holder.whole else self.holder.where(self.keys[0])

    def __str__(self) -> str:
        if self.holder.whole:
            return f"{self.label}, a {type(self.holder.owner).__name__}, changes from call to call"
        if self.has_other_parts:
            kind = type(self.holder.owner).__name__
            return f"{self.label} changes from call to call ({kind} of {len(self.was)}, then of {len(self.now)})"
        was, now = (_words(parts.get(self.keys[0], _MISSING)) for parts in (self.was, self.now))
        return f"{self.label} changes from call to call ({was}, then {now})"


def _words(value: Any) -> str:
    if isinstance(value, _PLAIN) or value is _MISSING:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, Tensor):
        return "a tensor"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, CONTAINERS) else "")


class UnknownChangeError(CaptureError):
    """Nothing can stand in for what changes."""


@dataclass(slots=True)
class PythonState:
    """What runs left behind. begin: done before each run, on top of what the model holds; changes: of the last run;
    moved: whose random numbers were drawn."""

    begin: list[Begin] = field(default_factory=list)
    changes: list[StateChange] = field(default_factory=list)
    moved: str = ""
    _reached: Reached | None = None

    def reached(self, model: nn.Module) -> Reached:
        """What the forward of a model can reach, as it was when first asked."""
        if self._reached is None:
            self._reached = Reached.of(model)
        return self._reached

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        """Inside, forward runs from `begin`; afterwards everything is as it was before."""
        reached = self.reached(model)
        before = Snapshot(reached)
        draws = _draws()
        python, numpy = random.getstate(), np.random.get_state()
        for change in self.begin:
            change(model)
        with ExitStack() as stack:
            stack.callback(before.restore)
            for holder, key, own in list(reached.stand_ins()):
                holder.set(key, own)
            started = Snapshot(reached)
            try:
                yield
            finally:
                self.changes = started.changes()
                now = _draws()
                self.moved = "" if now == draws else "Python's" if now[0] != draws[0] else "NumPy's"
                random.setstate(python)
                np.random.set_state(numpy)


class Snapshot:
    """What all that forward reaches holds."""

    def __init__(self, reached: Reached) -> None:
        self._held = [(holder, holder.parts()) for holder in reached.holders.values()]

    def changes(self) -> list[StateChange]:
        """What is not as it was."""
        found = []
        for holder, was in self._held:
            now = holder.parts()
            if isinstance(holder.owner, nn.Module):
                was, now = ({k: v for k, v in parts.items() if k not in TABLES} for parts in (was, now))
            if was.keys() != now.keys() or not all(_alike(value, now[key]) for key, value in was.items()):
                found.append(StateChange(holder, was, now))
        return sorted(found, key=lambda change: not isinstance(change.holder.owner, nn.Module))

    def restore(self) -> None:
        """Put everything back."""
        for holder, was in self._held:
            now = holder.parts()
            if [*map(id, was)] != [*map(id, now)] or any(now[key] is not value for key, value in was.items()):
                holder.put(was)


def _alike(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    if type(was) is Number:  # nobody knows
        return False
    if isinstance(was, _PLAIN):
        return bool(was == now) or (was != was and now != now)
    if isinstance(was, tuple):
        return len(was) == len(now) and all(map(_alike, was, now))
    return isinstance(was, MethodType) and was == now


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


def next_begin(changes: Sequence[StateChange], constants: Constants, decisions: Decisions) -> list[Begin]:
    """What the next call begins with, after a run that left `changes`: constants as they are, other tensors unknown."""

    def known(value: Any, label: str) -> Any:
        if is_fake(value):
            return constants.values[id(value)][1] if id(value) in constants.values else Unknown(label, decisions)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(known(part, label) for part in value)
        is_container = isinstance(value, CONTAINERS) and not isinstance(value, set)
        if is_container or isinstance(value, Distribution):
            inside = Holder(value, label)
            for key, part in inside.parts().items():
                if (own := known(part, label)) is not part:
                    inside.set(key, own)
        return value

    def put(change: StateChange) -> Begin:
        parts = {k: known(v, change.holder.where(k)) for k, v in change.now.items()}

        def begin(model: nn.Module) -> None:
            own = {key: _unknown_number(value, model) for key, value in parts.items()}
            is_module = isinstance(change.holder.owner, nn.Module)
            change.holder.put(({t: vars(change.holder.owner)[t] for t in TABLES} if is_module else {}) | own)

        return begin

    return [put(change) for change in changes]


def _unknown_number(value: Any, model: nn.Module) -> Any:
    """In place of a number that a call left behind: in the trace that begins, one that nobody knows.

    No pass may find out what it is, and no model computes it itself: it is made of a parameter.
    """
    if type(value) is not Number and not isinstance(value, torch.SymInt):
        return value
    kind = value.tensor.dtype if type(value) is Number else torch.int64
    parameter = next(p for p in model.parameters() if p.numel())
    first = parameter.detach().reshape(-1)[0].to(torch.complex128 if kind.is_complex else torch.float64)
    return Number((first * NOBODYS).to(kind))


def asked_begin(changes: Sequence[StateChange], reached: Reached, decisions: Decisions) -> list[Begin]:
    """Stand-ins for what goes on changing, to be put after `next_begin`.

    Raises:
        UnknownChangeError: if there is none.
    """
    found: list[Begin] = []
    for change in changes:
        keys = change.was if isinstance(change.holder.owner, list | deque) else change.keys  # they may move
        if change.holder.whole:
            raise UnknownChangeError(str(change))
        if change.has_other_parts:
            found += _exchanged(change, reached, decisions)
        else:
            found += [_stand_in(change, key, decisions) for key in keys]
    return found


def _exchanged(change: StateChange, reached: Reached, decisions: Decisions) -> list[Begin]:
    """Another container wherever this one is."""
    owner, places = change.holder.owner, reached.parents.get(id(change.holder.owner), [])
    if not places or tracked(owner, change.label, decisions) is None:
        raise UnknownChangeError(str(change))

    def exchange(model: nn.Module) -> None:
        own = tracked(owner, change.label, decisions)
        for holder, key in places:
            if holder.parts().get(key) is owner:
                holder.set(key, own)

    return [exchange]


def _stand_in(change: StateChange, key: Any, decisions: Decisions) -> Begin:
    """Another value at a place; `was` is what the call that begins so finds there."""
    was, now, label = change.was.get(key, _MISSING), change.now.get(key, _MISSING), change.holder.where(key)
    if was is None or was is _MISSING:
        was = now  # what a call leaves there; without it the model was traced before
    elif now is None or now is _MISSING:
        raise UnknownChangeError(str(change))
    left = next((value for value in (was, now) if isinstance(value, torch.SymInt) or type(value) is Number), None)
    if left is not None:
        return lambda model: change.holder.set(key, _unknown_number(left, model))
    if type(was) in (bool, int, float):
        own: Any = Counted(was, label, decisions)
    elif isinstance(was, Tensor) and not is_fake(was):
        return lambda model: None
    elif was is None or is_fake(was):
        own = was if was is None else Unknown(label, decisions)
    elif isinstance(was, CONTAINERS):
        parts = [Holder(value, label).parts() if isinstance(value, CONTAINERS) else {} for value in (was, now)]
        if parts[0].keys() == parts[1].keys() or (own := tracked(was, label, decisions)) is None:
            return lambda model: None
    elif type(was) in (Unknown, Counted):  # which stands in already
        return lambda model: None
    else:
        own = Unknown(label, decisions)
    return lambda model: change.holder.set(key, own)


def line_of(run: Callable[[], Any], state: Callable[[], Any]) -> str | None:
    """`file:line` of the user's first line in a run after which `state()` is another."""
    found: list[str] = []
    seen: dict[str, Any] = {"line": None, "state": None}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found or innermost([(frame.f_code.co_filename, frame.f_lineno)]) is None:
            return None
        now = state()
        if seen["line"] is not None and now != seen["state"]:
            found.append(seen["line"])
            return None
        seen.update(line=f"{frame.f_code.co_filename}:{frame.f_lineno}", state=now)
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


def line_of_draw(run: Callable[[], Any]) -> str | None:
    """Of the line that draws numbers from Python's or NumPy's own generator."""
    return line_of(run, _draws)


def line_of_change(run: Callable[[], Any], change: StateChange) -> str | None:
    """Of the line that writes what a run was seen to change."""
    key = None if change.has_other_parts or change.holder.whole else change.keys[0]

    def state() -> Any:
        parts = change.holder.parts()
        if key is None:
            return tuple(map(id, parts.values())) if not change.holder.whole else parts[""]
        value = parts.get(key, _MISSING)
        return (type(value), value) if isinstance(value, _PLAIN) else id(value)

    return line_of(run, state)


def _draws() -> tuple[Any, ...]:
    kind, keys, position, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, tuple(rest)
