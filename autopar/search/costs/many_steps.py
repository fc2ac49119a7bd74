"""What do all steps between the layouts of a tensor take? `Pricer.step` for thousands of steps at once.

Which collective a step sends, along which axes, and whose elements it moves do not depend on the tensor, nor on how
long the axes are: that is found once (`Steps`), and filled with sizes as arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.costs.pricing import Pricer, total
from autopar.values.placement import Layout, Shard, is_even, local_shape
from autopar.values.redistribution import COLLECTIVES, SUMS, Step

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """Collectives of one kind along the same axes: of `steps`, on the way there or back.

    of: the layout whose elements are counted. dims: of all-to-alls, the dim that is split.
    """

    kind: str
    axes: tuple[int, ...]
    backward: bool
    steps: Ints
    of: Ints
    dims: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """`source[step]`, `target[step]`: numbers of layouts; flattened: steps over several axes, with the layout whose
    shards must divide."""

    layouts: tuple[Layout, ...]
    steps: tuple[Step, ...]
    source: Ints
    target: Ints
    sent: tuple[Sent, ...]
    flattened: Ints
    divided: Ints


def make_steps(layouts: tuple[Layout, ...], steps: Sequence[Step]) -> Steps:
    """The structure of steps between these layouts."""
    number = {layout: i for i, layout in enumerate(layouts)}
    groups: dict[tuple[str, tuple[int, ...], bool], list[tuple[int, int, int]]] = {}
    flat: list[tuple[int, int]] = []
    for i, step in enumerate(steps):
        sharded = number[step.source if isinstance(step.before, Shard) else step.target]
        if len(step.axes) > 1:
            flat.append((i, sharded))
        for backward, kind in enumerate((step.forward, step.backward)):
            if kind in COLLECTIVES:
                of = sharded if kind in ("all_gather", "reduce_scatter") else number[step.source]
                dim = step.after.dim if isinstance(step.after, Shard) else 0
                groups.setdefault((kind, step.axes, bool(backward)), []).append((i, of, dim))
    return Steps(
        layouts=layouts,
        steps=tuple(steps),
        source=np.array([number[step.source] for step in steps], dtype=np.int64),
        target=np.array([number[step.target] for step in steps], dtype=np.int64),
        sent=tuple(
            Sent(
                kind=kind,
                axes=axes,
                backward=backward,
                **dict(zip(("steps", "of", "dims"), _columns(rows), strict=True)),
            )
            for (kind, axes, backward), rows in groups.items()
        ),
        flattened=_columns(flat, 2)[0],
        divided=_columns(flat, 2)[1],
    )


def step_seconds(
    found: Steps, shape: tuple[int, ...], element_size: int, pricer: Pricer, parameter: bool, share: float = 1.0
) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Of each step of a tensor of this shape whether it is possible, and its seconds there and back.

    share: what part of a start counts.
    """
    mesh = pricer.mesh
    shapes = np.array([local_shape(shape, layout, mesh) for layout in found.layouts], dtype=np.int64)
    elements = shapes.reshape(len(found.layouts), len(shape)).prod(axis=1)
    seconds = np.zeros((2, len(found.steps)))
    for sent in found.sent:
        ranks = math.prod(mesh.shape[axis] for axis in sent.axes)
        if ranks == 1:
            continue
        moved = elements[sent.of]
        if sent.kind == "all_to_all":  # the dim that is split is padded to a chunk for every rank
            split = shapes[sent.of, sent.dims]
            moved = moved // split * (-(-split // ranks) * ranks)
        elif sent.kind != "all_reduce":  # as many chunks as ranks, of the sharded side
            moved = moved * ranks
        size = pricer.target.sum_size(element_size, parameter) if sent.backward and sent.kind in SUMS else element_size
        sizes, place = np.unique(moved * size, return_inverse=True)
        price = np.array([pricer.message(sent.kind, sent.axes, int(n), parameter, share)[0] for n in sizes])
        seconds[int(sent.backward), sent.steps] += price[place]
    if parameter and pricer.in_buckets:  # an all-reduce may go in levels
        for number in found.flattened.tolist():
            step = found.steps[number]
            if "all_reduce" in (step.forward, step.backward):
                pair = pricer.step(step, shape, element_size, True, share)
                seconds[:, number] = [total(side) for side in pair]
    possible = np.ones(len(found.steps), dtype=bool)
    even = np.array([is_even(shape, layout, mesh) for layout in found.layouts], dtype=bool)
    possible[found.flattened] = even[found.divided]
    return possible, seconds[0], seconds[1]


def _columns(rows: Sequence[tuple[int, ...]], width: int = 3) -> list[Ints]:
    return list(np.array(rows, dtype=np.int64).reshape(len(rows), width).T)
