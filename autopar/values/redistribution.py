"""Which collectives turn one layout of a tensor into another, forward and backward, and what they send?

One step changes one mesh axis, or several at once where one collective over the flattened group does the same (all
25 pairs of placements: docs/theory.md). `route` chains steps along the cheapest way for a given weight; without one it
minimises bytes on the wire, so that passes need no cost model.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.values.mesh import Mesh
from autopar.values.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    is_even,
    local_shape,
)

# (from, to) -> (forward, backward), "" where nothing is computed; design section 2. Shard to Shard stands beside it.
TABLE: dict[tuple[type, type], tuple[str, str]] = {
    (Invariant, Replicate): ("", "all_reduce"),
    (Replicate, Invariant): ("", "divide"),
    (Shard, Replicate): ("all_gather", "reduce_scatter"),
    (Shard, Invariant): ("all_gather", "slice"),
    (Shard, Partial): ("pad", "slice"),
    (Replicate, Shard): ("slice", "pad"),
    (Invariant, Shard): ("slice", "all_gather"),
    (Partial, Shard): ("reduce_scatter", "all_gather"),
    (Partial, Replicate): ("all_reduce", "all_reduce"),
    (Partial, Invariant): ("all_reduce", ""),
    (Invariant, Partial): ("divide", ""),
    (Replicate, Partial): ("divide", "divide"),
    (Shard, Shard): ("all_to_all", "all_to_all"),
}
SUMS = ("reduce_scatter", "all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of layout over `axes` (ascending mesh axes, flattened if several).

    inside: some of the axes, over which the all-reduce of gradients goes level by level (`in_levels`).
    """

    source: Layout
    target: Layout
    axes: tuple[int, ...]
    forward: str
    backward: str
    inside: tuple[int, ...] = ()

    @property
    def before(self) -> Placement:
        return self.source.axes[self.axes[0]]

    @property
    def after(self) -> Placement:
        return self.target.axes[self.axes[0]]

    def among(self, mesh: Mesh) -> "Step":
        """The step with what it computes: nothing among one rank."""
        is_alone = all(mesh.shape[axis] == 1 for axis in self.axes)
        return replace(self, forward="", backward="") if is_alone else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective: `nbytes` is its full tensor (gather's result, reduce-scatter's operand, all-reduce's and
    all-to-all's tensor) on one rank, padding included. early: begun before the first call (`passes.start_early`)."""

    kind: str
    axes: tuple[int, ...]
    nbytes: int
    early: bool = False


def single_step(source: Layout, axis: int, after: Placement) -> Step | None:
    """The step that changes `axis` alone, or None where one collective cannot: the axis is not the innermost split."""
    before = source.axes[axis]
    if before == after or not source.is_innermost(axis):
        return None
    forward, backward = TABLE[type(before), type(after)]
    return Step(source=source, target=source.replace(axis, after), axes=(axis,), forward=forward, backward=backward)


@lru_cache(maxsize=1 << 16)
def steps_from(source: Layout, rank: int, needs_gradient: bool) -> tuple[Step, ...]:
    """All single steps and flattened steps out of `source` for a tensor with `rank` dims."""
    whole: tuple[Placement, ...] = (REPLICATE, INVARIANT, PARTIAL) if needs_gradient else (REPLICATE, PARTIAL)
    goals: list[Placement] = [*whole, *(Shard(d) for d in range(rank))]
    out: list[Step] = []
    num_axes = len(source.axes)
    for axis in range(num_axes):
        for goal in goals:
            step = single_step(source, axis, goal)
            if step is not None:
                out.append(step)
    for count in range(2, num_axes + 1):
        for axes in itertools.combinations(range(num_axes), count):
            if len({source.axes[a] for a in axes}) == 1:
                out.extend(step for goal in goals if (step := flattened_step(source, axes, goal)) is not None)
    return tuple(out)


def flattened_step(source: Layout, axes: tuple[int, ...], after: Placement) -> Step | None:
    """The step that changes several axes of equal placement at once, or None where one collective cannot.

    A flattened group numbers its members row-major in mesh order, so shards gathered or scattered by it must be nested
    in mesh order and be the innermost splits of their dim.
    """
    before = source.axes[axes[0]]
    if before == after or (isinstance(before, Shard) and isinstance(after, Shard)):
        return None
    if isinstance(before, Shard) and source.axes_of(before.dim)[-len(axes) :] != axes:
        return None
    target = source
    for axis in reversed(axes) if isinstance(before, Shard) else axes:
        target = target.replace(axis, after)
    forward, backward = TABLE[type(before), type(after)]
    return Step(source=source, target=target, axes=axes, forward=forward, backward=backward)


def is_possible(step: Step, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Flattened shards must divide: nested padding is not the padding of one flat split."""
    if len(step.axes) == 1:
        return True
    sharded = step.source if isinstance(step.before, Shard) else step.target
    return is_even(shape, sharded, mesh)


@lru_cache(maxsize=1 << 16)
def messages(
    step: Step, shape: tuple[int, ...], element_size: int, mesh: Mesh, sum_size: int | None = None
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What the step sends in the forward and in the backward pass (each none or one message, or one a level).

    sum_size: bytes of an element of gradients that are summed, if they are not element_size.
    """
    source = local_shape(shape, step.source, mesh)
    target = local_shape(shape, step.target, mesh)
    n = math.prod(mesh.shape[a] for a in step.axes)
    if n == 1:
        return (), ()
    sent: list[tuple[Message, ...]] = []
    for is_back, kind in enumerate((step.forward, step.backward)):
        if kind not in COLLECTIVES:
            sent.append(())
            continue
        size = sum_size or element_size if is_back and kind in SUMS else element_size
        if step.inside:
            sent.append(level_messages(step.inside, step.axes, math.prod(source) * size, size, mesh))
            continue
        if kind == "all_to_all":
            elements = _all_to_all_elements(step, source, n, forward=not sent)
        elif kind == "all_reduce":
            elements = math.prod(source)
        else:  # gather and scatter: n chunks of the sharded side
            elements = n * math.prod(source if isinstance(step.before, Shard) else target)
        sent.append((Message(kind=kind, axes=step.axes, nbytes=elements * size),))
    return sent[0], sent[1]


def in_levels(step: Step, inside: tuple[int, ...]) -> Step:
    """The step with its all-reduce of gradients level by level: a reduce-scatter over the axes `inside`, an all-reduce
    of the part over the others, an all-gather over `inside`.

    Raises:
        ValueError: if the step reduces no gradients over those axes and others.
    """
    if (step.forward, step.backward) != ("", "all_reduce") or not inside or not set(inside) < set(step.axes):
        raise ValueError(f"step from {step.source} to {step.target} reduces no gradients inside axes {inside} first")
    return replace(step, inside=inside)


def levels_of(step: Step, mesh: Mesh) -> Iterator[Step]:
    """The step in all the levels that it can go in."""
    axes = [a for a in step.axes if mesh.shape[a] > 1]
    if (step.forward, step.backward) == ("", "all_reduce") and len(axes) == len(step.axes):
        for count in range(1, len(axes)):
            yield from (in_levels(step, inside) for inside in itertools.combinations(axes, count))


def level_messages(
    inside: tuple[int, ...], axes: tuple[int, ...], nbytes: int, element_size: int, mesh: Mesh
) -> tuple[Message, ...]:
    """What sums a tensor over axes level by level (`in_levels`), padded to equal parts of each rank inside."""
    n = math.prod(mesh.shape[a] for a in inside)
    part = -(-nbytes // element_size // n) * element_size
    return (
        Message(kind="reduce_scatter", axes=inside, nbytes=n * part),
        Message(kind="all_reduce", axes=tuple(a for a in axes if a not in inside), nbytes=part),
        Message(kind="all_gather", axes=inside, nbytes=n * part),
    )


def _all_to_all_elements(step: Step, source: tuple[int, ...], n: int, *, forward: bool) -> int:
    """Both directions send the source chunk with the new dim padded to n chunks."""
    assert isinstance(step.after, Shard)
    padded = list(source)
    padded[step.after.dim] = -(-padded[step.after.dim] // n) * n
    return math.prod(padded)


WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


def wire_nbytes(message: Message, mesh: Mesh) -> float:
    """Bytes that each rank sends in a bandwidth-optimal algorithm."""
    return message.nbytes * WIRE_FACTOR[message.kind](math.prod(mesh.shape[a] for a in message.axes))


Weight = Callable[[Step], float]


def wire_weight(shape: tuple[int, ...], element_size: int, mesh: Mesh, needs_gradient: bool) -> Weight:
    """Wire bytes of both passes, and a little for every step so that ties go to fewer steps."""

    def weight(step: Step) -> float:
        forward, backward = messages(step, shape, element_size, mesh)
        sent = (*forward, *(backward if needs_gradient else ()))
        return sum(wire_nbytes(m, mesh) + 1.0 for m in sent) + 1e-3

    return weight


@lru_cache(maxsize=1 << 16)
def route(
    source: Layout, target: Layout, shape: tuple[int, ...], element_size: int, mesh: Mesh, needs_gradient: bool
) -> tuple[Step, ...]:
    """Steps from `source` to `target` that send the fewest bytes."""
    return cheapest_route(
        source, target, shape, mesh, needs_gradient, wire_weight(shape, element_size, mesh, needs_gradient)
    )


def cheapest_route(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, needs_gradient: bool, weight: Weight
) -> tuple[Step, ...]:
    """Steps from `source` to `target` of the least total weight (Dijkstra; ties go to the first found).

    On the way every axis keeps its placement, has its target's, or is whole (Replicate or Invariant).
    """
    counter = itertools.count()
    queue: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, next(counter), source, ())]
    done: set[Layout] = set()
    while queue:
        total, _, layout, path = heapq.heappop(queue)
        if layout == target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step in _steps_towards(layout, target, needs_gradient):
            if step.target not in done and is_possible(step, shape, mesh):
                heapq.heappush(queue, (total + weight(step), next(counter), step.target, (*path, step)))
    raise AssertionError(f"no route from {source} to {target} for a tensor of shape {shape}")


@lru_cache(maxsize=1 << 16)
def _steps_towards(layout: Layout, target: Layout, needs_gradient: bool) -> tuple[Step, ...]:
    rank = 1 + max((*layout.sharded_dims(), *target.sharded_dims()), default=0)
    whole = (REPLICATE, INVARIANT) if needs_gradient else (REPLICATE,)
    return tuple(
        step
        for step in steps_from(layout, rank, needs_gradient)
        if step.after in whole or all(target.axes[axis] == step.after for axis in step.axes)
    )


def step_between(source: Layout, target: Layout) -> Step:
    """The one step that leads from `source` to `target`.

    Raises:
        ValueError: if no single collective does.
    """
    rank = 1 + max((*source.sharded_dims(), *target.sharded_dims()), default=0)
    for step in steps_from(source, rank, True):
        if step.target == target:
            return step
    raise ValueError(f"no single step leads from layout {source} to {target}")
