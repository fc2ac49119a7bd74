"""How does a gathered parameter leave memory between forward and backward? Autograd keeps a recipe, not the tensor.

`all_gather(..., regather=True)` registers what it gathered. While `regathering()` is active, a tensor that autograd
saves (the gathered tensor itself or any view of it) is packed as (recipe, size, stride, offset) if it lives in a
registered storage; when backward wants it, the recipe gathers again. A recipe keeps the gather's operand, or that
operand's own recipe where it was gathered too (along another axis): the chain is then gathered link by link.

Every use that saved the tensor gathers once, nothing is shared between uses, so the bytes sent are those that
`passes.predict` counts: saved uses times the gathers of the chain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor as a window of a storage that a recipe makes."""

    recipe: "Recipe"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def materialize(self) -> Tensor:
        whole = self.recipe.gathered()
        if whole.dtype != self.dtype:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a gathered tensor is made: `gather` of a kept tensor, or of another recipe's view."""

    source: Tensor | View
    gather: Gather

    def gathered(self) -> Tensor:
        with torch.no_grad():
            return self.gather(unpack(self.source))


# Storages, not addresses: a weak reference keeps the identity of a freed storage from being used again.
_Registry = dict[StorageWeakRef, Recipe]
_active: ContextVar[_Registry | None] = ContextVar("autopar_regather", default=None)


def _identity(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def register(gathered: Tensor, source: Tensor, gather: Gather) -> None:
    """From now on autograd saves no view of `gathered`, which `gather(source)` makes; nothing outside `regathering`."""
    registry = _active.get()
    if registry is not None:
        registry[_identity(gathered)] = Recipe(source=pack(source), gather=gather)


def pack(tensor: Tensor) -> Tensor | View:
    """What is kept of a tensor: its recipe if it was gathered, itself otherwise."""
    registry = _active.get()
    recipe = registry.get(_identity(tensor)) if registry else None
    if recipe is None:
        return tensor.detach()
    return View(
        recipe=recipe,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
    )


def unpack(kept: Tensor | View) -> Tensor:
    """The inverse of `pack`."""
    return kept.materialize() if isinstance(kept, View) else kept


@contextmanager
def regathering() -> Iterator[None]:
    """A forward pass whose gathered parameters are not kept for backward."""
    token = _active.set({})
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _active.reset(token)
