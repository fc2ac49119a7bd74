"""On which operands is a call tried? Small shapes that it takes as its own, and values that it is defined on."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.rules.proof import Function, tensors_of
from autopar.rules.rule import Shapes

SMALL, SHORT = 2**13, 16
"""Elements of operands and results, and sizes of dims, up to which a call runs on its own shapes."""
LEAST = 2
"""What sizes are made smaller to, at the least: each other size to another."""
Domain = Callable[[tuple[int, ...], torch.Generator], Tensor]


def small_shapes(call: Function, shapes: Shapes, results: Shapes, dtypes: Sequence[torch.dtype]) -> Shapes:
    """Operands' shapes with large sizes exchanged for small ones, as long as the call takes them.

    Equal sizes stay equal, and multiples multiples where the call takes that; large sizes that are left are exchanged
    one by one. A call takes shapes if it gives tensors of as many dims on the meta device.
    """
    sizes = sorted({n for shape in shapes for n in shape})
    free = iter(n for n in range(LEAST, 4096) if n not in sizes)
    ranks, now, made = tuple(map(len, results)), shapes, results
    number = next(free)

    def take(small: Mapping[int, int]) -> bool:
        nonlocal now, made, number
        less = tuple(
            tuple(small.get(own, n) for own, n in zip(*pair, strict=True)) for pair in zip(shapes, now, strict=True)
        )
        try:
            given = [torch.empty(s, dtype=d, device="meta") for s, d in zip(less, dtypes, strict=True)]
            found = tuple(tuple(r.shape) for r in tensors_of(call(*given)))
        except Exception:  # it needs these very sizes
            return False
        if tuple(map(len, found)) == ranks:
            now, made, number = less, found, next(free)
        return now is less

    left: list[int] = []
    for family in _families([n for n in sizes if n > SHORT]):
        if not take({n: number * n // family[0] for n in family}):
            left += family
    for size in (*sorted(left, reverse=True), *reversed(sizes)):
        if size > LEAST and elements(now) + elements(made) > SMALL:
            take({size: number})
    return now


def _families(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes with those that are two, three or four times another, each family from its smallest."""
    families: list[list[int]] = []
    for size in sizes:
        known = next((f for f in families if any(size in (2 * n, 3 * n, 4 * n) for n in f)), None)
        if known is None or size % known[0]:
            families.append([size])
        else:
            known.append(size)
    return families


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)


def _tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of very different sizes, so that bounds are met in some places."""
    return _normal(shape, generator) * _normal(shape, generator).mul(3).exp()


def _definite(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Positive definite matrices, which a Cholesky decomposition takes."""
    x = _unit(shape, generator)
    square = len(shape) >= 2 and shape[-1] == shape[-2]
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64) if square else x


def _above(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 1.0 + 1.0 / _unit(shape, generator)


DOMAINS: tuple[Domain, ...] = (_normal, _tailed, _unit)
NARROW: tuple[Domain, ...] = (_above, _definite)
"""For calls that are defined on none of the others."""


def values(
    shape: tuple[int, ...], dtype: torch.dtype, domain: Domain, below: int, generator: torch.Generator
) -> Tensor:
    """Random values: floating ones of a domain, integers below a number, so that they are places in what they index."""
    if dtype.is_complex:
        return torch.complex(domain(shape, generator), domain(shape, generator)).to(dtype)
    if dtype.is_floating_point:
        return domain(shape, generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, below, shape, generator=generator).to(dtype)


def other_values(value: Tensor, domain: Domain, below: int, generator: torch.Generator) -> Tensor:
    """Values of the same kind, each another than it was."""
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point() or value.is_complex():
        return values(tuple(value.shape), value.dtype, domain, below, generator)
    return (value + 1) % below
