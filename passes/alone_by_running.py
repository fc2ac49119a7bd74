"""Whether an op treats the samples of a batch alone, seen by running it on random numbers: whole, and on halves.

For ops without a sharding rule. Four samples are run, and two and two; the op does not see how many the graph has.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.rules.describe import result_values
from autopar.values.graph import operands

RUN, TRIALS = 4, 3
MOST_ELEMENTS = 1 << 22
"""Of all operands together; an op on more is taken to join samples, as running it would take too long."""


def runs_alone(
    node: fx.Node, args: Any, kwargs: dict[str, Any], dims: Sequence[int | None], batch: int
) -> tuple[int, ...] | None:
    """The dim of each result along which its samples are, None if the op joins them or cannot be run so.

    args, kwargs: what the op is called with. dims: of each operand, where `batch` samples are, None for nowhere.
    """
    target = node.target
    if not callable(target):
        return None
    sources = operands(node)
    shapes = [list(source.meta["val"].shape) for source in sources]
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is not None:
            shape[dim] = shape[dim] // batch * RUN
    if sum(map(math.prod, shapes)) > MOST_ELEMENTS:
        return None
    found: tuple[int, ...] | None = None
    for trial in range(TRIALS):
        generator = torch.Generator().manual_seed(trial)
        whole: dict[fx.Node, Tensor] = {}
        for source, shape in zip(sources, shapes, strict=True):
            whole.setdefault(source, _random(shape, source.meta["val"].dtype, generator))
        at = {source: dim for source, dim in zip(sources, dims, strict=True) if dim is not None}
        halves = [{s: _half(t, at.get(s), i) for s, t in whole.items()} for i in range(2)]
        try:
            all_of_them, *parts = (_run(target, args, kwargs, values) for values in (whole, *halves))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None  # it needs these very sizes, or values of its own kind
        dims_found = _joined_dims(all_of_them, parts, len(result_values(node)))
        if dims_found is None or (found is not None and dims_found != found):
            return None
        found = dims_found
    return found


def _random(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers in (0, 1), which all functions are defined on; indices of the first two places."""
    if dtype.is_floating_point or dtype.is_complex:
        return (0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _half(value: Tensor, dim: int | None, which: int) -> Tensor:
    return value if dim is None else value.chunk(2, dim)[which]


def _run(target: Callable[..., Any], args: Any, kwargs: Any, values: dict[fx.Node, Tensor]) -> tuple[Tensor, ...]:
    given, named = fx.node.map_arg((tuple(args), dict(kwargs)), values.__getitem__)
    result = target(*given, **named)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _joined_dims(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], num: int) -> tuple[int, ...] | None:
    """Along which dim the parts of each result make the whole."""
    if not len(whole) == len(parts[0]) == len(parts[1]) == num:
        return None
    found = []
    for value, *halves in zip(whole, *parts, strict=True):
        differ = [d for d in range(value.dim()) if value.shape[d] != halves[0].shape[d]]
        if len(differ) != 1 or halves[0].shape != halves[1].shape:
            return None
        both = torch.cat(list(halves), differ[0])
        if both.shape != value.shape or not torch.allclose(both, value, rtol=1e-4, atol=1e-6, equal_nan=True):
            return None
        found.append(differ[0])
    return tuple(found)
