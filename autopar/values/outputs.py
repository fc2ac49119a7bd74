"""What does a model return? Its tensors in order, and the value around them, to be made again of other tensors."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.values.inputs import taken_apart

FOLLOWING = "following"
"""The keyword of a call's inputs that are for what follows on the model's output."""


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object whose attributes hold tensors: a copy of it with other attributes."""

    like: Any
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Returned:
    """A model's output without its tensors."""

    leaves: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]

    def holding(self, tensors: Sequence[Any]) -> Any:
        """The output with these tensors in their places."""
        return self.rebuild([_filled(leaf, tensors) for leaf in self.leaves])


def flatten_outputs(value: Any) -> tuple[list[Tensor], Returned]:
    """The tensors of an output in order, and the output around them.

    Lists, tuples, mappings, what torch's pytrees know (Hugging Face's `ModelOutput`) and any object that holds
    tensors in its attributes (dataclasses, caches, distributions). A tensor that is there twice is one.

    Raises:
        CaptureError: if it holds a part of a model.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    leaves, rebuild = taken_apart(value)
    emptied = tuple(_emptied(leaf, tensors, {}) for leaf in leaves)
    return [tensor for _, tensor in tensors.values()], Returned(emptied, rebuild)


def _emptied(leaf: Any, tensors: dict[int, tuple[int, Tensor]], above: Mapping[int, Any]) -> Any:
    if isinstance(leaf, Tensor):
        return _Slot(tensors.setdefault(id(leaf), (len(tensors), leaf))[0])
    if isinstance(leaf, nn.Module):
        raise CaptureError(
            f"forward returns a {type(leaf).__name__}, a part of a model, which a graph does not make; return tensors"
        )
    if isinstance(leaf, Enum | type) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    if id(leaf) in above:
        raise CaptureError(f"forward returns a {type(leaf).__name__} that holds itself; return tensors")
    before, known = len(tensors), {**above, id(leaf): leaf}
    attributes = {}
    for name, own in vars(leaf).items():
        parts, rebuild = taken_apart(own)
        attributes[name] = Returned(tuple(_emptied(part, tensors, known) for part in parts), rebuild)
    return _Object(leaf, attributes) if len(tensors) > before else leaf


def _filled(leaf: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(leaf, _Slot):
        return tensors[leaf.number]
    if isinstance(leaf, _Object):
        made = copy.copy(leaf.like)
        vars(made).update({name: own.holding(tensors) for name, own in leaf.attributes.items()})
        return made
    return leaf
