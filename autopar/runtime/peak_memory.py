"""How many bytes of tensors does this rank hold at once? Counted while it computes, the peak and what it is made of.

A *storage* counts from the call that makes it until nothing refers to it, views and aliases included; what exists
before is named by `hold`. Autograd adds gradients up in place, but writes a new sum while calls are watched: one made
in backward counts when the next call begins, when autograd has let the old one go. Not seen: what a kernel or a library
allocates inside one call, the rounding and the fragments of an allocator, and buffers of the backend that sends (views
of storage that no call made are not counted).
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.private_torch import in_backward, local_tensor
from autopar.runtime.trainable import Trainable


@dataclass(slots=True, kw_only=True)
class _Held:
    """One live storage: its bytes, what it is, and the call that made it."""

    nbytes: int
    kind: str
    made_by: str


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while active (`with`). `peak`: most bytes at once; `at_peak`: bytes then, by kind or by making call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._held: dict[int, _Held] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._at_peak: tuple[_Held, ...] = ()
        self._adds = False

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already, or name what they are if they are counted."""
        for tensor in tensors:
            self._count(tensor, kind, kind)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by kind; what no `hold` named is `working`."""
        return _summed((held.kind, held.nbytes) for held in self._at_peak)

    @property
    def makers_at_peak(self) -> dict[str, int]:
        """Bytes at the peak by the call that made them, most first."""
        return _summed((held.made_by, held.nbytes) for held in self._at_peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, for local tensors
        self._compare()
        result = func(*args, **(kwargs or {}))
        self._adds = func is torch.ops.aten.add.Tensor and in_backward()
        if not any(returned.alias_info for returned in func._schema.returns):
            for tensor in _tensors(result):
                self._count(tensor, "working", str(func))
        return result

    def _count(self, tensor: Tensor, kind: str, made_by: str) -> None:
        if tensor.layout is not torch.strided:  # has several storages, and none of its own
            return
        storage = local_tensor(tensor).untyped_storage()
        if (held := self._held.get(id(storage))) is not None:
            held.kind = kind if kind != "working" else held.kind
            return
        key, held = id(storage), _Held(nbytes=storage.nbytes(), kind=kind, made_by=made_by)
        self._held[key] = held
        self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.live += held.nbytes
        if not self._adds:
            self._compare()

    def _compare(self) -> None:
        if self.live > self.peak:
            self.peak, self._at_peak = self.live, tuple(self._held.values())

    def _drop(self, key: int) -> None:
        self.live -= self._held.pop(key).nbytes
        del self._references[key]


def watch(module: Trainable, inputs: Mapping[str, Tensor]) -> PeakMemory:
    """A count that begins with what a module holds, and with this rank's part of the inputs of a step."""
    memory = PeakMemory()
    memory.hold("parameters", module.parameters())
    memory.hold("gradients", (p.grad for p in module.parameters() if p.grad is not None))
    constants = (value for state in module.states for value in state.constants.values())
    memory.hold("inputs", [*module.buffers(), *constants, *inputs.values()])
    memory.hold("received", module.receive_buffers())
    return memory


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for name, nbytes in parts:
        out[name] = out.get(name, 0) + nbytes
    return dict(sorted(out.items(), key=lambda item: -item[1]))
