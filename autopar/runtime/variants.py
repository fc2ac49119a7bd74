"""Which graph does a call run? The planned step's, or one that is captured for it once: by mode, sizes and arguments.

Ranks make graphs together: they agree on what is called before they capture, so that a rank that calls otherwise is an
error on all of them.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.binding import form_of, is_alike
from autopar.calls import Call
from autopar.errors import CaptureError
from autopar.graph import CapturedModel, InputSpec, LocalModel
from autopar.guards import holds
from autopar.inputs import bind_inputs, flatten_inputs
from autopar.ops.random import Draws
from autopar.outputs import Returned
from autopar.runtime.agreement import agree, failing_together

MANY = 8
"""Of so many graphs of one call, each for other values of buffers, there is no end."""


class Captor(Protocol):
    """A model that is captured again (`autopar.again`)."""

    @property
    def call(self) -> Call: ...

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def returns_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool: ...
    def modes(self) -> dict[str, bool]: ...
    def captured(
        self,
        call: Call,
        modes: Mapping[str, bool],
        buffers: Mapping[str, Tensor],
        *,
        gradients: bool,
        wants_loss: bool,
    ) -> tuple[CapturedModel, Returned]: ...
    def local(self, captured: CapturedModel) -> LocalModel: ...
    def stages(self, captured: CapturedModel) -> tuple[tuple[int, LocalModel], ...]: ...


class Runs(Protocol):
    """A graph that runs a call."""

    @property
    def inputs(self) -> tuple[InputSpec, ...]: ...
    def run(self, inputs: Mapping[str, Tensor], draws: Draws, outputs: str, *, is_local: bool) -> Any: ...


Make = Callable[[CapturedModel, Returned], Runs]
"""Of a captured call what runs it; all ranks together."""


class Variants:
    """The graphs of one module beside that of the planned step, in which its parts were in the modes `first`."""

    def __init__(self, captor: Captor, make: Make) -> None:
        self.captor, self.make = captor, make
        self.modes = self.first = captor.modes()
        self.planned = dict(flatten_inputs(captor.call.args, captor.call.kwargs)[0])
        self._made: dict[object, list[tuple[CapturedModel, Runs]]] = {}
        self._last: object = None

    def set_modes(self, mode: bool) -> None:
        """All parts of the model are in a mode."""
        self.modes = dict.fromkeys(self.modes, mode)

    def modes_of(self, module: nn.Module) -> dict[str, bool]:
        """Of the model's parts; those that hold parameters or buffers may have been changed one by one."""
        own = {name: part.training for name, part in module.named_modules()}
        return {name: own.get(name, mode) for name, mode in self.modes.items()}

    def is_planned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_local: bool = False
    ) -> bool:
        """Whether a call is the planned step's, in its mode."""
        leaves = dict(flatten_inputs(args, kwargs)[0])
        if set(leaves) != set(self.planned) or self.modes_of(module) != self.first:
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

    def run(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_local: bool = False,
        wants_loss: bool = False,
    ) -> Any:
        """What the model returns for a call, or its loss.

        module: whose state it reads, a `runtime.trainable.Trainable`.
        """
        module.check_initialized()
        whole = self._whole(args, kwargs) if is_local else (args, kwargs)
        leaves, _ = flatten_inputs(*whole)
        modes = self.modes_of(module)
        forms = tuple((path, form_of(leaf)) for path, leaf in leaves)
        key = forms, tuple(modes.items()), torch.is_grad_enabled(), wants_loss
        if key != self._last:
            agree({"call": _words(forms, modes, wants_loss=wants_loss)})
            self._last = key
        known = self._made.setdefault(key, [])
        found = next((runs for captured, runs in known if guards_hold(captured, module)), None)
        if found is None:
            captured, returned = self._captured(module, whole, modes, len(known), is_local, wants_loss)
            found = self.make(captured, returned)
            known.append((captured, found))
        inputs = bind_inputs(found.inputs, args, kwargs)
        return found.run(inputs, module.next_draws(1)[0], module.outputs, is_local=is_local)

    def _captured(
        self, module: Any, whole: tuple[Any, Any], modes: Mapping[str, bool], count: int, is_local: bool, loss: bool
    ) -> tuple[CapturedModel, Returned]:
        with failing_together():
            if count >= MANY:
                raise CaptureError(
                    f"forward decides on buffers that have had {count} values by now, and each wants a graph of its "
                    "own; compute with the tensor (torch.where) instead of branching on it"
                )
            buffers = dict(module.named_buffers(remove_duplicate=False))
            call = Call(args=tuple(whole[0]), kwargs=dict(whole[1]))
            gradients = torch.is_grad_enabled()
            captured, returned = self.captor.captured(call, modes, buffers, gradients=gradients, wants_loss=loss)
        if not is_local:
            agree({"values of inputs (a rank's own rows are given as autopar.LocalBatch)": _digest(whole)})
        agree({"graph": captured.fingerprint})
        return captured, returned

    def _whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """A call with this rank's slices as one of the planned global batch."""
        leaves, rebuild = flatten_inputs(args, kwargs)
        return rebuild([self.planned.get(path, leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves])


def guards_hold(captured: CapturedModel, module: Any) -> bool:
    """Whether the buffers that a graph takes for granted have the values that it was captured with."""
    return all(holds(guard, module.get_buffer(guard.name)) for guard in captured.guards)


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


def _words(forms: tuple[tuple[str, Any], ...], modes: Mapping[str, bool], *, wants_loss: bool) -> str:
    inputs = ", ".join(f"{path} {form}" for path, form in forms)
    training = hashlib.sha256(str(sorted(modes.items())).encode()).hexdigest()[:8]
    mode = "training" if modes.get("", True) else "evaluation"
    return f"{inputs} in {mode} ({training}), gradients {torch.is_grad_enabled()}, loss {wants_loss}"
