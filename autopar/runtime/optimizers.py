"""Which optimizers can update DTensor parameters? A step of one that cannot fails with the reason, not with DTensor's.

Where every rank has all of every parameter they are plain tensors (`runtime.state`), and nothing is refused.

Found by trying every optimizer of torch.optim against one process (tests/test_runtime_optimizers.py does so again).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import ArgumentError, OptimizerError
from autopar.runtime.deferred import finish_readers
from autopar.runtime.parameters import MARK, STAGE
from autopar.runtime.private_torch import before_clipping

REFUSED: dict[type, str] = {
    torch.optim.Adafactor: "its factored second moments need an operation in place that DTensor does not have",
    torch.optim.Rprop: "it writes through an index of signs, which DTensor cannot do in place",
    torch.optim.LBFGS: "it flattens all parameters into one vector, which DTensors of several layouts cannot be",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients here are dense",
}

ALTERNATIVE = "AdamW, Adam, SGD, Adagrad, RMSprop and most others of torch.optim work"

stepped: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers that have made a step."""

_installed = False


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Return if `optimizer` can update its parameters, DTensors or not.

    Raises:
        OptimizerError: with the reason and alternatives.
    """
    if not any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot update distributed parameters: {reason}; {ALTERNATIVE}"
            )


def install_check() -> None:
    """From now on the first step of any optimizer that holds parameters of ours is checked."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        before_clipping(_refuse_own_norms)
        _installed = True


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    finish_readers(p for group in optimizer.param_groups for p in group["params"])  # as the parameters were
    if any(group.get("fused") for group in optimizer.param_groups):  # which writes without a word
        own = (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, MARK))
        increment_version([p for p in own if p.grad is not None])
    if optimizer in stepped:
        return
    if any(hasattr(p, MARK) for group in optimizer.param_groups for p in group["params"]):
        check_optimizer(optimizer)
    stepped.add(optimizer)


def _refuse_own_norms(parameters: Sequence[Tensor]) -> None:
    if any(getattr(parameter, STAGE, False) for parameter in parameters):
        raise ArgumentError(
            "torch.nn.utils.clip_grad_norm_ sees the gradients of one rank's stages alone, so that each rank would "
            "clip by another norm; call module.clip_grad_norm_(max_norm)"
        )
