"""In which dtypes is a model computed, and are its weights stored? The names that `precision` takes.

`mixed`: trained parameters, their gradients and the optimizer's state are wider than what is computed, *master weights*
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.1). Each rank casts its part of a parameter once a
step, before it is gathered, and its part of a gradient after it is reduced: collectives carry the narrow dtype.
`autopar simulate` calls bf16-mixed precision bf16 with master_copies.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import ArgumentError
from autopar.graph import CapturedModel


@dataclass(frozen=True, slots=True)
class Precision:
    """`compute`: dtype of the graph, of what collectives carry and of frozen parameters; `storage`: of trained ones."""

    compute: torch.dtype
    storage: torch.dtype

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.storage


SMALL = 1 << 16
"""Elements of a buffer that is copied with its values; flags, counters and schedules are smaller."""
PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16-mixed": Precision(torch.bfloat16, torch.float32),
    "fp32-mixed": Precision(torch.float32, torch.float64),
}


def has_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all floating parameters have `dtype` already (buffers then stay as the model wants them)."""
    return all(p.dtype == dtype for p in model.parameters() if p.is_floating_point())


def precision_of(model: nn.Module) -> str:
    """The precision that the model is in.

    Raises:
        ArgumentError: if its parameters are of several dtypes or of one that is no precision.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.get_default_dtype()}
    for name, precision in PRECISIONS.items():
        if dtypes == {precision.storage} and not precision.is_mixed:
            return name
    found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    raise ArgumentError(f"the model's parameters are {found}; give precision= one of {', '.join(PRECISIONS)}")


def computed_twin(model: nn.Module, precision: Precision) -> nn.Module:
    """A copy of the model, shapes only and ties kept, in the dtype of compute. Small buffers, on which forward may
    branch, keep their values.

    Mixed precision casts parameters alone, as FSDP2 does: buffers stay as the model has them, but for statistics of
    batch norm, which kernels want in the dtype of its weights.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        is_small = buffer.numel() <= SMALL
        memo[id(buffer)] = buffer.clone() if is_small else torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    if not precision.is_mixed:
        return twin.to(precision.compute)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.compute)
    for module in twin.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
            module.to(precision.compute)
    return twin


def stored_as(model: nn.Module, precision: Precision) -> nn.Module:
    """The model itself, which is in the dtype of compute, with trained parameters in that of storage."""
    for parameter in model.parameters():
        if precision.is_mixed and parameter.is_floating_point() and parameter.requires_grad:
            parameter.data = parameter.data.to(precision.storage)
    return model


def with_storage(captured: CapturedModel, precision: Precision) -> CapturedModel:
    """The model, captured in the dtype of compute, with trained parameters stored as the precision says."""
    if not precision.is_mixed:
        return captured
    parameters = tuple(
        replace(p, stored=precision.storage) if p.trainable and p.dtype == precision.compute else p
        for p in captured.parameters
    )
    return replace(captured, parameters=parameters)
