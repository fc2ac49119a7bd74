"""How is a call run again for backward? `again(function, *args)` keeps what it reads, not what it makes.

Neither the results of such a call nor what autograd saves inside it (statistics, masks, the log-sum-exp of attention)
outlive their last use in the forward pass. Each gets a slot; when backward asks for one, the call is replayed and fills
those of its slots that something still waits for. What the call reads is kept, or is itself a slot whose call is
replayed first: replays run in the order of the forward pass, the same on every rank, collectives included. A slot lives
as long as what was packed from it, so a replayed value leaves memory with its last use in backward, and no call is
replayed twice.

A replay sees the groups and draws of its forward pass, so dropout masks are the same.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from autopar.errors import PassError
from autopar.ops.regather import ATTRIBUTE, View, attach, pack, surroundings, unpack

AGAIN = "autopar_again"
"""What annotates the calls that `again` makes in traced code, for the partitioner to read."""

_order = itertools.count()


class Slot:
    """A tensor that a replay of `call` makes."""

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, call: "ReplayedCall") -> None:
        self.call: ReplayedCall | None = call
        self.tensor: Tensor | None = None

    def made(self) -> Tensor:
        if self.tensor is None:
            assert self.call is not None
            _replay(self.call)
        if self.tensor is None:
            raise PassError("a replay saved other tensors than the call did")
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.call = tensor.detach(), None


def slot_of(tensor: Tensor) -> Slot | None:
    """The slot of a tensor that a call made which is run again."""
    source = getattr(tensor.untyped_storage(), ATTRIBUTE, None)
    return source if isinstance(source, Slot) else None


class ReplayedCall:
    """One call to be replayed: its arguments, tensors packed, and slots by number while something waits for them."""

    __slots__ = ("args", "context", "function", "gradients", "kwargs", "order", "places", "results", "saved")

    def __init__(self, function: Callable[..., Any], arguments: "_Arguments", context: Context) -> None:
        self.function, self.context, self.order = function, context, next(_order)
        self.args, self.kwargs, self.places = arguments.args, arguments.kwargs, arguments.places
        self.gradients = [tensor.requires_grad for tensor in arguments.tensors]
        for (container, key), tensor in zip(self.places, arguments.tensors, strict=True):
            container[key] = pack(tensor)
        self.results: dict[int, weakref.ref[Slot]] = {}
        self.saved: dict[int, weakref.ref[Slot]] = {}

    def waiting(self) -> "Iterator[ReplayedCall]":
        """Calls that must be replayed before this one."""
        for container, key in self.places:
            part = container[key]
            if isinstance(part, View) and isinstance(part.source, Slot) and part.source.call is not None:
                yield part.source.call

    def replay(self) -> None:
        tensors = []
        for (container, key), flag in zip(self.places, self.gradients, strict=True):
            tensor = unpack(container[key]).detach()
            tensors.append(tensor.requires_grad_() if flag else tensor)
            container[key] = tensor
        args, kwargs = self.args, self.kwargs
        self.args, self.kwargs, self.places = [], {}, []

        if any(slot() is not None for slot in self.saved.values()):
            result = self._saving(tensors, args, kwargs)
        else:  # all that it waits for is results: nothing is saved again
            with torch.no_grad():
                result = self.context.copy().run(self.function, *args, **kwargs)
        if self.results:
            for index, tensor in enumerate(_each(result)):
                _fill(self.results, index, tensor)

    def _saving(self, tensors: list[Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The call's result; what autograd saves inside it fills slots."""

        def fill(number: int, tensor: Tensor) -> None:
            _fill(self.saved, number, tensor)

        packing = _Packing(tensors, _nothing, fill)
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(packing, _taken):
                return self.context.copy().run(self.function, *args, **kwargs)
        finally:
            packing.close()


def _fill(slots: "dict[int, weakref.ref[Slot]]", number: int, tensor: Tensor) -> None:
    """Fill a slot that something still waits for."""
    found = slots.get(number)
    slot = None if found is None else found()
    if slot is not None:
        slot.fill(tensor)


def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, made again in the backward pass instead of kept; a plain call without gradients."""
    if torch.compiler.is_compiling():
        with annotate({AGAIN: True}):
            return function(*args, **kwargs)
    context = surroundings()
    if context is None or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    arguments = _Arguments(args, kwargs)
    call = ReplayedCall(function, arguments, context)

    def keep(number: int, _: Tensor) -> Slot:
        slot = Slot(call)
        call.saved[number] = weakref.ref(slot)
        return slot

    packing = _Packing(arguments.tensors, pack, keep)
    try:
        with torch.autograd.graph.saved_tensors_hooks(packing, _taken):
            result = function(*args, **kwargs)
            for index, tensor in enumerate(_each(result)):
                if not packing.is_argument(tensor):
                    slot = Slot(call)
                    call.results[index] = weakref.ref(slot)
                    attach(tensor, slot)
    finally:
        packing.close()
    return result


class _Arguments:
    """Arguments of a call, in containers that may be changed, and the tensors among them with where each is."""

    __slots__ = ("args", "kwargs", "places", "tensors")

    def __init__(self, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = [*args], {**kwargs}
        self.places: list[tuple[Any, Any]] = []
        self._find(self.args, range(len(self.args)))
        self._find(self.kwargs, kwargs)
        self.tensors: list[Tensor] = [container[key] for container, key in self.places]

    def _find(self, container: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            value = container[key]
            if isinstance(value, Tensor):
                self.places.append((container, key))
            elif isinstance(value, tuple | list):
                before, inner = len(self.places), [*value]
                self._find(inner, range(len(inner)))
                if len(self.places) > before:
                    container[key] = inner


class _Packing:
    """How autograd packs what a call saves: arguments (by storage) one way, other tensors, by number, another way.

    Saved tensors keep their pack hook: what it refers to must be let go when the call is over (`close`).
    """

    __slots__ = ("argument", "number", "other", "storages")

    def __init__(
        self, tensors: Iterable[Tensor], argument: Callable[[Tensor], Any], other: Callable[[int, Tensor], Any]
    ) -> None:
        self.argument: Callable[[Tensor], Any] | None = argument
        self.other: Callable[[int, Tensor], Any] | None = other
        self.storages = {id(storage): storage for storage in [tensor.untyped_storage() for tensor in tensors]}
        self.number = 0

    def is_argument(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self.storages

    def __call__(self, tensor: Tensor) -> Any:
        assert self.argument is not None and self.other is not None, "a call saves nothing when it is over"
        if self.is_argument(tensor):
            return self.argument(tensor)
        number, self.number = self.number, self.number + 1
        return self.other(number, tensor)

    def close(self) -> None:
        self.argument = self.other = None
        self.storages = {}


def _nothing(_: Tensor) -> None:
    """A replay's arguments are not kept."""


def _taken(kept: Any) -> Tensor:
    return kept.made() if isinstance(kept, Slot) else unpack(kept)


def _replay(last: ReplayedCall) -> None:
    """Replay a call and, in the order of the forward pass, all that it waits for."""
    found = {last.order: last}
    stack = [last]
    while stack:
        for call in stack.pop().waiting():
            if call.order not in found:
                found[call.order] = call
                stack.append(call)
    for order in sorted(found):
        found.pop(order).replay()


def _each(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)
