"""What may be computed of a loss beside its gradient? Sums with parameters, which ranks share out; no `autograd.grad`.

A loss is whole on every rank, and so is what is computed of it. A DTensor in between (a penalty on parameters) is
gathered. `torch.autograd.grad` of parameters would find nothing, since their gradients travel after they were computed;
where unused tensors are allowed it would say so by None alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import ArgumentError
from autopar.runtime.parameters import MARK
from autopar.runtime.private_torch import as_plain_tensors
from autopar.values.inputs import taken_apart


class Whole(Tensor):
    """A differentiable tensor that every rank has whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, rebuild = taken_apart((args, kwargs or {}))
        refuse_lost_gradients(func, leaves)
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        args, kwargs = rebuild(leaves)
        result = as_plain_tensors(func, args, kwargs)
        return as_whole(result) if type(result) is Tensor else result

    def __format__(self, spec: str) -> str:
        # torch's own is for no subclass.
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def as_whole(value: Any) -> Any:
    """A differentiable tensor as a `Whole`; anything else as it is, so that what is saved is a plain tensor."""
    if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
        return value
    return value.as_subclass(Whole)


def refuse_lost_gradients(func: Any, leaves: Sequence[Any]) -> None:
    """Raises ArgumentError if gradients of parameters are asked for one by one."""
    if func in (torch.autograd.grad, Tensor.backward) and any(hasattr(leaf, MARK) for leaf in leaves):
        raise ArgumentError(
            "gradients of a distributed module's parameters travel after they were computed, so that "
            "torch.autograd.grad and backward(inputs=) find none; call backward() and read .grad"
        )
