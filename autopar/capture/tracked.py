"""What does forward ask of a container that has other members at every call? Stand-ins that note it, and `Unknown`.

Adding to it and taking from it is free; its truth, its length in a comparison, and whether something is in it are
decisions (`counted`); what this call itself put in may be read back. Everything else is refused where it is read.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn, cast

from autopar.capture.counted import Decisions, refused_in
from autopar.capture.told import length_asked
from autopar.capture.user_frame import asker

KINDS: tuple[type, ...] = (list, deque, dict, OrderedDict, defaultdict, Counter, set)
_READS = (
    *("__iter__", "__reversed__", "__add__", "__radd__", "__mul__", "__rmul__", "__eq__", "__ne__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "__or__", "__ror__", "__and__", "__rand__", "__sub__", "__rsub__", "__xor__", "__rxor__"),
    *("__repr__", "__str__", "__format__", "__copy__", "__deepcopy__", "__reduce_ex__", "index", "count", "copy"),
    *("keys", "values", "items", "most_common", "elements", "total", "union", "intersection", "difference"),
    *("symmetric_difference", "issubset", "issuperset", "isdisjoint"),
)
_TAKES = ("pop", "popleft", "popitem")
_MOVES = ("insert", "appendleft", "extendleft", "rotate", "reverse", "sort", "remove", "clear", "__delitem__")


class Unknown:
    """In place of what a call left behind, and of what is computed with it: whoever reads it is refused."""

    def __init__(self, label: str, decisions: Decisions) -> None:
        vars(self).update(_label=label, _decisions=decisions)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        vars(self)["_decisions"].read(vars(self)["_label"])
        raise AttributeError(f"{vars(self)['_label']} changes from call to call")

    def _tell(self, *_: Any) -> str:
        vars(self)["_decisions"].read(vars(self)["_label"])
        return f"<{vars(self)['_label']}>"

    __getattr__ = __setattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse
    __contains__ = __next__ = __enter__ = __eq__ = __ne__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __float__ = __int__ = __index__ = _refuse
    __str__ = __repr__ = __format__ = _tell

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise refused_in((args, kwargs or {}), cls)


def tracked(value: Any, label: str, decisions: Decisions) -> Any:
    """A container of the same members that notes what is asked of it; None for one of a kind of its own."""
    if type(value) not in _TRACKED:
        return None
    made = _TRACKED[type(value)].__new__(_TRACKED[type(value)])
    if isinstance(value, deque):
        deque.__init__(made, value, value.maxlen)
    elif isinstance(value, defaultdict):
        defaultdict.__init__(made, value.default_factory, value)
    elif isinstance(value, OrderedDict):
        OrderedDict.__init__(made, value)
    elif isinstance(value, dict):
        dict.__init__(made)
        dict.update(made, value)
    else:
        type(value).__init__(made, value)
    made._label, made._decisions, made._old, made._fresh = label, decisions, len(value), set()
    return made


def _read(kind: type, name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._old:
            self._decisions.read(self._label)
        return getattr(kind, name)(self, *args, **kwargs)

    return read


def _take(kind: type, name: str) -> Callable[..., Any]:
    def take(self: Any, *args: Any) -> Any:
        self._old = _size(self) + 1
        getattr(kind, name)(self, *args)
        return Unknown(self._label, self._decisions)

    return take


def _move(kind: type, name: str) -> Callable[..., Any]:
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._old = 0 if name == "clear" else _size(self) + 1
        self._fresh.clear()
        return getattr(kind, name)(self, *args, **kwargs)

    return move


def _put(kind: type, name: str) -> Callable[..., Any]:
    def put(self: Any, key: Any, *args: Any) -> Any:
        if name == "setdefault" and key not in self._fresh:
            self._decisions.read(self._label)
        self._fresh.add(key)
        return getattr(kind, name)(self, key, *args)

    return put


def _size(owner: Any) -> int:
    kind: Any = type(owner).__mro__[1]
    return cast(int, kind.__len__(owner))


def _is_fresh(owner: Any, key: Any) -> bool:
    """Whether a part was put in by this call."""
    if not owner._old:
        return True
    if issubclass(type(owner), dict):
        return key in owner._fresh
    if isinstance(key, slice):
        return key.stop is None and key.step is None and _is_fresh(owner, key.start)
    return type(key) is int and key < 0 and _size(owner) + key >= owner._old


def _getitem(kind: type, name: str) -> Callable[..., Any]:
    def getitem(self: Any, key: Any, *default: Any) -> Any:
        if not _is_fresh(self, key):
            self._decisions.read(self._label)
        return getattr(kind, name)(self, key, *default)

    return getitem


def _contains(self: Any, part: Any) -> bool:
    kind: Any = type(self).__mro__[1]
    found = kind.__contains__(self, part)
    return found if not self._old or part in self._fresh else cast(bool, self._decisions.answer(found))


def _length(self: Any) -> int:
    size = _size(self)
    if not self._old:  # all in it is this call's
        return size
    found = length_asked(asker(), size, self._decisions.answer)
    if found is None:
        self._decisions.read(self._label)
    return size if found is None else found


def _bool(self: Any) -> bool:
    return _size(self) > 0 if not self._old else cast(bool, self._decisions.answer(_size(self) > 0))


def _tracked(kind: type) -> type:
    names = set(dir(kind))
    own: dict[str, Any] = {"__len__": _length, "__bool__": _bool, "__contains__": _contains, "__hash__": None}
    own |= {name: _read(kind, name) for name in _READS if name in names}
    own |= {name: _take(kind, name) for name in _TAKES if name in names}
    own |= {name: _move(kind, name) for name in _MOVES if name in names}
    own |= {name: _getitem(kind, name) for name in ("__getitem__", "get") if name in names}
    if issubclass(kind, dict | set):
        own |= {name: _put(kind, name) for name in ("__setitem__", "setdefault", "add") if name in names}
    return type(f"Tracked{kind.__name__}", (kind,), own)


_TRACKED: dict[type, Any] = {kind: _tracked(kind) for kind in KINDS}
