"""Does a choice of placements hold for a call? It is run whole and in two parts; results and gradients are compared.

The law of placements (design, section 2): of a value, Shard is a slice, Replicate the whole, Partial a summand; of a
gradient, Shard is a slice, Replicate a summand, Partial the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from autopar.rules.rule import Choice
from autopar.values.placement import PARTIAL, REPLICATE, Placement, Shard

Function = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]
SCALES = (1e-4, 1.0, 1e4)
"""Of summands, by turns: what clips what arrives shows at one of them. Their difference loses as many digits."""
EXACT = 1e-8
"""Tolerance up to which that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRun:
    """A call on operands, and what it makes of gradients of its results that arrive.

    graded: which operands have a gradient. gradients: of the operands, None for those that have none.
    """

    operands: tuple[Tensor, ...]
    graded: tuple[bool, ...]
    arriving: Gradients
    results: tuple[Tensor, ...]
    gradients: Gradients

    def made(self) -> Gradients:
        """All that the call made."""
        return (*self.results, *self.gradients)


def tensors_of(made: Any) -> tuple[Tensor, ...]:
    """The tensors that a call returns."""
    return (made,) if isinstance(made, Tensor) else tuple(part for part in made if isinstance(part, Tensor))


def is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def run(call: Function, given: Sequence[Tensor], graded: Sequence[bool], arriving: Sequence[Tensor | None]) -> ProofRun:
    """One run, which has operands of its own."""
    leaves = [x.detach().clone().requires_grad_(g and is_float(x)) for x, g in zip(given, graded, strict=True)]
    with torch.enable_grad(), torch.device("cpu"):
        results = tensors_of(call(*leaves))
    ends = [(r, g) for r, g in zip(results, arriving, strict=True) if r.requires_grad and g is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(
        torch.autograd.grad([r for r, _ in ends], wanted, [g for _, g in ends], allow_unused=True)
        if ends and wanted
        else [None] * len(wanted)
    )
    return ProofRun(
        operands=tuple(given),
        graded=tuple(graded),
        arriving=tuple(arriving),
        results=tuple(r.detach() for r in results),
        gradients=tuple(next(found) if leaf.requires_grad else None for leaf in leaves),
    )


class UnfitPartsError(Exception):
    """Parts of a call that do not fit together: the choice that cut them does not hold."""


def holds(
    call: Function, whole: ProofRun, choice: Choice, at: Fraction, tolerance: float, generator: torch.Generator
) -> bool:
    """Whether two parts of operands, cut at that fraction of each dim that is split, give what the whole does."""
    return not difference(call, whole, choice, at, tolerance, generator)


def difference(
    call: Function, whole: ProofRun, choice: Choice, at: Fraction, tolerance: float, generator: torch.Generator
) -> str:
    """What two parts make otherwise than the whole, "" for nothing."""

    def cut(values: Sequence[Tensor | None], placements: Sequence[Placement], summands: Placement) -> list[Any]:
        scales = SCALES if tolerance <= EXACT else (1.0,)
        scale = scales[int(torch.randint(len(scales), (), generator=generator))]
        noise = [scale if p == summands else 0.0 for p in placements]
        return [_cut(*x, at, generator) for x in zip(values, placements, noise, strict=True)]

    given = cut(whole.operands, choice.operands, PARTIAL)
    arriving = cut(whole.arriving, choice.results, REPLICATE)
    try:
        parts = [run(call, [p[k] for p in given], whole.graded, [p[k] for p in arriving]) for k in (0, 1)]
        results = _joined([p.results for p in parts], choice.results, PARTIAL, tolerance)
        gradients = _joined([p.gradients for p in parts], choice.operands, REPLICATE, tolerance)
    except Exception as error:  # on other shapes it does not run, or gives other shapes
        return f"parts do not run, or do not fit together ({str(error).splitlines()[0] if str(error) else error!r})"
    named = [f"result {i}" for i in range(len(results))] + [f"gradient of operand {i}" for i in range(len(gradients))]
    made = zip(named, whole.made(), (*results, *gradients), strict=True)
    return next((f"{name} differs" for name, a, b in made if not equal(a, b, tolerance)), "")


def _cut(value: Tensor | None, placement: Placement, scale: float, at: Fraction, generator: torch.Generator) -> Any:
    """Two slices, two summands of that scale, or the whole twice where it is 0."""
    if value is None:
        return None, None
    if isinstance(placement, Shard):
        size = value.shape[placement.dim]
        first = at * size
        if first.denominator != 1:
            raise UnfitPartsError(f"{size} is not cut at {at}")
        return value.narrow(placement.dim, 0, int(first)), value.narrow(placement.dim, int(first), size - int(first))
    if not scale or not is_float(value):
        return value, value
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    noise = (noise * scale * float(value.abs().max() if value.numel() else 1.0)).to(value.dtype)
    return noise, value - noise


def _joined(
    parts: Sequence[Gradients], placements: Sequence[Placement], summands: Placement, tolerance: float
) -> list[Tensor | None]:
    """Values of two parts put together.

    Raises:
        UnfitPartsError, RuntimeError: if they do not fit together.
    """
    out: list[Tensor | None] = []
    for one, two, placement in zip(*parts, placements, strict=True):
        if not isinstance(placement, Shard) and placement != summands:
            if not equal(one, two, tolerance):
                raise UnfitPartsError("parts that are the whole differ")
            out.append(one)
        elif one is None or two is None:
            out.append(one if two is None else two)
        elif isinstance(placement, Shard):
            out.append(torch.cat([one, two], placement.dim))
        else:
            if one.shape != two.shape or not is_float(one):
                raise UnfitPartsError("summands of two shapes")
            out.append(one + two)
    return out


def equal(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    """Within that much of the largest value, NaN being equal to NaN; no gradient is a gradient of zeros."""
    if one is None or other is None:
        rest = other if one is None else one
        return rest is None or not bool(rest.any())
    if one.shape != other.shape:
        return False
    if not is_float(one):
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return bool(torch.isclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True).all())
