"""The collectives of a graph that others trace: torch's functional ones, which make_fx and its readers know by name.

Each is a row of `autopar.ops.traced.ROWS`: what it does to a value and to its gradient. What sends nothing is what
eager code runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.ops.groups import Axis, Groups, names_of
from autopar.ops.shards import joined, widened
from autopar.values.placement import chunk_size

_c10d = torch.ops._c10d_functional


def exchanged(x: Tensor, there: str, back: str, axes: Axis, groups: Groups, locals_: Any) -> Tensor:
    """A row on a value.

    Args:
        there, back: a kind and its numbers, as in `ROWS`.
        axes: the mesh axes that it joins.
        locals_: what eager code runs, by kind.
    """

    def run(description: str) -> Callable[[Tensor], Tensor]:
        kind, *numbers = description.split(" ")
        values = [None if n == "all" else int(n) for n in numbers]
        if kind in ("same", "none"):
            return lambda t: t.view_as(t)
        if groups.size(axes) == 1:
            return lambda t: t.view_as(t)
        if kind in SENT:
            return lambda t: SENT[kind](t, *values, axes=axes, groups=groups)
        named = {"slice": ("dim",), "place": ("dim", "size"), "share": ()}[kind]
        return lambda t: locals_[kind](t, axis=axes, groups=groups, **dict(zip(named, values, strict=True)))

    out: Tensor = _Exchanged.apply(x, run(there), run(back))  # type: ignore[no-untyped-call]
    return out


class _Exchanged(torch.autograd.Function):
    """Runs one way on the value, another on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _waited(value: Tensor) -> Tensor:
    out: Tensor = _c10d.wait_tensor(value)
    return out


def _gather(x: Tensor, dim: int, size: int | None, *, axes: Axis, groups: Groups) -> Tensor:
    if x.dtype == torch.bool:
        return _gather(x.view(torch.uint8), dim, size, axes=axes, groups=groups).view(torch.bool)
    n = groups.size(axes)
    out = _waited(_c10d.all_gather_into_tensor(x.contiguous(), n, groups.group(axes).group_name))
    if dim:
        return joined(out.chunk(n), dim, size)
    return out if size is None else out.narrow(0, 0, size)


def _scatter_sum(x: Tensor, dim: int, bits: int | None, *, axes: Axis, groups: Groups) -> Tensor:
    n, wide = groups.size(axes), widened(x, bits)
    missing = n * chunk_size(x.shape[dim], n) - x.shape[dim]
    if missing:
        wide = torch.nn.functional.pad(wide, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
    rows = (torch.cat(wide.chunk(n, dim)) if dim else wide).contiguous()
    return _waited(_c10d.reduce_scatter_tensor(rows, "sum", n, groups.group(axes).group_name)).to(x.dtype)


def _sum(x: Tensor, bits: int | None, *, axes: Axis, groups: Groups) -> Tensor:
    return _waited(_c10d.all_reduce(widened(x, bits).contiguous(), "sum", groups.group(axes).group_name)).to(x.dtype)


def _level_sum(x: Tensor, num_inside: int, bits: int | None, *, axes: Axis, groups: Groups) -> Tensor:
    names = names_of(axes)
    cut = len(names) - num_inside
    for level in (names[cut:], names[:cut]):
        x = _sum(x, bits, axes=level, groups=groups)
    return x


def _maximum(x: Tensor, *, axes: Axis, groups: Groups) -> Tensor:
    return _waited(_c10d.all_reduce(x.contiguous(), "max", groups.group(axes).group_name))


def _exchange(x: Tensor, split_dim: int, concat_dim: int, size: int | None, *, axes: Axis, groups: Groups) -> Tensor:
    n = groups.size(axes)
    missing = n * chunk_size(x.shape[split_dim], n) - x.shape[split_dim]
    even = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - split_dim) + [0, missing]) if missing else x
    sent = torch.stack(even.chunk(n, split_dim)).contiguous()
    came = _waited(_c10d.all_to_all_single(sent, [1] * n, [1] * n, groups.group(axes).group_name))
    return joined(came.unbind(), concat_dim, size)


SENT: dict[str, Callable[..., Tensor]] = {
    "gather": _gather,
    "scatter_sum": _scatter_sum,
    "sum": _sum,
    "level_sum": _level_sum,
    "maximum": _maximum,
    "exchange": _exchange,
}
"""What is sent for each kind of a row."""
