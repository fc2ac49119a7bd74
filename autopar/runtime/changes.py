"""What has ordinary code done to a parameter since the last call? Followed, or refused with the reason.

Between two calls a script may freeze or thaw a parameter, assign its `.data`, exchange it, or hook into it. A rank
computes on a leaf that shares the parameter's memory, so what is written in place needs nothing; the rest is looked for
at every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError
from autopar.runtime.private_torch import is_stored_as, memory_of
from autopar.values.graph import BufferSpec, ParameterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedParameter:
    """A parameter as the module computes on it.

    leaf: what the graph reads, in the parameter's memory. places: the tables that hold it, and its name in each.
    """

    spec: ParameterSpec
    parameter: nn.Parameter
    leaf: Tensor
    memory: int
    places: tuple[tuple[dict[str, Any], str], ...]
    is_wanted: bool

    def has_changed(self) -> bool:
        """Whether anything was done that is not seen in the leaf."""
        own = self.parameter
        return (
            not self.is_wanted
            or memory_of(own) != self.memory
            or is_hooked(own)
            or (own.requires_grad and not self.leaf.requires_grad)
            or any(table.get(name) is not own for table, name in self.places)
        )

    def check(self, device: torch.device) -> None:
        """Raises ArgumentError if what was done cannot be followed. device: where this rank computes."""
        name = self.spec.names[0]
        for table, place in self.places:
            own = table.get(place)
            if own is None or not isinstance(own, nn.Parameter):
                raise ArgumentError(
                    f"{name} is no longer a parameter of the module; what forward does with it was captured: change "
                    "the model before planning, or write values in place (parameter.copy_ under torch.no_grad())"
                )
            self._check_value(own, device)

    def _check_value(self, own: nn.Parameter, device: torch.device) -> None:
        name, before = self.spec.names[0], self.parameter
        refuse_hooks(own, name)
        if own.requires_grad and not self.spec.trainable:
            raise ArgumentError(f"training {name} needs another plan; call requires_grad_ on the model before planning")
        if isinstance(before, DTensor) and own is before and memory_of(own) != self.memory:
            raise ArgumentError(
                f"{name} is a DTensor, and assigning .data to one changes nothing in torch; write in place: "
                "parameter.copy_(value) under torch.no_grad()"
            )
        if not is_stored_as(own, before):
            raise ArgumentError(
                f"{name} was exchanged for a {type(own).__name__} {tuple(own.shape)} that is not stored as the plan "
                f"says ({type(before).__name__} {tuple(before.shape)}); use module.load_state_dict, or copy_ its values"
            )
        if own.device.type != device.type:
            raise ArgumentError(
                f"{name} is on the {own.device} device by now, and this rank computes on {device}; move it back"
            )
        if own.dtype != self.spec.storage:
            raise ArgumentError(
                f"{name} is {own.dtype} by now, and the plan stores it as {self.spec.storage}; plan again with the "
                "precision that is wanted"
            )


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def refuse_hooks(parameter: nn.Parameter, name: str) -> None:
    """Raises ArgumentError for a hook that would never run."""
    if is_hooked(parameter):
        raise ArgumentError(
            f"a hook on {name}, a distributed parameter, would never run; register it on the model before planning, or "
            "change .grad after backward()"
        )


def check_buffer(spec: BufferSpec, held: Any) -> None:
    """Raises ArgumentError if a buffer was exchanged for what is not of its size and dtype."""
    if not isinstance(held, Tensor) or tuple(held.shape) != spec.shape or held.dtype != spec.dtype:
        found = f"a {held.dtype} of shape {tuple(held.shape)}" if isinstance(held, Tensor) else f"{held!r:.40}"
        raise ArgumentError(
            f"buffer {spec.names[0]} is {found} by now, and was captured as a {spec.dtype} of shape {spec.shape}; keep "
            "its size and dtype, or plan again"
        )


def keeps_watch(ends: Sequence[Tensor], watched: "ReferenceType[Any]", versions: Callable[[Any], Any]) -> None:
    """Have a backward pass from `ends` fail if parameters were written since the forward pass.

    A gathered parameter is gathered again for backward, which would take the new values without a word.
    """
    state = watched()
    before = versions(state)

    def look(gradients: Any) -> None:
        own = watched()
        if own is not None and versions(own) != before:
            raise ArgumentError(
                "a parameter or buffer was written in place between a call and its backward pass, whose gradients "
                "would mix both values; call optimizer.step() and write parameters after backward()"
            )

    for end in ends:
        if end.grad_fn is not None:
            end.grad_fn.register_prehook(look)
