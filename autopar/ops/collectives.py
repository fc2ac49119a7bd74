"""The collectives of a rewritten graph: each names its mesh axis and what autograd runs in the backward pass.

One function a row of the redistribution table (docs/theory.md). Dims that do not divide are padded before slice and
scatter; `size` is the true size to narrow to after a gather. A backend that fails (a rank died, a timeout) is a
`RankError` that names the collective and the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autopar.errors import RankError
from autopar.ops import regather as regathered
from autopar.ops.groups import Axis, Groups, active_groups, names_of
from autopar.ops.shards import joined, widened
from autopar.ops.traced import local, traceable
from autopar.values.placement import chunk_size

Local = Callable[[Tensor], Tensor]
Arrive = Callable[[], Tensor]
"""Waits for a collective that has begun, and gives its result."""

# torch 2.13 renames both and warns of the old names, which 2.11 has alone.
run_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
run_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Exchange(torch.autograd.Function):
    """Runs `forward` on the way there and `backward` on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Local, backward: Local) -> Tensor:
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(gradients[0]), None, None


def _apply(x: Tensor, forward: Local, backward: Local) -> Tensor:
    result: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def pad_dim(x: Tensor, dim: int, size: int) -> Tensor:
    """A parameter with zeros appended along `dim` up to `size`; autograd pads again where it would keep a copy."""
    whole = padded(x, dim, size)
    if whole is not x and not torch.compiler.is_compiling():
        regathered.register(whole, x, lambda t: padded(t, dim, size))
    return whole


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with zeros appended along `dim` up to `size`."""
    missing = size - x.shape[dim]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def send(
    kind: str,
    axis: Axis,
    nbytes: int,
    groups: Groups,
    call: Callable[[dist.ProcessGroup], Any],
    *,
    counted: bool = True,
) -> None:
    """Run one collective of the backend, or (not `counted`) wait for one that was started."""
    if counted:
        groups.count(kind, axis, nbytes)
    try:
        call(groups.group(axis))
    except RuntimeError as error:
        members = groups.members(axis)
        raise RankError(
            f"rank {members[groups.index(axis)]}: {kind} over axis {','.join(names_of(axis))} (ranks {members}) "
            f"failed: {error}; a rank of this group died or hangs, its own output says why"
        ) from error


def begin(
    kind: str, axis: Axis, nbytes: int, groups: Groups, call: Callable[[dist.ProcessGroup], Any]
) -> Callable[[], None]:
    """Begin a collective that `call` starts; the call that waits for it."""
    started: list[Any] = []
    send(kind, axis, nbytes, groups, lambda group: started.append(call(group)))

    def finish() -> None:
        send(kind, axis, 0, groups, lambda _: started.pop().wait(), counted=False)

    return finish


def begin_gather(x: Tensor, dim: int, axis: Axis, size: int | None, groups: Groups) -> Arrive:
    n = groups.size(axis)
    if n == 1:
        return lambda: x.view_as(x)
    if x.dtype == torch.bool:  # Gloo has no bool
        arrive_bytes = begin_gather(x.view(torch.uint8), dim, axis, size, groups)
        return lambda: arrive_bytes().view(torch.bool)
    own = x.contiguous()
    out = own.new_empty((n * own.shape[0], *own.shape[1:]))
    nbytes = out.numel() * out.element_size()
    finish = begin("all_gather", axis, nbytes, groups, lambda g: run_all_gather(out, own, group=g, async_op=True))

    def arrive() -> Tensor:
        finish()
        if dim:
            return joined(out.chunk(n), dim, size)
        return out if size is None else out.narrow(0, 0, size)

    return arrive


@local("gather")
def _gather(x: Tensor, dim: int, axis: Axis, size: int | None, groups: Groups) -> Tensor:
    return begin_gather(x, dim, axis, size, groups)()


def begin_scatter_sum(x: Tensor, dim: int, axis: Axis, groups: Groups, bits: int | None = None) -> Arrive:
    n = groups.size(axis)
    if n == 1:
        return lambda: x.view_as(x)
    dtype, whole = x.dtype, padded(widened(x, bits), dim, n * chunk_size(x.shape[dim], n))
    rows = (torch.cat(whole.chunk(n, dim)) if dim else whole).contiguous()
    out = rows.new_empty((rows.shape[0] // n, *rows.shape[1:]))
    nbytes = rows.numel() * rows.element_size()
    finish = begin(
        "reduce_scatter", axis, nbytes, groups, lambda g: run_reduce_scatter(out, rows, group=g, async_op=True)
    )
    return lambda: _after(finish, out, dtype)


@local("scatter_sum")
def _scatter_sum(x: Tensor, dim: int, axis: Axis, groups: Groups, bits: int | None = None) -> Tensor:
    return begin_scatter_sum(x, dim, axis, groups, bits)()


def begin_sum(x: Tensor, axis: Axis, groups: Groups, bits: int | None = None) -> Arrive:
    if groups.size(axis) == 1:
        return lambda: x.view_as(x)
    dtype, out = x.dtype, widened(x, bits)
    out = out.clone(memory_format=torch.contiguous_format) if out is x else out.contiguous()
    nbytes = out.numel() * out.element_size()
    finish = begin("all_reduce", axis, nbytes, groups, lambda g: dist.all_reduce(out, group=g, async_op=True))
    return lambda: _after(finish, out, dtype)


def _after(finish: Callable[[], None], out: Tensor, dtype: torch.dtype) -> Tensor:
    finish()
    return out.to(dtype)


@local("sum")
def _sum(x: Tensor, axis: Axis, groups: Groups, bits: int | None = None) -> Tensor:
    return begin_sum(x, axis, groups, bits)()


def begin_level_sums(flat: Tensor, axis: Axis, inside: Axis, groups: Groups) -> Callable[[], None]:
    """Begin to sum a flat tensor in place over `axis` and `inside`, level by level; the call that waits for the sums.

    A reduce-scatter over `inside`, an all-reduce of this rank's part over `axis`, an all-gather over `inside`: a slow
    `axis` carries each part once, not once a rank inside. The number of elements is a multiple of the ranks inside.
    """
    part = flat.view(groups.size(inside), -1)[groups.index(inside)]
    whole = flat.numel() * flat.element_size()
    scattered = begin(
        "reduce_scatter", inside, whole, groups, lambda g: run_reduce_scatter(part, flat, group=g, async_op=True)
    )

    def finish() -> None:
        scattered()
        nbytes = part.numel() * part.element_size()
        send("all_reduce", axis, nbytes, groups, lambda g: dist.all_reduce(part, group=g))
        send("all_gather", inside, whole, groups, lambda g: run_all_gather(flat, part, group=g))

    return finish


def in_parts(values: Sequence[Tensor], num_parts: int) -> tuple[Tensor, list[Tensor]]:
    """Values flat, one after the other, each padded to equal parts; and views of them in it."""
    sizes = [v.numel() for v in values]
    lengths = sizes if num_parts == 1 else [n + -n % num_parts for n in sizes]
    if are_flat := all(v.is_contiguous() for v in values):
        row = [v.view(-1) for v in values]
        if lengths != sizes:
            missing = [v.new_zeros(n - m) for v, n, m in zip(values, lengths, sizes, strict=True)]
            row = [t for pair in zip(row, missing, strict=True) for t in pair]
        flat = torch.cat(row)
    else:
        flat = values[0].new_zeros(sum(lengths))
    parts = list(torch.split_with_sizes(flat, lengths))
    if lengths != sizes:
        parts = [part[:n] for part, n in zip(parts, sizes, strict=True)]
    views = [part.view(v.shape) for part, v in zip(parts, values, strict=True)]
    if not are_flat:  # joined, each would first be copied flat, and all copies would be there at once
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
    return flat, views


@local("level_sum")
def _level_sum(x: Tensor, num_inside: int, axis: Axis, groups: Groups, bits: int | None = None) -> Tensor:
    """The sum over axes of which the last `num_inside` are inside."""
    names = names_of(axis)
    inside = names[len(names) - num_inside :]
    flat, (out,) = in_parts([widened(x, bits)], groups.size(inside))
    begin_level_sums(flat, names[: len(names) - num_inside], inside, groups)()
    return out.to(x.dtype)


@local("maximum")
def _maximum(x: Tensor, axis: Axis, groups: Groups) -> Tensor:
    if groups.size(axis) == 1:
        return x.view_as(x)
    out = x.clone(memory_format=torch.contiguous_format)
    nbytes = out.numel() * out.element_size()
    send("all_reduce", axis, nbytes, groups, lambda group: dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group))
    return out


@local("share")
def _share(x: Tensor, axis: Axis, groups: Groups) -> Tensor:
    n = groups.size(axis)
    return x.view_as(x) if n == 1 else x / n


def begin_exchange(x: Tensor, split_dim: int, concat_dim: int, axis: Axis, size: int | None, groups: Groups) -> Arrive:
    n = groups.size(axis)
    if n == 1:
        return lambda: x.view_as(x)
    if x.dtype == torch.bool:
        arrive_bytes = begin_exchange(x.view(torch.uint8), split_dim, concat_dim, axis, size, groups)
        return lambda: arrive_bytes().view(torch.bool)
    even = padded(x, split_dim, n * chunk_size(x.shape[split_dim], n))
    sent = torch.stack(even.chunk(n, split_dim)).contiguous()  # channels last stays channels last when stacked
    received = torch.empty_like(sent)
    nbytes = sent.numel() * sent.element_size()
    finish = begin(
        "all_to_all", axis, nbytes, groups, lambda g: dist.all_to_all_single(received, sent, group=g, async_op=True)
    )

    def arrive() -> Tensor:
        finish()
        return joined(received.unbind(), concat_dim, size)

    return arrive


@local("exchange")
def _exchange(x: Tensor, split_dim: int, concat_dim: int, axis: Axis, size: int | None, groups: Groups) -> Tensor:
    return begin_exchange(x, split_dim, concat_dim, axis, size, groups)()


@local("slice")
def cut(x: Tensor, dim: int, axis: Axis, groups: Groups) -> Tensor:
    """This rank's chunk of `x`, padded."""
    n = groups.size(axis)
    if n == 1:
        return x.view_as(x)
    chunk = chunk_size(x.shape[dim], n)
    part = padded(x, dim, n * chunk).narrow(dim, groups.index(axis) * chunk, chunk)
    return part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole alive


@local("place")
def _place(x: Tensor, dim: int, axis: Axis, size: int, groups: Groups) -> Tensor:
    """Zeros of `size` along `dim`, with this rank's chunk in its place (padding cut off)."""
    if groups.size(axis) == 1:
        return x.view_as(x)
    start = min(groups.index(axis) * x.shape[dim], size)
    length = min(x.shape[dim], size - start)
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, start, length).copy_(x.narrow(dim, 0, length))
    return out


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@traceable
def all_gather(
    x: Tensor,
    *,
    dim: int,
    axis: Axis,
    size: int | None = None,
    backward: str = "reduce_scatter",
    regather: bool = False,
    bits: int | None = None,
) -> Tensor:
    """Shard(dim) -> Replicate (backward="reduce_scatter", in floats of so many bits) or Invariant (backward="slice").

    With `regather` autograd does not keep the result for backward but gathers it again (`autopar.ops.regather`).
    """
    groups = active_groups()
    gradient: Local = {
        "reduce_scatter": lambda g: _scatter_sum(g, dim, axis, groups, bits),
        "slice": lambda g: cut(g, dim, axis, groups),
    }[backward]

    def gather(t: Tensor) -> Tensor:
        return _gather(t, dim, axis, size, groups)

    out = _apply(x, gather, gradient)
    if regather and groups.size(axis) > 1:
        regathered.register(out, x, gather)
    return out


@traceable
def reduce_scatter(x: Tensor, *, dim: int, axis: Axis) -> Tensor:
    """Partial -> Shard(dim); the backward pass gathers."""
    groups, size = active_groups(), x.shape[dim]
    return _apply(x, lambda t: _scatter_sum(t, dim, axis, groups), lambda g: _gather(g, dim, axis, size, groups))


@traceable
def all_reduce(x: Tensor, *, axis: Axis, backward: str = "none") -> Tensor:
    """Partial -> Invariant (backward="none") or Replicate (backward="all_reduce")."""
    groups = active_groups()
    gradient: Local = {"none": _same, "all_reduce": lambda g: _sum(g, axis, groups)}[backward]
    return _apply(x, lambda t: _sum(t, axis, groups), gradient)


def start_sum(x: Tensor, *, axis: Axis) -> Callable[[], Tensor]:
    """Begin to sum what needs no gradient; the call that waits for the sum."""
    if torch.compiler.is_compiling():
        total = all_reduce(x, axis=axis)
        return lambda: total
    return begin_sum(x, axis, active_groups())


@traceable
def all_reduce_maximum(x: Tensor, *, axis: Axis) -> Tensor:
    """The greatest of all ranks' values, element for element; for values that need no gradient."""
    return _maximum(x, axis, active_groups())


@traceable
def all_reduce_gradient(x: Tensor, *, axis: Axis, inside: Axis = (), bits: int | None = None) -> Tensor:
    """Invariant -> Replicate: backward sums the gradients, level by level with axes `inside`, in floats of `bits`."""
    groups = active_groups()
    if not inside:
        return _apply(x, _same, lambda g: _sum(g, axis, groups, bits))
    within = names_of(inside)
    return _apply(x, _same, lambda g: _level_sum(g, len(within), (*names_of(axis), *within), groups, bits))


@traceable
def divide_gradient(x: Tensor, *, axis: Axis) -> Tensor:
    """Replicate -> Invariant: nothing now, each rank keeps its share of the gradient."""
    groups = active_groups()
    return _apply(x, _same, lambda g: _share(g, axis, groups))


@traceable
def all_to_all(x: Tensor, *, split_dim: int, concat_dim: int, axis: Axis, size: int | None = None) -> Tensor:
    """Shard(concat_dim) -> Shard(split_dim); the backward pass is the reverse exchange."""
    groups, whole = active_groups(), x.shape[split_dim]
    return _apply(
        x,
        lambda t: _exchange(t, split_dim, concat_dim, axis, size, groups),
        lambda g: _exchange(g, concat_dim, split_dim, axis, whole, groups),
    )


@traceable
def local_slice(x: Tensor, *, dim: int, axis: Axis, backward: str = "pad") -> Tensor:
    """Replicate (backward="pad") or Invariant (backward="all_gather") -> Shard(dim): this rank's chunk."""
    groups, size = active_groups(), x.shape[dim]
    gradient: Local = {
        "pad": lambda g: _place(g, dim, axis, size, groups),
        "all_gather": lambda g: _gather(g, dim, axis, size, groups),
    }[backward]
    return _apply(x, lambda t: cut(t, dim, axis, groups), gradient)


@traceable
def place_slice(x: Tensor, *, dim: int, axis: Axis, size: int) -> Tensor:
    """Shard(dim) -> Partial: this rank's chunk among zeros; the backward pass slices."""
    groups = active_groups()
    return _apply(x, lambda t: _place(t, dim, axis, size, groups), lambda g: cut(g, dim, axis, groups))


@traceable
def divide(x: Tensor, *, axis: Axis, backward: str = "none") -> Tensor:
    """Invariant (backward="none") or Replicate (backward="divide") -> Partial: each rank takes an equal summand."""
    groups = active_groups()
    gradient: Local = {"none": _same, "divide": lambda g: _share(g, axis, groups)}[backward]
    return _apply(x, lambda t: _share(t, axis, groups), gradient)
