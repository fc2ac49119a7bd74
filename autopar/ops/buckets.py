"""Collectives of several parameters in one message: what each would send alone, flat, one after the other.

A gather's operand is all chunks of this rank, its result one such row a rank; gradients are scattered from rows and
reduced in place. Every value is copied once on its way in or out; gradients that were reduced are views of the flat
buffer. Gradients of one backward node are all there before it runs, so a bucket goes out when its last one appears.

Under `use_sink` gradients of parameters themselves do not go back through autograd: the sink is told how to finish and
receives them there, so that backward goes on while they travel. An all-reduce is finished when backward ends; what a
reduce-scatter reads must not outlive the next one, which finishes it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.ops import collectives
from autopar.ops.collectives import begin, begin_level_sums, cut, in_parts, padded
from autopar.ops.groups import Axis, Groups, active_groups
from autopar.ops.recompute import Slot, again, slot_of
from autopar.ops.shards import joined, widened
from autopar.ops.traced import gathered_together, reduced_together
from autopar.values.placement import chunk_size

Finish = Callable[[], None]


class Sink(Protocol):
    """Takes gradients by placeholder. told: where the waits for what is only told go, None to wait at once."""

    told: list[Finish] | None

    def make_room(self) -> None:
        """Finish what holds memory until it is finished."""

    def later(self, finish: Finish, *, holds: bool) -> None:
        """Call `finish` when backward ends, or, if it `holds` memory until then, when room is to be made."""

    def add(self, placeholder: str, gradient: Tensor) -> None:
        """Add to a parameter's gradient."""


_sink: ContextVar[Sink | None] = ContextVar("autopar_sink", default=None)


@contextmanager
def use_sink(sink: Sink | None) -> Iterator[None]:
    """Hand the gradients of buckets of the calls inside to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


Ahead = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Back = Callable[[list[int], Sequence[Tensor]], tuple[Sequence[Tensor], Finish]]
"""Which results have gradients, and these -> those of operands, when finished."""


class _Bucket(torch.autograd.Function):
    """Several values at once. holds: backward holds a buffer until it is finished. names: of the parameters that
    operands are, if they are parameters themselves."""

    @staticmethod
    def forward(
        ctx: Any, ahead: Ahead, back: Back, holds: bool, names: tuple[str, ...], *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.holds, ctx.names, ctx.sink = back, holds, names, _sink.get()
        ctx.set_materialize_grads(False)
        return tuple(ahead(values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        places = [i for i, g in enumerate(gradients) if g is not None]
        out: list[Tensor | None] = [None] * len(gradients)
        if places:
            names, sink = ctx.names, ctx.sink
            if sink is not None and ctx.holds:
                sink.make_room()
            found, finish = ctx.back(places, [g for g in gradients if g is not None])
            if sink is None or not names:
                finish()
                for place, gradient in zip(places, found, strict=True):
                    out[place] = gradient
            else:

                def deliver() -> None:
                    finish()
                    for place, gradient in zip(places, found, strict=True):
                        sink.add(names[place], gradient)

                sink.later(deliver, holds=ctx.holds)
        return (None, None, None, None, *out)


def all_gather_bucket(
    *values: Tensor,
    dims: tuple[int, ...],
    sizes: tuple[int | None, ...],
    axis: Axis,
    backward: str = "reduce_scatter",
    regather: bool = False,
    names: tuple[str, ...] = (),
    bits: int | None = None,
    begun: "Prefetched | None" = None,
) -> tuple[Tensor, ...]:
    """`all_gather` of each value along its dim, narrowed to its size, in one message; so is what backward scatters.

    With `regather` backward gathers the bucket again, once, when it first needs one of the results. begun: the message,
    on its way.
    """
    keywords: dict[str, Any] = {"dims": dims, "sizes": sizes, "axis": axis, "backward": backward, "names": names}
    keywords |= {"bits": bits, "begun": begun}
    if not regather:
        return _gathered(*values, **keywords)
    out = tuple(again(_gathered, *values, **keywords))
    if begun is not None:
        begun.results = [weakref.ref(slot) for value in out if (slot := slot_of(value)) is not None]
    return out


class Prefetched:
    """The message of a bucket, begun before it is read; gathered again it begins when the bucket after it is there.

    before: the bucket that was gathered before. results: what backward may ask for.
    """

    def __init__(self, values: Sequence[Tensor], axis: Axis, before: "Prefetched | None") -> None:
        self.values, self.axis, self.groups, self.before = values, axis, active_groups(), before
        self.results: list[weakref.ref[Slot]] = []
        self.is_again = False
        self.arrive: Callable[[], Tensor] | None = None
        self.begin()

    def begin(self) -> None:
        """Send it, if it is not on its way."""
        if self.arrive is None:
            self.arrive = _begin_rows([value.detach() for value in self.values], self.axis, self.groups)

    def rows(self) -> Tensor:
        """What came, once it is there."""
        self.begin()
        assert self.arrive is not None
        arrive, self.arrive = self.arrive, None
        return arrive()

    def go_on(self) -> None:
        """Once it is there: in backward the next begins."""
        other = self.before if self.is_again else None
        while other is not None and not other.is_awaited:
            other = other.before
        if other is not None:
            other.begin()
        self.is_again = True

    @property
    def is_awaited(self) -> bool:
        """Whether backward has still to gather it."""
        return any((slot := result()) is not None and slot.tensor is None for result in self.results)


def prefetched(*values: Tensor, axis: Axis, before: Prefetched | None = None) -> Prefetched:
    """Begin the gather of a bucket of these values."""
    return Prefetched(values, axis, before)


def _gathered(
    *values: Tensor,
    dims: tuple[int, ...],
    sizes: tuple[int | None, ...],
    axis: Axis,
    backward: str,
    names: tuple[str, ...],
    bits: int | None,
    begun: Prefetched | None,
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return gathered_together(values, dims, sizes, axis, backward, bits)
    groups = active_groups()

    def ahead(parts: Sequence[Tensor]) -> list[Tensor]:
        if begun is None:
            return _apart(_begin_rows(parts, axis, groups)(), parts, dims, sizes)
        out = _apart(begun.rows(), parts, dims, sizes)
        begun.go_on()
        return out

    def scattered(places: list[int], gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Finish]:
        return _scatter_sums([widened(g, bits) for g in gradients], [dims[i] for i in places], axis, groups)

    def sliced(places: list[int], gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Finish]:
        return [cut(g, dims[i], axis, groups) for i, g in zip(places, gradients, strict=True)], _nothing

    back = {"reduce_scatter": scattered, "slice": sliced}[backward]
    out: tuple[Tensor, ...] = _Bucket.apply(ahead, back, backward == "reduce_scatter", names, *values)  # type: ignore[no-untyped-call]
    return out


def all_reduce_gradient_bucket(
    *values: Tensor,
    axis: Axis,
    inside: Axis = (),
    names: tuple[str, ...] = (),
    bits: int | None = None,
) -> tuple[Tensor, ...]:
    """`all_reduce_gradient` of each value: nothing now, the gradients are summed in one message in backward."""
    if torch.compiler.is_compiling():
        return reduced_together(values, axis, inside, bits)
    groups = active_groups()

    def back(places: list[int], gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Finish]:
        flat, found = in_parts([widened(g, bits) for g in gradients], groups.size(inside))
        if inside:
            arrived = begin_level_sums(flat, axis, inside, groups)
        else:
            nbytes = flat.numel() * flat.element_size()
            arrived = begin("all_reduce", axis, nbytes, groups, lambda g: dist.all_reduce(flat, group=g, async_op=True))
        return found, arrived

    out: tuple[Tensor, ...] = _Bucket.apply(_same, back, False, names, *values)  # type: ignore[no-untyped-call]
    return out


def all_reduce_told(x: Tensor, *, axis: Axis) -> Tensor:
    """`all_reduce` without a backward pass of what nothing reads before the step is over.

    Under a sink that is told things it is waited for when the step ends; until then the result may be a summand.
    """
    sink, groups = _sink.get(), active_groups()
    if sink is None or sink.told is None or groups.size(axis) == 1:
        return collectives.all_reduce(x, axis=axis)
    result = x.clone(memory_format=torch.contiguous_format)
    there = result.detach()
    nbytes = there.numel() * there.element_size()
    sink.told.append(
        begin("all_reduce", axis, nbytes, groups, lambda g: dist.all_reduce(there, group=g, async_op=True))
    )
    return result


def _begin_rows(parts: Sequence[Tensor], axis: Axis, groups: Groups) -> Callable[[], Tensor]:
    """Begin to gather parts, flat, one after the other; what waits for the rows of all ranks."""
    row = torch.cat([part.reshape(-1) for part in parts])
    rows = row.new_empty((groups.size(axis), row.numel()))
    nbytes = rows.numel() * rows.element_size()
    finish = begin(
        "all_gather",
        axis,
        nbytes,
        groups,
        lambda group: collectives.run_all_gather(rows.view(-1), row, group=group, async_op=True),
    )

    def arrive() -> Tensor:
        finish()
        return rows

    return arrive


def _apart(rows: Tensor, parts: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int | None]) -> list[Tensor]:
    n = len(rows)
    out = []
    for column, part, dim, size in zip(rows.split_with_sizes(_lengths(parts), 1), parts, dims, sizes, strict=True):
        if dim:
            out.append(joined(column.view(n, *part.shape).unbind(), dim, size))
            continue
        whole = column.reshape(n * part.shape[0], *part.shape[1:])
        if part.shape[0] == 1:  # there was nothing to reorder: it would hold all the rows
            whole = whole.clone(memory_format=torch.contiguous_format)
        out.append(whole if size is None else whole.narrow(0, 0, size))
    return out


def _scatter_sums(
    wholes: Sequence[Tensor], dims: Sequence[int], axis: Axis, groups: Groups
) -> tuple[Sequence[Tensor], Finish]:
    """Sums of gradients, each rank's chunks."""
    n = groups.size(axis)
    even = [padded(g, dim, n * chunk_size(g.shape[dim], n)) for g, dim in zip(wholes, dims, strict=True)]
    lengths = [length // n for length in _lengths(even)]
    if not any(dims) and all(g.is_contiguous() for g in even):
        rows = torch.cat([g.view(n, -1) for g in even], 1)
    else:
        rows = wholes[0].new_empty((n, sum(lengths)))
        for g, dim, column in zip(even, dims, rows.split_with_sizes(lengths, 1), strict=True):
            chunks = _rows_of(g, dim, n)
            column.view(chunks.shape).copy_(chunks)
    row = rows.new_empty(rows.shape[1])
    out = [
        own.view(*g.shape[:dim], g.shape[dim] // n, *g.shape[dim + 1 :])
        for own, g, dim in zip(row.split_with_sizes(lengths), even, dims, strict=True)
    ]
    nbytes = rows.numel() * rows.element_size()
    finish = begin(
        "reduce_scatter",
        axis,
        nbytes,
        groups,
        lambda g: collectives.run_reduce_scatter(row, rows.view(-1), group=g, async_op=True),
    )
    return out, finish


def _lengths(parts: Sequence[Tensor]) -> list[int]:
    return [part.numel() for part in parts]


def _rows_of(whole: Tensor, dim: int, n: int) -> Tensor:
    """The chunks along `dim` side by side, as a view: (n, ...)."""
    return whole.view(*whole.shape[:dim], n, whole.shape[dim] // n, *whole.shape[dim + 1 :]).movedim(dim, 0)


def _same(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.view_as(value) for value in values]


def _nothing() -> None:
    """Nothing was sent."""
