"""Where do two runs of the same steps part? The largest relative difference of losses, gradients and state.

Relative to the tensor's largest entry, for gradients with a floor of a part (`floor_of`) of the model's largest
gradient entry: a gradient that is zero in truth (a key's bias under softmax) is rounding on both sides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.oracle.steps import TrainedStep

FLOOR = 1e-5
"""Smaller than this part of the largest gradient entry, what is zero in truth (a bias before batch norm over an image)
misses by rounding in fp64. Half of it would do; at a fifth two of 630 models are called wrong."""

FLOORS = {torch.float64: FLOOR, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""The same by what is computed in, narrower dtypes rounding earlier: of the largest entry 2e-5 is explained in fp32
with a tolerance of 2e-3, some 170 roundings. At a tenth biases before batch norm pass, at a hundredth some fail."""


def floor_of(dtypes: Iterable[torch.dtype]) -> float:
    """The floor where parameters are computed on in these dtypes: that of the narrowest."""
    return max((FLOORS[dtype] for dtype in dtypes if dtype in FLOORS), default=FLOOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """How far two runs are apart. kind: `loss`, `gradient` or `state`; name: of the tensor; step: from 1 on.

    found, wanted: the two losses, or the norms of the two tensors.
    """

    kind: str
    name: str
    step: int
    error: float
    found: float
    wanted: float

    def __str__(self) -> str:
        of = {"loss": "the loss", "gradient": f"the gradient of {self.name}", "state": f"{self.name} after the step"}
        norm = "" if self.kind == "loss" else "of norm "
        return (
            f"{of[self.kind]} is {norm}{self.wanted:.6g} in the module and {norm}{self.found:.6g} in the graph, "
            f"{self.error:.1e} apart (relative) in call {self.step}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest relative differences that rounding explains."""

    loss: float
    gradient: float

    def of(self, difference: StepDifference) -> float:
        return self.loss if difference.kind == "loss" else self.gradient


def compare_steps(
    found: Sequence[TrainedStep], wanted: Sequence[TrainedStep], floor: float = FLOOR
) -> list[StepDifference]:
    """Of each kind the largest difference of the first step, then of the next, of error 0 where there is none.

    floor: of gradients, a part of the largest entry of any.
    """
    differences = []
    for number, (own, other) in enumerate(zip(found, wanted, strict=True), 1):
        largest = max((_largest(g) for g in other.gradients.values()), default=0.0)
        differences.append(_difference("loss", "", number, own.loss, other.loss, 0.0))
        differences += _worst("gradient", number, own.gradients, other.gradients, floor * largest)
        differences += _worst("state", number, own.state, other.state, 0.0)
    return differences


def first_beyond(differences: Sequence[StepDifference], tolerance: Tolerance) -> StepDifference | None:
    """The first difference that rounding does not explain; not a number never is explained."""
    return next((d for d in differences if not d.error <= tolerance.of(d)), None)


def relative_error(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Largest difference of entries over the largest entry (or `floor`); infinite if shapes differ, and what is not a
    number on both sides is equal."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    own, other = _wide(found), _wide(wanted)
    apart = torch.where((own == other) | (own.isnan() & other.isnan()), 0.0, (own - other).abs())
    error = float(apart.max())
    return error / max(_largest(other), floor, 1e-300) if error else 0.0


def _worst(
    kind: str, number: int, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], floor: float
) -> list[StepDifference]:
    all_of = [_difference(kind, name, number, found[name], wanted[name], floor) for name in wanted]
    return [max(all_of, key=lambda d: (d.error != d.error, d.error))] if all_of else []


def _difference(kind: str, name: str, step: int, found: Tensor, wanted: Tensor, floor: float) -> StepDifference:
    return StepDifference(
        kind=kind,
        name=name,
        step=step,
        error=relative_error(found, wanted, floor),
        found=_size(kind, found),
        wanted=_size(kind, wanted),
    )


def _largest(tensor: Tensor) -> float:
    return float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _size(kind: str, tensor: Tensor) -> float:
    return float(tensor) if kind == "loss" else float(_wide(tensor).abs().norm())
