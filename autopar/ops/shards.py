"""Which part of a dim is this rank's? What a body must know that treats its shard by its place in the whole."""

import torch
from torch import Tensor

from autopar.ops.groups import Axis, Groups, names_of
from autopar.values.placement import chunk_size


def own_range(size: int, axes: Axis, groups: Groups) -> tuple[int, int]:
    """`(start, length)` of this rank's true elements of a dim of `size`, split by `axes`, outermost first.

    Every chunk but the padding at the end is true; a rank that holds only padding has length 0.
    """
    start, padded, true = 0, size, size
    for axis in names_of(axes):
        padded = chunk_size(padded, groups.size(axis))
        offset = groups.index(axis) * padded
        start += offset
        true = max(0, min(true - offset, padded))
    return start, true


def own_slice(whole: Tensor, shards: tuple[tuple[str, int], ...], groups: Groups) -> Tensor:
    """This rank's shard of `whole`, its dims split by `(axis, dim)` from the outermost split on; zeros as padding."""
    for axis, dim in shards:
        chunk = chunk_size(whole.shape[dim], groups.size(axis))
        start = groups.index(axis) * chunk
        part = whole.narrow(dim, min(start, whole.shape[dim]), max(0, min(chunk, whole.shape[dim] - start)))
        if part.shape[dim] < chunk:
            padded = part.new_zeros((*part.shape[:dim], chunk, *part.shape[dim + 1 :]))
            padded.narrow(dim, 0, part.shape[dim]).copy_(part)
            part = padded
        whole = part
    return whole


def joined(chunks: tuple[Tensor, ...] | list[Tensor], dim: int, size: int | None) -> Tensor:
    """Equal chunks one after the other along `dim`, with padding beyond `size` left out: a tensor without gaps."""
    if size is not None:
        length = chunks[0].shape[dim]
        left = [max(0, min(length, size - k * length)) for k in range(len(chunks))]
        chunks = [chunk.narrow(dim, 0, true) for chunk, true in zip(chunks, left, strict=True)]
    return torch.cat(chunks, dim)


def in_mesh_order(axes: Axis, groups: Groups) -> tuple[str, ...]:
    """Axis names as the registry of groups knows them."""
    return tuple(sorted(names_of(axes), key=groups.mesh.names.index))


WIDE = {32: torch.float32, 64: torch.float64}


def widened(x: Tensor, bits: int | None) -> Tensor:
    """A gradient in floats of so many bits, in which it is to be summed; as it is for None."""
    return x if bits is None else x.to(WIDE[bits])
