"""Rows times one matrix of many, each row the matrix that its id names: a layer of a mixture of experts.

Rows go in and come out in the order of the tokens. The order of the experts, in which the products run, is each call's
own affair: in a graph it would be a permutation, which no rank could tell from its own tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autopar.ops.groups import Axis, active_groups
from autopar.ops.shards import own_range

ALIGNMENT = 16
"""Bytes to which torch's kernel wants rows aligned."""


def grouped_linear(
    x: Tensor, ids: Tensor, weight: Tensor, *, experts: Axis = (), num_experts: int | None = None
) -> Tensor:
    """`x[.., k or 1, d]`, `ids[.., k]`, `weight[e, d, n]` -> `[.., k, n]`: `x[.., j, :] @ weight[ids[.., j]]`.

    A row of `x[.., 1, d]` goes to all k experts of its token. `experts` (outermost split first) split `num_experts`
    matrices: rows of other ranks' are zero, so that the results are summands.
    """
    if experts:
        assert num_experts is not None
        start, _ = own_range(num_experts, experts, active_groups())
        ids = ids - start
    out: Tensor = _GroupedLinear.apply(x, ids, weight)  # type: ignore[no-untyped-call]
    return out


class _GroupedLinear(torch.autograd.Function):
    """Keeps `x` as it came, not once for each expert, and the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        order, ends = _by_expert(ids, weight.shape[0])
        of_x, _, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, order, ends, weight if of_x else None)
        ctx.shape, ctx.k = x.shape, ids.shape[-1]
        y = _products(_rows(x, order, ctx.k), weight, ends)
        return _in_place(y, order).view(*ids.shape, weight.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, order, ends, weight = ctx.saved_tensors
        given = gradients[0].reshape(-1, gradients[0].shape[-1])[order]
        of_x = of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = _outer_products(_rows(x, order, ctx.k), given, ends)
        if ctx.needs_input_grad[0]:
            given = _products(given, weight.transpose(1, 2), ends)
            of_x = _in_place(given, order).view(*ctx.shape[:-2], ctx.k, ctx.shape[-1])
            if ctx.shape[-2] != ctx.k:
                del given  # as large as what is summed
                of_x = of_x.sum(-2, keepdim=True)
        return of_x, None, of_weight


def _by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, those of no expert last, and where each expert's end (int32)."""
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, order = torch.sort(flat, stable=True)
    experts = torch.arange(num_experts, dtype=ordered.dtype, device=ordered.device)
    return order, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def _rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """A row for each of a token's experts, in `order`."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[order if x.shape[-2] == k else order // k]


def _in_place(rows: Tensor, order: Tensor) -> Tensor:
    """Rows that were taken in `order`, as they were before."""
    return torch.empty_like(rows).index_copy_(0, order, rows)


def _products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`rows[s, d]`, ordered, times their experts' matrices `weight[e, d, n]` -> `[s, n]`; rows of no expert are 0."""
    if torch.compiler.is_compiling():
        out: Tensor = _traced_products(rows, weight, ends)
        return out
    return _run_products(rows, weight, ends)


def _outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`left[s, d]`, `right[s, n]`, ordered -> the sum of each expert's outer products, `[e, d, n]`."""
    if torch.compiler.is_compiling():
        out: Tensor = _traced_outer_products(left, right, ends)
        return out
    return _run_outer_products(left, right, ends)


def _run_products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(rows, weight.shape[2]):
        out = F.grouped_mm(rows, weight, offs=ends)
        nobodys = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        return out.masked_fill_(nobodys.unsqueeze(-1), 0.0)  # the kernel does not write them
    out = rows.new_zeros((rows.shape[0], weight.shape[2]))
    if rows.device.type != "meta":
        for expert, (start, end) in enumerate(_spans(ends)):
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
    return out


def _run_outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(left, right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros((ends.shape[0], left.shape[1], right.shape[1]))
    if left.device.type != "meta":
        for expert, (start, end) in enumerate(_spans(ends)):
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
    return out


def _has_kernel(rows: Tensor, columns: int) -> bool:
    """Whether torch has one kernel for all experts (a GPU's, bfloat16, rows aligned)."""
    aligned = rows.shape[1] * rows.itemsize % ALIGNMENT == 0 and columns * rows.itemsize % ALIGNMENT == 0
    return rows.device.type == "cuda" and rows.dtype is torch.bfloat16 and aligned


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


@torch.library.custom_op("autopar::grouped_products", mutates_args=())
def _traced_products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`_products` of compiled code: how many rows an expert has is a value, which no tracer knows."""
    return _run_products(rows, weight, ends)


@_traced_products.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2]))


@torch.library.custom_op("autopar::grouped_outer_products", mutates_args=())
def _traced_outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`_outer_products` of compiled code."""
    return _run_outer_products(left, right, ends)


@_traced_outer_products.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty((ends.shape[0], left.shape[1], right.shape[1]))
