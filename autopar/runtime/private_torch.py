"""Every private part of torch that the runtime touches, so that a new torch breaks one file and its test says what.

Used of private torch (checked with 2.11 to 2.13; tests/test_runtime_private_torch.py names what is missing):

    DTensor._local_tensor                              the local tensor without autograd or dispatch (to_local: 6-12 us)
    DTensor(local, DTensor._spec, requires_grad=)      a DTensor like another (from_local: 150 us)
    torch.distributed.tensor.placement_types._StridedShard     a dim split by a later mesh axis first
    torch.distributed.distributed_c10d._get_default_store      the key-value store that made the default group
    torch.autograd.Variable._execution_engine                  calls at the end of a backward pass
    torch._C._current_autograd_node                    the node of autograd's graph that runs now
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stored_like(local: Tensor, other: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor without gradient that is stored as `other` is, a DTensor or plain."""
    if not isinstance(other, DTensor):
        return local
    return DTensor(local, other._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A split of `dim` whose chunks lie inside those of `split_factor` chunks that later mesh axes made first."""
    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run `call` at the end of the backward pass that is running."""
    Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Whether a node of autograd's graph runs, or its gradients are being added up."""
    return torch._C._current_autograd_node() is not None


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
