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
from torch import Tensor, nn

from autopar.errors import ArgumentError, PlanFileError
from autopar.values.graph import CapturedModel


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


COMPLEX = {torch.float64: torch.complex128}
"""The complex dtype that goes with a floating one; complex64 with all others (bfloat16 has none)."""


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in `dtype`, a complex one in the complex dtype that goes with it, any other as it is."""
    return tensor.to(dtype_in(tensor.dtype, dtype))


def dtype_in(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What `own` is where floating tensors are in `dtype`."""
    if own.is_complex:
        return COMPLEX.get(dtype, torch.complex64)
    return dtype if own.is_floating_point else own


def model_in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself with all its tensors in `dtype`. (`model.to` would drop imaginary parts.)"""
    return model._apply(lambda tensor: in_dtype(tensor, dtype))  # type: ignore[no-untyped-call, no-any-return]


def has_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all floating and complex parameters have `dtype` already (buffers then stay as the model wants them)."""
    return all(p.dtype == dtype_in(p.dtype, dtype) for p in model.parameters())


def precision_of(model: nn.Module) -> str:
    """The precision that the model is in.

    Raises:
        ArgumentError: if its parameters are of several dtypes or of one that is no precision.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes:
        wide = any(p.dtype == torch.complex128 for p in model.parameters())
        dtypes = {torch.float64 if wide else torch.get_default_dtype()}
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
        twin_of = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        twin_of._backward_hooks = parameter._backward_hooks
        memo[id(parameter)] = twin_of
    for buffer in model.buffers():
        is_small = buffer.numel() <= SMALL
        memo[id(buffer)] = buffer.clone() if is_small else torch.empty_like(buffer, device="meta")
    twin = copy.deepcopy(model, memo)
    if not precision.is_mixed:
        return model_in_dtype(twin, precision.compute)
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


def computed_copy(model: nn.Module, precision: Precision) -> nn.Module:
    """A copy of a model that is `stored_as` the precision says, with all parameters in the dtype of compute."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = in_dtype(parameter.data, precision.compute)
    return made


def with_storage(captured: CapturedModel, precision: Precision) -> CapturedModel:
    """The model, captured in the dtype of compute, with trained parameters stored as the precision says."""
    if not precision.is_mixed:
        return captured
    if written := [p.names[0] for p in captured.parameters if p.mutated_by and p.trainable]:
        raise ArgumentError(
            f"forward writes the parameter {written[0]}, whose wider stored value mixed precision would lose; use "
            "precision fp32 or bf16"
        )
    parameters = tuple(
        replace(p, stored=precision.storage) if p.trainable and p.dtype == precision.compute else p
        for p in captured.parameters
    )
    return replace(captured, parameters=parameters)


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype of a name; where: its path in a file.

    Raises:
        PlanFileError: if torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanFileError(f"{where}: expected a dtype of torch, found {name[:60]!r}")
    return dtype
