"""What does a collective hold beside its operand and its result while it is on its way? Spans of bytes.

`autopar.ops.collectives` starts it at one moment and takes its result at another; between them it holds what the
backend reads, and chunks that are put in order before or after. The result is counted apart, from the start on.
`whole` are the bytes of the tensor that is gathered, scattered or exchanged, with the padding of what does not divide.

    reduce-scatter   what is sent, in order: a copy, or (along the first dim, unpadded) the operand itself, for as long
    all-gather       the part that is sent; at the end what came, out of order along a dim but the first
    all-to-all       what is sent, at the end what came, beside the result, and padding that the result leaves out
    slice            the whole, where it is padded
    all              what is padded is a copy until it has begun; what is gathered along the first dim keeps its padding
"""

from collections.abc import Iterator
from math import prod

from autopar.values.placement import Layout, Shard, chunk_size
from autopar.values.redistribution import Step

Span = tuple[int, int, int]
"""Bytes, first and last moment."""


def buffer_spans(kind: str, step: Step, source: int, given: int, whole: int, start: int, end: int) -> Iterator[Span]:
    """Spans of a step's collective `kind` of `source` bytes, which gives so many, between two moments."""
    in_order, padded = _is_in_order(step), _padded(source, whole)
    if kind == "reduce_scatter":
        yield whole, start + (in_order and not padded), end
        if not in_order:
            yield padded, start, start
    elif kind == "all_gather":
        yield source, start + 1, end
        if not in_order:
            yield whole, end, end
    elif kind == "all_to_all":
        yield whole + (whole - given), start, end
        yield padded, start, start


def keeps_padding(step: Step, *, backward: bool = False) -> bool:
    """Whether what a step gives, or the gradient that it gives back, is cut out of storage with padding where something
    does not divide: what is gathered along the first dim, a view of what came."""
    kind, gathered = (step.backward, step.after) if backward else (step.forward, step.before)
    return kind == "all_gather" and isinstance(gathered, Shard) and gathered.dim == 0


def buffer_nbytes(kind: str, step: Step, source: int, given: int, whole: int) -> int:
    """The most bytes at once of a step's collective `kind` of `source` bytes, which gives so many, that is waited for
    where it begins."""
    in_order, padded = _is_in_order(step), _padded(source, whole)
    if kind == "all_to_all":
        return whole + padded + (whole - given)  # what is sent is gone before what came is put in order
    if kind == "all_gather":
        return 0 if in_order else whole
    if kind == "reduce_scatter":
        return padded if in_order else whole + padded
    return padded if kind == "slice" else 0


def _is_in_order(step: Step) -> bool:
    """Whether chunks lie one after the other: along the first dim."""
    return [p.dim for p in (step.before, step.after) if isinstance(p, Shard)][:1] == [0]


def _padded(source: int, whole: int) -> int:
    """Bytes of the padded copy of what is sent."""
    return whole if whole != source else 0


def least_nbytes(nbytes: int, sizes: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> int:
    """Of a part of so many bytes with its padding: what the last rank, which stores no padding, stores."""
    for dim in layout.sharded_dims():
        n, size = prod(mesh[axis] for axis in layout.axes_of(dim)), sizes[dim]
        nbytes -= nbytes // chunk_size(size, n) * (n * chunk_size(size, n) - size)
    return nbytes
