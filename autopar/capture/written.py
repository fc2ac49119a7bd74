"""What does forward write into parameters, and what of tensors' gradients does it hook? Seen function by function.

A parameter that is written (under `no_grad`, through `.data`, by `max_norm`) has a *shadow* in the trace, a tensor with
its value, which takes the writes; what reads the parameter later reads `renewed(parameter, shadow)`, the value of
the shadow with the parameter's gradient, as eager has it. Where a view was made before the first write, the parameter
itself is found changed in the end, and the trace is made again with a shadow from the beginning. Tensors that are not
parameters are treated alike where they are written under `no_grad` while a gradient flows through them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopar.capture.gradient_hooks import hook_in_forward
from autopar.capture.inner_gradients import inner_gradients, is_tracing
from autopar.capture.opaque import Opaque, active_opaques
from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError
from autopar.ops.own_gradient import renewed
from autopar.values.inputs import mapped_tensors

_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__ifloordiv__",
             "__iand__", "__ior__", "__ixor__", "__imod__", "__ilshift__", "__irshift__"}  # fmt: skip
_NO_VALUE = {"requires_grad_", "retain_grad", "rename_", "share_memory_"}


@dataclass(slots=True)
class _Shadow:
    tensor: Tensor
    value: Tensor
    seen: tuple[int, Tensor] | None = None
    is_stopped: bool = False

    @property
    def is_written(self) -> bool:
        return self.value._version > 0

    def read(self) -> Tensor:
        """What a function with gradients reads instead of the tensor."""
        if self.is_stopped:
            return self.value
        if not self.is_written:
            return self.tensor
        if not self.tensor.requires_grad:
            return self.value
        if self.seen is None or self.seen[0] != self.value._version:
            self.seen = self.value._version, _renewed(self.tensor, self.value)
        return self.seen[1]


def _renewed(tensor: Tensor, value: Tensor) -> Tensor:
    def run(_: Tensor, value: Tensor) -> Sequence[Tensor]:
        return (value,)

    tracing = active_opaques()
    assert tracing is not None
    with torch.enable_grad():
        return tracing.call((tensor, value), Opaque(run=run, target=lambda: (renewed, ()), key="renewed"))[0][0]


@dataclass(slots=True)
class Written:
    """What traces of a model showed. names: of parameters that have a shadow from the beginning; found: of those that
    were found changed without one; by_data: where those written through `.data` are; values: in the order of the last
    trace's results."""

    names: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    by_data: dict[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()


class Watch(TorchFunctionMode):
    """One run of forward: writes go to shadows, hooks become calls."""

    def __init__(self, model: nn.Module, written: Written) -> None:
        super().__init__()
        self.model, self.written = model, written
        self.names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self.parameters = dict(model.named_parameters())
        self.storages = {p.untyped_storage()._cdata: name for name, p in self.parameters.items()}
        self.versions = {name: p._version for name, p in self.parameters.items()}
        self.needs = {name: p.requires_grad for name, p in self.parameters.items()}
        self.tables = [
            (m, dict(m._buffers), dict(m._parameters)) for m in model.modules() if m._buffers or m._parameters
        ]
        self.shadows: dict[int, _Shadow] = {}
        self.frozen: dict[int, Tensor] = {}
        self.toggled: dict[str, str] = {}
        for name in written.names & set(self.parameters):
            self._shadow(self.parameters[name])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind == "set":
            return self._set(args[0], args[1])
        if kind == "data":
            return self._data(args[0])
        if kind == "detach" and args and id(args[0]) in self.shadows:
            return self._shadow(args[0]).value
        if kind == "stop" and args[0].requires_grad:
            return self._stop(func, args[0])
        if kind == "freeze" and id(args[0]) in self.names:
            return self._freeze(func, args[0], bool([*args[1:], *kwargs.values(), True][0]))
        if kind == "hook":
            return hook_in_forward(*args, **kwargs, is_parameter=id(args[0]) in self.names)
        if kind == "grad":
            args, kwargs = mapped_tensors(self._read, (args, kwargs))
            return inner_gradients(*args, **kwargs) if is_tracing() else func(*args, **kwargs)
        if kind == "lookup":
            args, kwargs = self._renormed(func, args, kwargs)
        elif kind is not None and kind not in ("detach", "stop", "freeze"):
            raise CaptureError(f"{own_frame()}: {kind}")
        if _writes(func) and args and isinstance(args[0], Tensor):
            self._written_to(args[0])
        if self.shadows or self.frozen:
            args, kwargs = mapped_tensors(self._read, (args, kwargs))
        return func(*args, **kwargs)

    def _written_to(self, tensor: Tensor) -> None:
        """A tensor without shadow gets one, if a gradient may flow through it; a parameter's view is noted."""
        if id(tensor) in self.shadows:
            return
        name = self.storages.get(tensor.untyped_storage()._cdata)
        base = tensor._base
        if name is not None and (id(tensor) not in self.names or not tensor.requires_grad):
            self.written.found.add(name)
        elif torch.is_grad_enabled():
            return
        elif base is not None and base.requires_grad and name is None:
            raise CaptureError(
                f"{own_frame()}: forward writes under torch.no_grad() into a part of a tensor that carries a gradient; "
                "index the tensor itself (x[0] = y), or make a new one with torch.where"
            )
        elif tensor.requires_grad:
            self._shadow(tensor)

    def _read(self, tensor: Tensor) -> Tensor:
        shadow = self.shadows.get(id(tensor))
        if shadow is None:
            return self.frozen.get(id(tensor), tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return shadow.read()
        return shadow.value

    def _shadow(self, tensor: Tensor) -> _Shadow:
        if id(tensor) not in self.shadows:
            with torch.no_grad():
                self.shadows[id(tensor)] = _Shadow(tensor, tensor.detach().clone())
        return self.shadows[id(tensor)]

    def _stop(self, func: Any, tensor: Tensor) -> Tensor:
        """`detach_`: what reads the tensor from here on reads a value without gradient."""
        if id(tensor) in self.names:
            return self._freeze(func, tensor, False)
        shadow = self._shadow(tensor)
        shadow.value, shadow.is_stopped = shadow.value.detach().clone(), True  # a view would stop what is written later
        func(tensor)
        return tensor

    def _freeze(self, func: Any, parameter: Tensor, needs: bool) -> Tensor:
        """`requires_grad` of a parameter: while it is off, what reads the parameter reads it without gradient."""
        name = self.names[id(parameter)]
        if needs and not self.needs[name]:
            raise CaptureError(
                f"{own_frame()}: forward turns requires_grad of the parameter {name} on; set it before the model is "
                "captured"
            )
        self.toggled[name] = own_frame() or "forward"
        self.frozen.pop(id(parameter), None)
        if not needs and self.needs[name]:
            self.frozen[id(parameter)] = parameter.detach()
        parameter.requires_grad = needs
        return parameter

    def _data(self, tensor: Tensor) -> Tensor:
        """`.data` of a tensor: its shadow's value, if it has one or a gradient may flow through it."""
        if tensor.requires_grad:
            self._note_data(tensor)
            return self._shadow(tensor).value
        shadow = self.shadows.get(id(tensor))
        return tensor.detach() if shadow is None else shadow.value

    def _note_data(self, tensor: Tensor) -> None:
        if id(tensor) in self.names:
            self.written.by_data.setdefault(self.names[id(tensor)], own_frame() or "forward")

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            what = self.names.get(id(tensor), "a tensor")
            raise CaptureError(
                f"{own_frame()}: .data of {what} is given other sizes ({tuple(value.shape)} {value.dtype} for "
                f"{tuple(tensor.shape)} {tensor.dtype}); a captured model keeps those it has"
            )
        with torch.no_grad():
            if tensor.requires_grad or id(tensor) in self.names or id(tensor) in self.shadows:
                self._note_data(tensor)
                self._shadow(tensor).value.copy_(self._read(value))
            else:
                tensor.copy_(self._read(value))

    def _renormed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """A lookup with `max_norm`: rows looked up are written first."""
        given: dict[str, Any] = {**dict(zip(_PARAMETERS[func], args, strict=False)), **kwargs}
        if given.get("max_norm") is None:
            return args, kwargs
        weight = given["weight"]
        with torch.no_grad():
            value = self._shadow(weight).value
            torch.embedding_renorm_(value, given["input"].contiguous(), given["max_norm"], given.get("norm_type", 2.0))
        return (), {**given, "max_norm": None}

    def finish(self) -> list[Tensor]:
        """New values of the parameters that were written, in the order of `written.values`.

        Raises:
            CaptureError: if forward put other tensors in place of parameters, or froze some.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != self.needs[name]:
                where = self.toggled.get(name, "forward")
                raise CaptureError(
                    f"{where}: forward changes requires_grad of the parameter {name} of {type(self.model).__name__} "
                    "and leaves it so; set it "
                    "before the model is captured"
                )
        for module, buffers, parameters in self.tables:
            if any(module._parameters.get(name) is not own for name, own in parameters.items()):
                raise CaptureError(
                    f"forward of {type(module).__name__} puts other parameters in place of its own; write into them "
                    "under torch.no_grad() instead"
                )
            for name, own in buffers.items():
                self._assigned(module, name, own)
        self.check()
        found = {self.names[id(s.tensor)]: s for s in self.shadows.values() if id(s.tensor) in self.names}
        written = {name: shadow.value.detach() for name, shadow in found.items() if shadow.is_written}
        self.written.values = tuple(written)
        return list(written.values())

    def check(self) -> None:
        """Note parameters that were changed themselves."""
        changed = {name for name, p in self.parameters.items() if p._version != self.versions[name]}
        self.written.found |= changed

    def _assigned(self, module: nn.Module, name: str, own: Tensor | None) -> None:
        """A buffer that another tensor was put in place of takes its value."""
        new = module._buffers.get(name)
        if new is own:
            return
        if own is None or new is None or new.shape != own.shape or new.dtype != own.dtype:
            raise CaptureError(
                f"forward of {type(module).__name__} gives its buffer {name!r} another shape or dtype, where a "
                "captured model keeps those it has; if only the first call does so, call the model on one batch "
                "before planning (`model(**batch)` in one process)"
            )
        with torch.no_grad():
            own.copy_(new)
        module._buffers[name] = own


_PARAMETERS: dict[Any, Collection[str]] = {
    F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    F.embedding_bag: ("input", "weight", "offsets", "max_norm", "norm_type"),
}
_BACKWARD = "forward calls backward(); a captured model has one backward pass, after forward"
_LENGTHS = (
    "sizes inside ctc_loss depend on the values of its lengths, so one graph cannot stand for the model; return its "
    "operands, and compute it in a step outside"
)
_KINDS: dict[Any, str] = {
    Tensor.data.__set__: "set",  # type: ignore[attr-defined]
    Tensor.data.__get__: "data",  # type: ignore[attr-defined]
    Tensor.detach: "detach",
    torch.detach: "detach",
    Tensor.detach_: "stop",
    torch.detach_: "stop",
    Tensor.requires_grad_: "freeze",
    Tensor.requires_grad.__set__: "freeze",  # type: ignore[attr-defined]
    Tensor.register_hook: "hook",
    F.embedding: "lookup",
    F.embedding_bag: "lookup",
    F.ctc_loss: _LENGTHS,
    torch.ctc_loss: _LENGTHS,
    Tensor.register_post_accumulate_grad_hook: (
        "register_post_accumulate_grad_hook in forward is not captured; change gradients after backward instead"
    ),
    torch.autograd.grad: "grad",
    Tensor.backward: _BACKWARD,
    torch.autograd.backward: _BACKWARD,
}
"""What a function is to `Watch`; else why it is refused."""


def _writes(func: Any) -> bool:
    """Whether a function writes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _NO_VALUE)
