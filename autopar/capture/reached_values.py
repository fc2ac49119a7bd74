"""What else holds state that calls change: arrays, bytes, generators of numbers, context variables, iterators, caches.

Each is compared and put back as a whole; what none can be put back of (an iterator) is exchanged for `Advanced`, which
refuses to be advanced, while a model is traced. A `functools` cache is exchanged for an empty one (`Cache`), so that
none keeps what a trace made.
"""

import os
import pickle
import random
from array import array
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from types import MethodType
from typing import Any, NoReturn

import numpy as np

from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError

LARGEST = 1 << 20
"""Bytes of an array that is compared."""


def is_whole(value: Any) -> bool:
    """Whether `whole` knows a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= LARGEST and not value.dtype.hasobject
    if isinstance(value, bytearray | array):
        return len(value) <= LARGEST
    kinds = (random.Random, np.random.Generator, np.random.RandomState, ContextVar, os._Environ)
    return isinstance(value, kinds)


def whole(value: Any) -> Any:
    """What it holds, comparable by `==`."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())
    if isinstance(value, ContextVar):
        try:
            return (value.get(),)
        except LookupError:
            return (None,)
    return tuple(value.items())


def put_whole(value: Any, state: Any) -> None:
    """Let it hold this again."""
    if isinstance(value, np.ndarray):
        value[...] = np.frombuffer(state, value.dtype).reshape(value.shape)
    elif isinstance(value, bytearray):
        value[:] = state
    elif isinstance(value, array):
        value[:] = array(value.typecode, state)
    elif isinstance(value, random.Random):
        value.setstate(pickle.loads(state))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = pickle.loads(state)
    elif isinstance(value, np.random.RandomState):
        value.set_state(pickle.loads(state))
    elif isinstance(value, ContextVar):
        value.set(state[0])
    else:
        value.clear()
        value.update(state)


def is_advanced(value: Any) -> bool:
    """Whether asking a value for the next part changes it for good."""
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


class Advanced:
    """In place of an iterator."""

    def __init__(self, iterator: Any, label: str) -> None:
        self._iterator, self._label = iterator, label

    def __iter__(self) -> "Advanced":
        return self

    def __next__(self) -> NoReturn:
        raise CaptureError(
            f"{own_frame()}: forward takes the next of the {type(self._iterator).__name__} {self._label}, which gives "
            "another at every call, so one graph cannot stand for the model; keep it in a buffer, and compute with "
            "that, or pass what it gives as an input"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "throw"):
            return lambda *_: self.__next__()
        raise AttributeError(name)


CACHED = type(lru_cache(lambda: None))


def is_cache(value: Any) -> bool:
    """Whether a value is a cache, or a method that one stands behind."""
    return type(value) in (CACHED, Cache) or (
        isinstance(value, staticmethod | classmethod) and is_cache(value.__func__)
    )


def stand_in(value: Any, label: str) -> Any:
    """What is put in place of an iterator or a cache."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(Cache(value.__func__, label))
    return Cache(value, label) if type(value) is CACHED else Advanced(value, label)


class Cache:
    """In place of a `functools.lru_cache`, for one run."""

    def __init__(self, cached: Any, label: str) -> None:
        self.__wrapped__, self._label = cached, label
        self.made: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = args, tuple(sorted(kwargs.items()))
        if key not in self.made:
            made = self.__wrapped__.__wrapped__(*args, **kwargs)
            self.made[key] = Advanced(made, f"{self._label}(...)") if is_advanced(made) else made
        return self.made[key]

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def cache_clear(self) -> None:
        self.made.clear()

    def __getattr__(self, name: str) -> Any:
        if name == "cache_info":
            raise CaptureError(
                f"{own_frame()}: forward reads how often the cache of {self._label} was asked, which is another number "
                "at every call, so one graph cannot stand for the model; keep it in a buffer, and compute with that"
            )
        return getattr(vars(self)["__wrapped__"], name)
