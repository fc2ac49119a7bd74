"""How does a collective stand in a compiled graph? As one custom op, which names its groups by a number.

A tracer can neither follow process groups nor read what a context binds. `bound` says beforehand which groups and draws
traced code is for: the groups' number is a constant of the graph, the draws are a tensor among its inputs. The op
`autopar::exchange` runs what eager code runs, so counts and typed errors are the same, and its gradient is again that
row of docs/theory.md. A compiler neither looks into the op nor drops or repeats one; which results backward makes again
is for the partitioner to say (`autopar.runtime.partition`).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.functional import exchanged
from autopar.ops.groups import BOUND, KNOWN, Axis, active_groups, is_functional, names_of
from autopar.values.placement import chunk_size

LOCALS: dict[str, Callable[..., Tensor]] = {}
_NUMBERS: dict[str, tuple[str, ...]] = {
    "gather": ("dim", "size"),
    "scatter_sum": ("dim", "bits"),
    "sum": ("bits",),
    "level_sum": ("num_inside", "bits"),
    "maximum": (),
    "share": (),
    "exchange": ("split_dim", "concat_dim", "size"),
    "slice": ("dim",),
    "place": ("dim", "size"),
}
"""Kinds of local functions and their numbers in the order that a description has them."""


def local(kind: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator: what `autopar::exchange` runs as `kind` is this `function(x, ..., axis, groups)`."""

    def known(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        LOCALS[kind] = function
        return function

    return known


def traceable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function(x, *, ...)` of autopar.ops.collectives; a tracer sees its row of `ROWS` instead."""
    row = ROWS[function.__name__]

    @wraps(function)
    def call(x: Tensor, **keywords: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            if not is_functional():
                return function(x, **keywords)
            keywords.pop("regather", None)  # what is kept for backward is for whoever traces to say
            axes_ = (*names_of(keywords.pop("axis")), *names_of(keywords.get("inside", ())))
            return exchanged(x, *row(x, **keywords), axes_, active_groups(), LOCALS)
        regather = keywords.pop("regather", False)
        axes = ",".join((*names_of(keywords.pop("axis")), *names_of(keywords.get("inside", ()))))
        there, back = row(x, **keywords)
        if there == "same":
            result: Tensor = _GradientOnly.apply(x, f"{back} {axes}", BOUND.number)  # type: ignore[no-untyped-call]
            return result
        out: Tensor = exchange(x, f"{there} {axes}", f"{back} {axes}", regather, BOUND.number)
        return out

    return call


class _GradientOnly(torch.autograd.Function):
    """Nothing now, an exchange of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: str, number: int) -> Tensor:
        ctx.back, ctx.number = back, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchange(gradient, ctx.back, "", False, ctx.number), None, None


class _GradientsOnly(torch.autograd.Function):
    """Nothing now, one exchange of all gradients, each padded to `parts` equal parts."""

    @staticmethod
    def forward(ctx: Any, back: str, number: int, parts: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.number, ctx.parts = back, number, parts
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows = [gradient.reshape(-1) for gradient in gradients]
        rows = [F.pad(row, [0, -row.numel() % ctx.parts]) for row in rows]
        flat = exchange(torch.cat(rows), ctx.back, "", False, ctx.number)
        found = torch.split(flat, [row.numel() for row in rows])
        sums = [f[: g.numel()].view(g.shape) for f, g in zip(found, gradients, strict=True)]
        return (None, None, None, *sums)


def reduced_together(values: Sequence[Tensor], axis: Axis, inside: Axis, bits: int | None) -> tuple[Tensor, ...]:
    """`all_reduce_gradient` of each value, as traced: their gradients are summed in one message."""
    groups = BOUND.groups
    assert groups is not None
    within = names_of(inside)
    kind = f"level_sum {len(within)}" if within else "sum"
    back = f"{kind} {_size(bits)} {','.join((*names_of(axis), *within))}"
    out: tuple[Tensor, ...] = _GradientsOnly.apply(back, BOUND.number, groups.size(within), *values)  # type: ignore[no-untyped-call]
    return out


def gathered_together(
    values: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[int | None],
    axis: Axis,
    backward: str,
    bits: int | None,
) -> tuple[Tensor, ...]:
    """`all_gather` of each value, as traced: flat, one row a rank, in one message; so is what backward scatters."""
    groups = BOUND.groups
    assert groups is not None
    n, axes = groups.size(axis), ",".join(names_of(axis))
    back = {"reduce_scatter": f"scatter_sum 0 {_size(bits)}", "slice": "slice 0"}[backward]
    row = torch.cat([value.reshape(-1) for value in values])
    rows = exchange(row, f"gather 0 all {axes}", f"{back} {axes}", False, BOUND.number).view(n, -1)
    out = []
    for part, value, dim, size in zip(rows.split([v.numel() for v in values], 1), values, dims, sizes, strict=True):
        shape = (*value.shape[:dim], n * value.shape[dim], *value.shape[dim + 1 :])
        whole = part.reshape(n, *value.shape).movedim(0, dim).reshape(shape)
        out.append(whole if size is None else whole.narrow(dim, 0, size))
    return tuple(out)


@torch.library.custom_op("autopar::exchange", mutates_args=())
def exchange(x: Tensor, there: str, back: str, regather: bool, number: int) -> Tensor:
    """`there` on x, with gradient `back`: the name of a local function, its numbers, and its axes."""
    kind, numbers, axes = _read(there)
    out: Tensor = LOCALS[kind](x, axis=axes, groups=KNOWN[number], **numbers).contiguous()
    # An op of a graph must not hand out what it was given, as a group of one rank does.
    return out.clone() if out.data_ptr() == x.data_ptr() else out


def _read(description: str) -> tuple[str, dict[str, int | None], tuple[str, ...]]:
    row, _, axes = description.rpartition(" ")
    return row.split(" ")[0], numbers_of(row), tuple(axes.split(","))


def numbers_of(row: str) -> dict[str, int | None]:
    """The numbers of a side of a row of `ROWS`, as keywords of its local function."""
    kind, *numbers = row.split(" ")
    values = [None if n == "all" else int(n) for n in numbers]
    return dict(zip(_NUMBERS.get(kind, ()), values, strict=True))


@exchange.register_fake
def _(x: Tensor, there: str, back: str, regather: bool, number: int) -> Tensor:
    kind, numbers, axes = _read(there)
    n, shape = KNOWN[number].size(axes), list(x.shape)
    dim, size, split, concat = (numbers.get(name) for name in ("dim", "size", "split_dim", "concat_dim"))
    if dim is not None:
        part, whole = chunk_size(shape[dim], n), shape[dim] * n if size is None else size
        shape[dim] = whole if kind in ("gather", "place") else part
    elif split is not None and concat is not None:
        whole = shape[concat] * n if size is None else size
        shape[split], shape[concat] = chunk_size(shape[split], n), whole
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.back, _, ctx.number = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    if not ctx.back.startswith("same"):
        gradient = exchange(gradient, ctx.back, "", False, ctx.number)
    return gradient, None, None, None, None


exchange.register_autograd(_backward, setup_context=_setup)


def _size(size: int | None) -> str:
    return "all" if size is None else str(size)


def _gather(
    x: Tensor, dim: int, size: int | None = None, backward: str = "reduce_scatter", bits: int | None = None
) -> tuple[str, str]:
    back = {"reduce_scatter": f"scatter_sum {dim} {_size(bits)}", "slice": f"slice {dim}"}[backward]
    return f"gather {dim} {_size(size)}", back


def _sum_back(x: Tensor, inside: Axis = (), bits: int | None = None) -> tuple[str, str]:
    kind = f"level_sum {len(names_of(inside))}" if inside else "sum"
    return "same", f"{kind} {_size(bits)}"


def _slice(x: Tensor, dim: int, backward: str = "pad") -> tuple[str, str]:
    size = x.shape[dim]
    return f"slice {dim}", {"pad": f"place {dim} {size}", "all_gather": f"gather {dim} {size}"}[backward]


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, size: int | None = None) -> tuple[str, str]:
    there = f"exchange {split_dim} {concat_dim} {_size(size)}"
    return there, f"exchange {concat_dim} {split_dim} {x.shape[split_dim]}"


ROWS: dict[str, Callable[..., tuple[str, str]]] = {
    "all_gather": _gather,
    "reduce_scatter": lambda x, dim: (f"scatter_sum {dim} all", f"gather {dim} {x.shape[dim]}"),
    "all_reduce": lambda x, backward="none": ("sum all", {"none": "same", "all_reduce": "sum all"}[backward]),
    "all_reduce_maximum": lambda x: ("maximum", "none"),
    "all_reduce_gradient": _sum_back,
    "divide_gradient": lambda x: ("same", "share"),
    "all_to_all": _all_to_all,
    "local_slice": _slice,
    "place_slice": lambda x, dim, size: (f"place {dim} {size}", f"slice {dim}"),
    "divide": lambda x, backward="none": ("share", {"none": "same", "divide": "share"}[backward]),
}
"""What each function does to a value and to its gradient."""
