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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from autopar.ops.regather import View, attach, pack, surroundings, unpack

AGAIN = "autopar_again"
"""What annotates the calls that `again` makes in traced code, for the partitioner to read."""

_order = itertools.count()


class Slot:
    """A tensor that a replay of `call` makes."""

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, call: "Call") -> None:
        self.call: Call | None = call
        self.tensor: Tensor | None = None

    def made(self) -> Tensor:
        if self.tensor is None:
            assert self.call is not None
            _replay(self.call)
        assert self.tensor is not None, "a replay saved other tensors than the call did"
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.call = tensor.detach(), None


class Call:
    """One call to be replayed: packed arguments, and slots by number while something waits for them."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, context: Context) -> None:
        self.function, self.context, self.order = function, context, next(_order)
        self.gradients = [t.requires_grad for t in _tensors((args, kwargs))]
        self.packed: Any = _mapped(pack, (args, kwargs))
        self.results: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self.saved: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    def waiting(self) -> "Iterator[Call]":
        """Calls that must be replayed before this one."""
        for part in _leaves(self.packed, View):
            source = part.source
            if isinstance(source, Slot) and source.call is not None:
                yield source.call

    def replay(self) -> None:
        flags = iter(self.gradients)
        args, kwargs = _mapped(lambda kept: unpack(kept).detach().requires_grad_(next(flags)), self.packed)
        self.packed = ()

        def fill(number: int, tensor: Tensor) -> None:
            if (slot := self.saved.get(number)) is not None:
                slot.fill(tensor)

        with torch.enable_grad(), _inside((args, kwargs), lambda _: None, fill):
            result = self.context.copy().run(self.function, *args, **kwargs)
        for index, slot in list(self.results.items()):
            slot.fill(_each(result)[index])


def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, made again in the backward pass instead of kept; a plain call without gradients."""
    if torch.compiler.is_compiling():
        with annotate({AGAIN: True}):
            return function(*args, **kwargs)
    context = surroundings()
    if context is None or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = Call(function, args, kwargs, context)

    def keep(number: int, _: Tensor) -> Slot:
        slot = call.saved[number] = Slot(call)
        return slot

    with _inside((args, kwargs), pack, keep) as is_argument:
        result = function(*args, **kwargs)
        for index, tensor in enumerate(_each(result)):
            if not is_argument(tensor):
                slot = call.results[index] = Slot(call)
                attach(tensor, slot)
    return result


@contextmanager
def _inside(
    arguments: Any, pack_argument: Callable[[Tensor], Any], pack_other: Callable[[int, Tensor], Any]
) -> Iterator[Callable[[Tensor], bool]]:
    """A call during which autograd packs its arguments (by storage) one way, other tensors, by number, another way."""
    # Saved tensors keep their pack hook: what it refers to must be let go when the call is over.
    packers: list[Callable[..., Any]] = [pack_argument, pack_other]
    storages = {id(storage): storage for storage in (t.untyped_storage() for t in _tensors(arguments))}
    number = itertools.count()

    def is_argument(tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in storages

    def hook(tensor: Tensor) -> Any:
        argument, other = packers
        return argument(tensor) if is_argument(tensor) else other(next(number), tensor)

    try:
        with torch.autograd.graph.saved_tensors_hooks(hook, _taken):
            yield is_argument
    finally:
        packers.clear()
        storages.clear()


def _taken(kept: Any) -> Tensor:
    return kept.made() if isinstance(kept, Slot) else unpack(kept)


def _replay(last: Call) -> None:
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


def _tensors(arguments: Any) -> Iterator[Tensor]:
    return _leaves(arguments, Tensor)


def _leaves(value: Any, kind: Any) -> Iterator[Any]:
    """Parts of that kind of nested arguments, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part, kind)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part, kind)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments with every tensor, packed or not, changed, in the order of `_leaves`."""
    if isinstance(value, Tensor | View):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, part) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    return value
