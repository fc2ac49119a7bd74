"""Which layers need no run to know their trace? Those that hold the same as one that was run, and are called alike.

What Python does in a layer follows from its class, what its modules hold, and what it is called with. Where these are
equal, a layer's outputs and ops are those of the layer that was run. Nearly equal layers know their own number
(`self.layer_idx`): it is hidden while a layer runs, and one that asks for it stands for no other. Neither does one
that changes what it holds or is called with, draws numbers in Python, takes or returns anything but tensors and plain
values, or reads tensors elsewhere than those do that it would stand for. Objects that layers share (a config) are
looked into, one level deep, whenever a layer is called. What a layer keeps in its class or in globals is not seen.
"""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Span = tuple[int, int]
Place = tuple[str, str]
"""Path of a module in a layer, and a name in it."""

_TOLD: tuple[type, ...] = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    partial,
    type,
    FunctionType,
    MethodType,
    nn.Module,
    Tensor,
)
"""What is not looked into: it is in words already, or does not change."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Recorder(Protocol):
    """Knows where tensors come from, and notes ops by number."""

    def name_of(self, tensor: Tensor) -> str:
        """Of a parameter or buffer, the same for tied ones."""

    def key_of(self, tensor: Tensor, before: Span) -> Hashable:
        """Where a tensor comes from, relative to the layer before."""

    def now(self) -> int:
        """How many ops there are."""

    def made_in(self, tensor: Tensor, span: Span) -> tuple[int, int] | None:
        """Which op of a span made a tensor, and as which of its results."""

    def repeat(self, span: Span) -> None:
        """Note the ops of a span again."""

    def stand_in(self, tensor: Tensor, made: tuple[int, int]) -> Tensor:
        """Another tensor like this one, as if an op had made it."""


@dataclass(frozen=True, slots=True)
class _Run:
    layer: int
    span: Span
    result: Any


@dataclass(frozen=True, slots=True)
class _Made:
    """In a result: what the layer made (an op of its own, and which of its results), like `tensor`."""

    place: tuple[int, int]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Given:
    """In a result: a tensor that the layer was called with, by its number."""

    number: int


class _NotPlainError(Exception):
    """Something that no equality can be told of."""


class StandIns:
    """Layers of one stack, of which some are run. `of`: which layer stands for one that was not."""

    def __init__(self, stack: str, layers: Sequence[nn.Module], recorder: Recorder) -> None:
        self.stack, self.layers, self.recorder = stack, layers, recorder
        self.of: dict[int, int] = {}
        self._numbers = _numbers(layers)
        self._kinds = [self._held(index) for index in range(len(layers))]
        self._spans: dict[int, Span] = {}
        self._runs: dict[Hashable, _Run] = {}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, calls of layers may be answered without a run."""
        with ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                if "forward" not in vars(layer) and not isinstance(layer, torch.jit.ScriptModule):
                    layer.forward = self._forward(index, layer.forward)
                    stack.callback(vars(layer).pop, "forward", None)
            yield

    def _forward(self, index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given: list[Tensor] = []
            begin = self.recorder.now()
            key = self._called(index, args, kwargs, given)
            known = None if key is None else self._runs.get(key)
            if known is not None and index not in self._spans:
                self.recorder.repeat(known.span)
                self.of[index] = known.layer
                self._spans[index] = begin, self.recorder.now()
                return self._answer(known, given, begin)
            layer = self.layers[index]
            before = self._held(index), _draws()  # with hooks of who watches
            with _hidden(layer, self._numbers) as asked:
                result = run(*args, **kwargs)
            self._spans[index] = span = begin, self.recorder.now()
            is_same = (self._held(index), _draws()) == before and self._called(index, args, kwargs, []) == key
            if key is not None and not asked and is_same:
                with suppress(_NotPlainError):
                    self._runs[key] = _Run(index, span, self._form(result, span, given))
            return result

        return forward

    def _called(self, index: int, args: Any, kwargs: Any, given: list[Tensor]) -> Hashable:
        """All that says what a layer does in a call, None where that cannot be told; `given` gets its tensors."""
        try:
            words = self._words((args, kwargs), self._spans.get(index - 1, (0, 0)), given)
        except _NotPlainError:
            return None
        shared = [_inside(value) for module in self.layers[index].modules() for value in vars(module).values()]
        return self._kinds[index], words, tuple(filter(None, shared)), torch.is_grad_enabled()

    def _held(self, index: int) -> Hashable:
        """All that a layer's modules hold, but for its number; what no equality can be told of, by identity."""
        held: list[Hashable] = []
        for path, module in self.layers[index].named_modules(remove_duplicate=False):
            held.append((path, type(module)))
            for name, value in vars(module).items():
                if name == "_modules":
                    held.append(tuple((child, None if m is None else type(m)) for child, m in value.items()))
                elif name in ("_parameters", "_buffers"):
                    held += [(child, self._tensor_words(tensor, index)) for child, tensor in value.items()]
                elif (path, name) not in self._numbers and (path, name) != ("", "forward"):  # which is ours
                    held.append((name, _value_words(value)))
        return tuple(held)

    def _tensor_words(self, tensor: Tensor | None, index: int) -> Hashable:
        if tensor is None:
            return None
        name = self.recorder.name_of(tensor).removeprefix(f"{self.stack}.{index}.")
        return name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad

    def _words(self, value: Any, before: Span, given: list[Tensor]) -> Hashable:
        """What a layer is called with; tensors by where they come from."""
        if isinstance(value, Tensor):
            given.append(value)
            return (
                self.recorder.key_of(value, before),
                tuple(value.shape),
                value.stride(),
                value.dtype,
                value.requires_grad,
            )
        if type(value) in (tuple, list):
            return type(value), tuple(self._words(part, before, given) for part in value)
        if type(value) is dict:
            return tuple((str(key), self._words(part, before, given)) for key, part in value.items())
        if type(value) in _PLAIN:
            return type(value), repr(value)
        raise _NotPlainError

    def _form(self, value: Any, span: Span, given: Sequence[Tensor]) -> Any:
        """A result with its tensors described."""
        if isinstance(value, Tensor):
            numbers = [number for number, tensor in enumerate(given) if tensor is value]
            if numbers:
                return _Given(numbers[0])
            made = self.recorder.made_in(value, span)
            if made is None:
                raise _NotPlainError
            return _Made(made, value)
        if type(value) in (tuple, list):
            return type(value)(self._form(part, span, given) for part in value)
        if type(value) is dict:
            return {key: self._form(part, span, given) for key, part in value.items()}
        if type(value) in _PLAIN:
            return value
        raise _NotPlainError

    def _answer(self, run: _Run, given: Sequence[Tensor], begin: int) -> Any:
        fresh: dict[tuple[int, int], Tensor] = {}

        def filled(form: Any) -> Any:
            if isinstance(form, _Given):
                return given[form.number]
            if isinstance(form, _Made):
                if form.place not in fresh:
                    number, index = form.place
                    fresh[form.place] = self.recorder.stand_in(form.tensor, (begin + number, index))
                return fresh[form.place]
            if type(form) in (tuple, list):
                return type(form)(filled(part) for part in form)
            if type(form) is dict:
                return {key: filled(part) for key, part in form.items()}
            return form

        return filled(run.result)


def _numbers(layers: Sequence[nn.Module]) -> frozenset[Place]:
    """Attributes that hold every layer's number in the stack."""
    found: set[Place] | None = None
    for index, layer in enumerate(layers):
        own = {
            (path, name)
            for path, module in layer.named_modules()
            for name, value in vars(module).items()
            if type(value) is int and value == index
        }
        found = own if found is None else found & own
    return frozenset(found or ())


def _draws() -> Hashable:
    """Where Python's and NumPy's generators stand."""
    kind, keys, position, *normal = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, tuple(normal)


def _value_words(value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_value_words(part) for part in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_value_words(part) for part in value)
    if isinstance(value, dict):
        return type(value), tuple((_value_words(key), _value_words(part)) for key, part in value.items())
    if isinstance(value, partial):
        return partial, _value_words(value.func), _value_words(value.args), _value_words(value.keywords)
    return id(value)


def _inside(value: Any) -> Hashable:
    """What an object holds that is neither plain, in words, nor a function, a class or a module; None for others."""
    if isinstance(value, _TOLD) or not hasattr(value, "__dict__"):
        return None
    return id(value), tuple((name, _value_words(held)) for name, held in vars(value).items())


@contextmanager
def _hidden(layer: nn.Module, numbers: frozenset[Place]) -> Iterator[set[str]]:
    """Inside, which of its numbers a layer asks for is noted."""
    asked: set[str] = set()
    modules = dict(layer.named_modules())
    values = {(id(modules[path]), name): vars(modules[path])[name] for path, name in numbers}
    lookup = nn.Module.__getattr__

    def noted(module: nn.Module, name: str) -> Any:
        if (id(module), name) in values:
            asked.add(name)
            return values[id(module), name]
        return lookup(module, name)

    for path, name in numbers:
        del modules[path].__dict__[name]
    nn.Module.__getattr__ = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        nn.Module.__getattr__ = lookup  # type: ignore[method-assign]
        for path, name in numbers:
            modules[path].__dict__.setdefault(name, values[id(modules[path]), name])
