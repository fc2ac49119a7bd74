"""Which layers of a stack compute the same? One run on fake tensors, every op noted with where its operands come from.

A layer's trace is the list of its ops: target, constants, shapes, and for each tensor its origin: the layer's own op or
parameter, an op of the layer before, a small constant (by its values), or one fixed thing outside. Layers with equal
traces compute the same function of the same things, whatever Python did to get there (`if self.layer_idx % 2`, lists in
the config, ...).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.capture.fake_twin import device_of, has_value
from autopar.capture.stand_ins import Span, StandIns

Origin = tuple[str, Any]
DEVICE = torch.ops.prim.device.default
SMALL = 256
"""Bytes of a constant that counts by its values: `torch.tensor([])` is another tensor in every layer."""
FEW = 6
"""Stacks of fewer layers are not worth looking at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Of one stack: for each layer its trace with origins outside named, and without them (`own`)."""

    stack: str
    whole: tuple[str, ...]
    own: tuple[str, ...]


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Lists and sequences of modules by path, those that hold one module twice left out."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            layers = list(module.children())
            if len(layers) == len(module) == len({id(layer) for layer in layers}):
                found[path] = module
    return found


def trace_layers(
    model: nn.Module, call: Callable[[], Any], stacks: Sequence[str], *, stand_in: bool = True
) -> list[Traces]:
    """Traces of the stacks that `call`, a run of the model on fake tensors, passes through in order, layer by layer.

    stand_in: layers that others can stand for are not run, nor are stacks inside them, which have no traces then.
    """
    names: dict[int, str] = {}
    for path, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), path)
    recorder = _Recorder(names)
    replaced: dict[str, StandIns] = {}
    with ExitStack() as held:
        for stack in stacks if stand_in else ():
            replaced[stack] = StandIns(stack, list(model.get_submodule(stack).children()), recorder)
        for own in replaced.values():
            held.enter_context(own.standing_in())
        held.enter_context(_watched(model, stacks, recorder))
        held.enter_context(recorder)
        call()
    found = []
    for stack in stacks:
        traces = _of_stack(recorder, model, stack, replaced[stack].of if stack in replaced else {})
        found += [] if traces is None else [traces]
    return found


@dataclass(frozen=True, slots=True)
class _Op:
    words: str
    origins: tuple[Origin, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.ops: list[_Op] = []
        self.begin: dict[tuple[str, int], list[int]] = {}
        self.end: dict[tuple[str, int], int] = {}
        self.made: dict[int, tuple[int, int]] = {}
        self.alive: list[Tensor] = []  # kept, so that no id is given twice
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # asked of fake tensors at every turn, and nothing is computed
            return device_of(args[0]) or func(*args)
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        origins: list[Origin] = []
        words = f"{func} {self._words(args, origins)} {self._words(kwargs or {}, origins)}"
        result = func(*args, **(kwargs or {}))
        for index, tensor in enumerate(_tensors(result)):
            self.made.setdefault(id(tensor), (len(self.ops), index))
            self.alive.append(tensor)
            words += f" -> {tuple(tensor.shape)} {tensor.dtype}"
        self.ops.append(_Op(words, tuple(origins)))
        return result

    def _words(self, value: Any, origins: list[Origin]) -> str:
        if isinstance(value, Tensor):
            origins.append(self._origin(value))
            return f"<{tuple(value.shape)} {value.dtype} {value.requires_grad}>"
        if isinstance(value, tuple | list):
            return f"({', '.join(self._words(part, origins) for part in value)})"
        if isinstance(value, dict):
            return f"({', '.join(f'{k}={self._words(v, origins)}' for k, v in value.items())})"
        return repr(value)

    def _origin(self, tensor: Tensor) -> Origin:
        if id(tensor) in self.names:
            return "state", self.names[id(tensor)]
        if id(tensor) in self.made:
            return "op", self.made[id(tensor)]
        if has_value(tensor) and tensor.numel() * tensor.element_size() <= SMALL:
            return "value", _value(tensor)
        self.alive.append(tensor)
        return "tensor", id(tensor)

    def name_of(self, tensor: Tensor) -> str:
        return self.names[id(tensor)]

    def now(self) -> int:
        return len(self.ops)

    def repeat(self, span: Span) -> None:
        self.ops += self.ops[span[0] : span[1]]

    def key_of(self, tensor: Tensor, before: Span) -> Hashable:
        kind, value = self._origin(tensor)
        if kind == "op" and before[0] <= value[0] < before[1]:
            return "before", value[0] - before[0], value[1]
        return kind, value

    def made_in(self, tensor: Tensor, span: Span) -> tuple[int, int] | None:
        number, index = self.made.get(id(tensor), (-1, 0))
        return (number - span[0], index) if span[0] <= number < span[1] else None

    def stand_in(self, tensor: Tensor, made: tuple[int, int]) -> Tensor:
        self.is_paused = True
        try:
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            if tensor.requires_grad:  # as what was computed is, not as a leaf
                other += torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
        finally:
            self.is_paused = False
        self.made[id(other)] = made
        self.alive.append(other)
        return other


def _value(tensor: Tensor) -> str:
    """What a constant holds; fake modes would read garbage."""
    with _disable_current_modes():
        return repr(tensor.tolist())


@contextmanager
def _watched(model: nn.Module, stacks: Sequence[str], recorder: _Recorder) -> Iterator[None]:
    """Note which ops run while each layer does."""
    hooks = []
    for stack in stacks:
        for index, layer in enumerate(model.get_submodule(stack).children()):

            def entered(*_: Any, key: tuple[str, int] = (stack, index)) -> None:
                recorder.begin.setdefault(key, []).append(len(recorder.ops))

            def left(*_: Any, key: tuple[str, int] = (stack, index)) -> None:
                recorder.end[key] = len(recorder.ops)

            hooks += [layer.register_forward_pre_hook(entered), layer.register_forward_hook(left)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_stack(recorder: _Recorder, model: nn.Module, stack: str, stands_for: Mapping[int, int]) -> Traces | None:
    layers = list(model.get_submodule(stack).children())
    spans = []
    for index in range(len(layers)):
        begins = recorder.begin.get((stack, index), [])
        if len(begins) != 1 or (stack, index) not in recorder.end:
            return None  # not run, or run twice
        spans.append((begins[0], recorder.end[stack, index]))
    if any(left[1] > right[0] for left, right in pairwise(spans)):
        return None
    whole, own = list[str](), list[str]()
    for index, (begin, end) in enumerate(spans):
        if index in stands_for:
            whole.append(whole[stands_for[index]])
            own.append(own[stands_for[index]])
            continue
        before = spans[index - 1] if index else (0, 0)
        full, local = [_state_words(layers[index])], [_state_words(layers[index])]
        for op in recorder.ops[begin:end]:
            origins = [_relative(origin, f"{stack}.{index}.", (begin, end), before) for origin in op.origins]
            full.append(f"{op.words} {origins}")
            local.append(f"{op.words} {[o if o[0] in ('own', 'before') else '' for o in origins]}")
        whole.append("\n".join(full))
        own.append("\n".join(local))
    return Traces(stack=stack, whole=tuple(whole), own=tuple(own))


def _relative(origin: Origin, prefix: str, span: tuple[int, int], before: tuple[int, int]) -> Origin:
    kind, value = origin
    if kind == "state" and value.startswith(prefix):
        return "own", value.removeprefix(prefix)
    if kind == "op":
        number, index = value
        for name, (begin, end) in (("own", span), ("before", before)):
            if begin <= number < end:
                return name, (number - begin, index)
    return origin


def _state_words(layer: nn.Module) -> str:
    """Everything that a layer holds, used or not."""
    held = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return str([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in held])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
