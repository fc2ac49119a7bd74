"""How does a tensor leave memory between forward and backward? Autograd keeps how it is made, not the tensor.

Whoever makes such a tensor registers its *source*: `all_gather(..., regather=True)` a recipe that gathers a parameter
again, `autopar.ops.recompute.again` a slot that a replay fills. While `regathering()` is active, a tensor that autograd
saves (the registered one itself or any view of it) is packed as (source, size, stride, offset). A source is an
attribute of the storage, so that it lives as long as the storage or something that was packed.

A recipe keeps the gather's operand, or that operand's own recipe where it was gathered too (along another axis): the
chain is then gathered link by link. Every use that saved the tensor gathers once, nothing is shared between uses, so
the bytes sent are those that `lower.messages` counts: uses times the gathers of the chain. A call that saves a tensor
several times, as a net saves its weights at every step, is one use if it is made by `once`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]

ATTRIBUTE = "_autopar_source"


class Source(Protocol):
    """How a storage that is not kept is made."""

    def made(self) -> Tensor:
        """Some tensor on the whole storage."""


@dataclass(slots=True)
class View:
    """A tensor as a window of a storage that a source makes."""

    source: Source
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def materialize(self) -> Tensor:
        whole = self.source.made()
        if whole.dtype != self.dtype:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a gathered tensor is made: `gather` of a kept tensor, or of another recipe's view."""

    operand: Tensor | View
    gather: Gather

    def made(self) -> Tensor:
        with torch.no_grad():
            return self.gather(unpack(self.operand))


class Shared:
    """What a source makes, made once for all that one use packed of it, and let go with the last of that."""

    __slots__ = ("source", "tensor")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tensor: Tensor | None = None

    def made(self) -> Tensor:
        if self.tensor is None:
            self.tensor = self.source.made()
        return self.tensor


_use: ContextVar[dict[int, Shared] | None] = ContextVar("autopar_use", default=None)
"""What the call that runs has packed, by identity of the source; None outside `once`."""
_active: ContextVar[Context | None] = ContextVar("autopar_regather", default=None)


def surroundings() -> Context | None:
    """What was bound (groups, draws) where the forward pass began; None outside `regathering`."""
    return _active.get()


def attach(tensor: Tensor, source: Source) -> None:
    """From now on autograd saves no view of `tensor`, whose storage `source` makes."""
    setattr(tensor.untyped_storage(), ATTRIBUTE, source)


def detach(tensor: Tensor) -> None:
    """From now on autograd saves `tensor` itself; what it saved before is made as it was said."""
    if hasattr(storage := tensor.untyped_storage(), ATTRIBUTE):
        delattr(storage, ATTRIBUTE)


def register(gathered: Tensor, operand: Tensor, gather: Gather) -> None:
    """`gathered` is `gather(operand)`, and not kept; nothing outside `regathering`."""
    if _active.get() is not None:
        attach(gathered, Recipe(operand=pack(operand), gather=gather))


def pack(tensor: Tensor) -> Tensor | View:
    """What is kept of a tensor: its source if it has one, itself otherwise."""
    source: Source | None = getattr(tensor.untyped_storage(), ATTRIBUTE, None)
    if source is None:
        return tensor.detach()
    if (use := _use.get()) is not None:
        source = use.setdefault(id(source), Shared(source))
    return View(source, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def unpack(kept: Tensor | View) -> Tensor:
    """The inverse of `pack`."""
    return kept.materialize() if isinstance(kept, View) else kept


def once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, for whose backward pass a source makes its tensor once, however often that is
    saved."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    token = _use.set({})
    try:
        return function(*args, **kwargs)
    finally:
        _use.reset(token)


@contextmanager
def regathering() -> Iterator[None]:
    """A forward pass whose tensors with a source are not kept for backward."""
    token = _active.set(copy_context())
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _active.reset(token)
