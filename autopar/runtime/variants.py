"""Which graph does a call run? The planned step's, or one that is captured for it once: by mode, sizes and arguments.

Ranks make graphs together: they agree on what is called before they capture, so that a rank that calls otherwise is an
error on all of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.ops.random import Draws
from autopar.runtime.agreement import agree, failing_together
from autopar.runtime.deferred import DeferredCall, Following, autocast_of
from autopar.runtime.parts import Described
from autopar.runtime.private_torch import local_tensor
from autopar.runtime.variant import DTENSOR, GATHERED
from autopar.values.binding import form_of, is_alike
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel, InputSpec, requires_grad
from autopar.values.guards import holds
from autopar.values.inputs import bind_inputs, flatten_inputs
from autopar.values.local_model import LocalModel
from autopar.values.outputs import FOLLOWING, Returned
from autopar.values.precision import PRECISIONS

MANY = 8
"""Of so many graphs of one call, each for other values of buffers, there is no end."""


class Captor(Protocol):
    """A model that is captured again (`autopar.api.again`)."""

    @property
    def call(self) -> Call: ...
    @property
    def is_live(self) -> bool: ...
    @property
    def precision(self) -> str: ...

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def returns_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool: ...
    def modes(self) -> dict[str, bool]: ...
    def parts(self) -> list[Described]: ...
    def captured(
        self,
        call: Call,
        modes: Mapping[str, bool],
        buffers: Mapping[str, Tensor],
        *,
        gradients: bool,
        wants_loss: bool = False,
        then: Any = None,
    ) -> tuple[CapturedModel, Returned]: ...
    def local(self, captured: CapturedModel, *, gathers: bool) -> LocalModel: ...
    def stages(self, captured: CapturedModel, *, gathers: bool) -> tuple[tuple[int, LocalModel], ...]: ...


class Runnable(Protocol):
    """A graph that runs a call."""

    @property
    def inputs(self) -> tuple[InputSpec, ...]: ...
    def run(self, inputs: Mapping[str, Tensor], draws: Draws, outputs: str, *, is_local: bool) -> Any: ...


Make = Callable[[CapturedModel, Returned, bool], Runnable]
"""Of a captured call what runs it, gathering what it returns or not; all ranks together."""


class Variants:
    """The graphs of one module beside that of the planned step, in which its parts were in the modes `first`."""

    def __init__(self, captor: Captor, make: Make) -> None:
        self.captor, self.make = captor, make
        self.modes = self.first = captor.modes()
        self.planned = dict(flatten_inputs(captor.call.args, captor.call.kwargs)[0])
        self._dtypes = {path: _dtypes(leaf, captor.precision) for path, leaf in self.planned.items()}
        self._made: dict[object, list[tuple[CapturedModel, Runnable]]] = {}
        self._returned: dict[object, tuple[list[Tensor], Returned]] = {}
        self._last: object = None
        self._waiting: DeferredCall | None = None

    def set_modes(self, mode: bool) -> None:
        """All parts of the model are in a mode."""
        self.flush()
        self.modes = dict.fromkeys(self.modes, mode)

    def modes_of(self, module: nn.Module) -> dict[str, bool]:
        """Of the model's parts, which may have been changed one by one."""
        if self.captor.is_live:
            return self.captor.modes()
        own = {name: part.training for name, part in module.named_modules()}
        return {name: own.get(name, mode) for name, mode in self.modes.items()}

    def is_planned(self, module: Any, asked: "Asked") -> bool:
        """Whether a call is the planned step's, in its mode."""
        leaves = dict(flatten_inputs(asked.args, asked.kwargs)[0])
        if set(leaves) != set(self.planned) or self.modes_of(module) != self.first:
            return False
        if autocast_of(module.device) is not None:
            return False
        for path, planned in self.planned.items():
            value = leaves[path]
            if isinstance(planned, Tensor):
                if not isinstance(value, Tensor) or (value.requires_grad and torch.is_grad_enabled()):
                    return False
                if not asked.is_local and (value.shape != planned.shape or value.dtype not in self._dtypes[path]):
                    return False
            elif not is_alike(value, planned):
                return False
        return True

    def run(self, module: Any, asked: "Asked") -> Any:
        """What the model returns for a call, or what is asked instead.

        module: whose state it reads, a `runtime.trainable.Trainable`.
        """
        self.flush()
        if asked.can_wait and torch.is_grad_enabled() and module._outputs == GATHERED:
            return self._deferred(module, asked)
        return self._run(module, asked, module._outputs)

    def flush(self) -> None:
        """Run the last call, if it has not run."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.has_begun:
            waiting.finish()

    def _deferred(self, module: Any, asked: "Asked") -> Any:
        """What the model returns, without values until some are asked for."""
        key = self._key(module, asked)
        if key not in self._returned:
            captured, returned = self._captured(module, asked, 0)
            nodes = [captured.nodes[name] for name in captured.outputs]
            metas = [node.meta["val"].detach().requires_grad_(requires_grad(node)) for node in nodes]
            self._returned[key] = metas, returned

        dtype, kind = autocast_of(module.device), module.device.type

        def finish(following: Following, extras: list[Tensor]) -> Sequence[Tensor]:
            region = torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
            with torch.enable_grad(), region:  # as where it was called
                made: Sequence[Tensor] = self._run(module, asked.followed_by(following, extras), DTENSOR)
            return made

        metas, returned = self._returned[key]
        given = [leaf for _, leaf in flatten_inputs(asked.args, asked.kwargs)[0] if isinstance(leaf, Tensor)]
        parameters = [held for state in module.states for held in state.parameters.values()]
        given += [*parameters, *map(local_tensor, parameters)]
        self._waiting = DeferredCall(finish, module.device, given, dtype)
        return returned.holding(self._waiting.begin(metas))

    def _run(self, module: Any, asked: "Asked", outputs: str) -> Any:
        module.check_initialized()
        key = self._key(module, asked)
        known = self._made.setdefault(key, [])
        found = next((runs for captured, runs in known if guards_hold(captured, module)), None)
        if found is None:
            captured, returned = self._captured(module, asked, len(known))
            found = self.make(captured, returned, outputs == GATHERED)
            known.append((captured, found))
        inputs = bind_inputs(found.inputs, asked.args, asked.kwargs)
        with torch.autocast(module.device.type, enabled=False):
            return found.run(inputs, module.next_draws(1)[0], outputs, is_local=asked.is_local)

    def _key(self, module: Any, asked: "Asked") -> object:
        """Of the graph; ranks are compared where it is another than the last."""
        modes = self.modes_of(module)
        forms = tuple((path, form_of(leaf)) for path, leaf in flatten_inputs(*self._whole(asked))[0])
        follows = asked.then and asked.then.key
        about = torch.is_grad_enabled(), autocast_of(module.device), asked.wants_loss, module._outputs
        key = forms, tuple(modes.items()), about, follows
        if key != self._last:
            agree({"call": _words(forms, modes, wants_loss=asked.wants_loss)})
            self._last = key
        return key

    def _captured(self, module: Any, asked: "Asked", count: int) -> tuple[CapturedModel, Returned]:
        with failing_together():
            if count >= MANY:
                raise CaptureError(
                    f"forward decides on buffers that have had {count} values by now, and each wants a graph of its "
                    "own; compute with the tensor (torch.where) instead of branching on it"
                )
            args, kwargs = self._whole(asked)
            torch.clear_autocast_cache()
            captured, returned = self.captor.captured(
                Call(args=tuple(args), kwargs=dict(kwargs)),
                self.modes_of(module),
                dict(module.named_buffers(remove_duplicate=False)),
                gradients=torch.is_grad_enabled(),
                wants_loss=asked.wants_loss,
                then=asked.then,
            )
        torch.clear_autocast_cache()
        if not asked.is_local:
            agree({"values of inputs (a rank's own rows are given as autopar.LocalBatch)": _digest((args, kwargs))})
        agree({"graph": captured.fingerprint})
        return captured, returned

    def _whole(self, asked: "Asked") -> tuple[Any, Any]:
        """A call with this rank's slices as one of the planned global batch."""
        if not asked.is_local:
            return asked.args, asked.kwargs
        leaves, rebuild = flatten_inputs(asked.args, asked.kwargs)
        return rebuild([self.planned.get(path, leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call in the form of the planned one.

    is_local: its tensors are this rank's slices. wants_loss: the loss is asked for, whatever the model returns.
    then: what follows on the model, made of its output and of the keyword `FOLLOWING`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_local: bool = False
    wants_loss: bool = False
    then: Following | None = None

    @property
    def can_wait(self) -> bool:
        """Whether what is computed of the outputs may become a part of the graph."""
        return not (self.is_local or self.wants_loss or self.then)

    def followed_by(self, then: Following, extras: list[Tensor]) -> "Asked":
        return replace(self, kwargs={**self.kwargs, FOLLOWING: extras}, then=then)


def guards_hold(captured: CapturedModel, module: Any) -> bool:
    """Whether the buffers that a graph takes for granted have the values that it was captured with."""
    return all(holds(guard, module.get_buffer(guard.name)) for guard in captured.guards)


def _dtypes(planned: Any, precision: str) -> tuple[torch.dtype, ...]:
    """Of an input of the planned call: its own, or that which is computed in. Eager code casts no others."""
    own = (planned.dtype,) if isinstance(planned, Tensor) else ()
    return (*own, PRECISIONS[precision].compute) if any(dtype.is_floating_point for dtype in own) else own


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
