"""Which graph does a call run? The planned step's, or one that is captured for it once: by mode, sizes and arguments.

Ranks make graphs together: they agree on what is called before they capture, so that a rank that calls otherwise is an
error on all of them.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from autopar.binding import form_of, is_alike
from autopar.calls import Call
from autopar.errors import CaptureError
from autopar.graph import CapturedModel, LocalModel
from autopar.guards import holds
from autopar.inputs import bind_inputs, flatten_inputs
from autopar.outputs import Returned
from autopar.runtime.agreement import agree, failing_together
from autopar.runtime.variant import Variant

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule

MANY = 8
"""Of so many graphs of one call, each for other values of buffers, there is no end."""


class Captor(Protocol):
    """A model that is captured again (`autopar.again`)."""

    @property
    def call(self) -> Call: ...
    @property
    def loss_fn(self) -> Any: ...

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def returns_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool: ...
    def modes(self) -> dict[str, bool]: ...
    def local(
        self,
        call: Call,
        modes: Mapping[str, bool],
        buffers: Mapping[str, Tensor],
        *,
        gradients: bool,
        wants_loss: bool,
    ) -> tuple[LocalModel, Returned]: ...


class Variants:
    """The graphs of one module beside that of the planned step."""

    def __init__(self, module: "DistributedModule", captor: Captor) -> None:
        self.module, self.captor = module, captor
        self.made: dict[object, list[Variant]] = {}
        self.last: object = None
        self.modes = self.first = captor.modes()
        planned = captor.call
        leaves, _ = flatten_inputs(planned.args, planned.kwargs)
        self.planned = dict(leaves)

    def set_modes(self, mode: bool) -> None:
        """All parts of the model are in a mode."""
        self.modes = dict.fromkeys(self.modes, mode)

    def modes_now(self) -> dict[str, bool]:
        """Of the model's parts; those that hold parameters or buffers may have been changed one by one."""
        own = {name: part.training for name, part in self.module.named_modules()}
        return {name: own.get(name, mode) for name, mode in self.modes.items()}

    def is_planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_local: bool) -> bool:
        """Whether the planned step's graph is that of a call which returns nothing but its loss."""
        leaves = dict(flatten_inputs(args, kwargs)[0])
        if set(leaves) != set(self.planned) or not self.is_planned_mode():
            return False
        for path, planned in self.planned.items():
            value = leaves[path]
            if isinstance(planned, Tensor):
                if not isinstance(value, Tensor) or (value.requires_grad and torch.is_grad_enabled()):
                    return False
                if not is_local and (value.shape != planned.shape or not _casts(value.dtype, planned.dtype)):
                    return False
            elif not is_alike(value, planned):
                return False
        return True

    def is_planned_mode(self) -> bool:
        """Whether the module is in the mode in which it was planned, and buffers are as its graph takes them to be."""
        module = self.module
        return module.training == module.local.captured.training and self.modes_now() == self.first

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_local: bool, wants_loss: bool = False) -> Any:
        """What the model returns for a call, or its loss."""
        self.module.check_initialized()
        whole = self._whole(args, kwargs) if is_local else (args, kwargs)
        leaves, _ = flatten_inputs(*whole)
        modes = self.modes_now()
        key = (
            tuple((path, form_of(leaf)) for path, leaf in leaves),
            tuple(modes.items()),
            torch.is_grad_enabled(),
            wants_loss,
        )
        if key != self.last:
            agree({"call": _words(leaves, modes, wants_loss=wants_loss)})
            self.last = key
        variants = self.made.setdefault(key, [])
        found = next((v for v in variants if self.holds(v.local.captured)), None)
        if found is None:
            found = self._make(whole, modes, len(variants), is_local=is_local, wants_loss=wants_loss)
            variants.append(found)
        inputs = bind_inputs(found.local.captured.inputs, args, kwargs)
        return found.run(inputs, self.module.outputs, is_local=is_local)

    def holds(self, captured: CapturedModel) -> bool:
        """Whether the buffers that a graph takes for granted have the values that it was captured with."""
        return all(holds(guard, self.module.get_buffer(guard.name)) for guard in captured.guards)

    def _make(
        self, whole: tuple[Any, Any], modes: Mapping[str, bool], count: int, *, is_local: bool, wants_loss: bool
    ) -> Variant:
        module = self.module
        with failing_together():
            if count >= MANY:
                raise CaptureError(
                    f"forward decides on buffers that have had {count} values by now, and each wants a graph of its "
                    "own; compute with the tensor (torch.where) instead of branching on it"
                )
            buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False)}
            call = Call(args=tuple(whole[0]), kwargs=dict(whole[1]))
            local, returned = self.captor.local(
                call, modes, buffers, gradients=torch.is_grad_enabled(), wants_loss=wants_loss
            )
            plan = str((sorted(local.plan.choices.items()), sorted(map(str, local.plan.layouts.items()))))
        if not is_local:
            agree({"values of inputs (a rank's own rows are given as autopar.LocalBatch)": _digest(whole)})
        agree({"graph": local.captured.fingerprint, "choices": hashlib.sha256(plan.encode()).hexdigest()[:16]})
        return Variant(module, local, returned)

    def _whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """A call with this rank's slices as one of the planned global batch."""
        leaves, rebuild = flatten_inputs(args, kwargs)
        return rebuild([self.planned.get(path, leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves])


def _casts(given: torch.dtype, planned: torch.dtype) -> bool:
    """Whether an input of one dtype may be given for another."""
    return given == planned or (given.is_floating_point and planned.is_floating_point)


def _digest(call: Any) -> str:
    """Of the values of a call's tensors."""
    digest = hashlib.sha256()
    for path, leaf in flatten_inputs(*call)[0]:
        if isinstance(leaf, Tensor):
            digest.update(path.encode())
            digest.update(bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest()[:16]


def _words(leaves: list[tuple[str, Any]], modes: Mapping[str, bool], *, wants_loss: bool) -> str:
    inputs = ", ".join(f"{path} {form_of(leaf)}" for path, leaf in leaves)
    training = hashlib.sha256(str(sorted(modes.items())).encode()).hexdigest()[:8]
    mode = "training" if modes.get("", True) else "evaluation"
    return f"{inputs} in {mode} ({training}), gradients {torch.is_grad_enabled()}, loss {wants_loss}"
