"""Every private part of torch that the runtime touches, so that a new torch breaks one file and its test says what.

Used of private torch (checked with 2.11 to 2.13; tests/test_runtime_private_torch.py names what is missing):

    DTensor._local_tensor                              the local tensor without autograd or dispatch (to_local: 6-12 us)
    DTensor(local, DTensor._spec, requires_grad=)      a DTensor like another (from_local: 150 us)
    Tensor._version, UntypedStorage._cdata             whether a tensor was written, or its `.data` exchanged
    torch.distributed.tensor.placement_types._StridedShard     a dim split by a later mesh axis first
    torch.distributed.distributed_c10d._get_default_store      the key-value store that made the default group
    torch.autograd.Variable._execution_engine                  calls at the end of a backward pass; one that begins at
                                                       edges (torch.autograd.grad of 2.11 asks for shapes there, which
                                                       nodes of Python's functions do not have)
    torch._C._current_autograd_node                    the node of autograd's graph that runs now
    torch._C.DisableTorchFunctionSubclass              reads an attribute of a tensor subclass as a plain tensor's
    torch.nn.utils.clip_grad._clip_grads_with_norm_    where clip_grad_norm_ sees whose gradients it scales
    torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops     messages that greet neighbouring stages
    torch.distributed.checkpoint.filesystem._StorageInfo(relative_path, offset, length, transform_descriptors)
                                                       where in a checkpoint's files a piece of a tensor is
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.utils import clip_grad

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
NODES_HOLD = RELEASE >= (2, 13)
"""Whether what Python has of a node of autograd's graph keeps it there: before 2.13 not of a Python function's node."""


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stored_like(local: Tensor, other: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor without gradient that is stored as `other` is, a DTensor or plain."""
    if not isinstance(other, DTensor):
        return local
    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def memory_of(tensor: Tensor) -> int:
    """Another number once the tensor's `.data` was assigned (a DTensor has a memory of no bytes)."""
    return tensor.untyped_storage()._cdata if isinstance(tensor, DTensor) else tensor.data_ptr()


def is_stored_as(one: Tensor, other: Tensor) -> bool:
    """Whether ranks hold a tensor as they hold another, in DTensors of one layout or whole."""
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return bool(one._spec == other._spec)
    return type(one) is type(other) and one.shape == other.shape


def as_plain_tensors(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of one of torch's functions, to which tensor subclasses are plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A split of `dim` whose chunks lie inside those of `split_factor` chunks that later mesh axes made first."""
    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run `call` at the end of the backward pass that is running."""
    Variable._execution_engine.queue_callback(call)


def is_made(tensor: Tensor) -> bool:
    """Whether autograd knows what made a tensor, without asking a tensor subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn is not None


def in_backward() -> bool:
    """Whether a node of autograd's graph runs, or its gradients are being added up."""
    return torch._C._current_autograd_node() is not None


def gradients_from(
    roots: Sequence[Any], gradients: Sequence[Tensor], targets: Sequence[Tensor], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """As `torch.autograd.grad(roots, targets, gradients, retain_graph, allow_unused=True)`; roots: tensors or edges."""
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        False,
        tuple(targets),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def before_clipping(check: Callable[[list[Tensor]], None]) -> None:
    """From now on `torch.nn.utils.clip_grad_norm_` has its parameters checked before their gradients are scaled."""
    scale = clip_grad._clip_grads_with_norm_

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        check(own)
        scale(own, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = checked


def greet_others(stage: Any) -> None:
    """Have a stage of `torch.distributed.pipelining` greet those neighbours alone that other ranks run: torch 2.11
    sends greetings to its own rank too, which Gloo refuses."""
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in greetings() if op.group_peer != stage.group_rank]


class Store(Protocol):
    """Keys and values that all processes share (torch.distributed.Store, which has no public type)."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


def default_store() -> Store:
    """The store through which the processes of the default group met."""
    return cast(Store, _get_default_store())


def stored_at(file: str, start: int, nbytes: int) -> Any:
    """Where torch's checkpoints have a piece of a tensor."""
    return _StorageInfo(file, start, nbytes)


def storage_of(stored: Any) -> tuple[str, int, int]:
    """File, start and number of bytes of such a piece."""
    assert isinstance(stored, _StorageInfo) and not stored.transform_descriptors
    return stored.relative_path, stored.offset, stored.length
