"""How dear is it to bring a tensor from one layout to another, and to all that are wanted of it?

On a mesh of few axes a way is the cheapest route (`values.redistribution`) in seconds. On more none is searched for:
each axis goes straight from its placement to the wanted one, alone or flattened with axes that change alike, first what
makes local shapes smaller; only shards that stand in the way of the wanted nesting are gathered and split again.

Wanted layouts are reached from what is there (the given one and all made on the way), the nearest first, so that what
several readers want is made once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.lower.program import Tensor
from autopar.search.costs.pricing import Pricer, total
from autopar.values.placement import REPLICATE, Layout, Placement, Shard, chunk_size, local_shape
from autopar.values.redistribution import (
    COLLECTIVES,
    SUMS,
    TABLE,
    Step,
    cheapest_route,
    flattened_step,
    is_possible,
    single_step,
)

Path = tuple[Step, ...]

SEARCHED_AXES = 3
"""On more axes ways are not searched for: a search sees 2^axes layouts and more."""
TIE = 1e-12
"""Seconds a step, so that ties go to fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fare:
    """Seconds of one instance; `gathers`: of forward, what all-gathers take."""

    forward: float
    backward: float
    gathers: float


FREE = Fare(forward=0.0, backward=0.0, gathers=0.0)


@dataclass(slots=True, kw_only=True)
class Ways:
    """Cheapest ways on one mesh, each found once."""

    pricer: Pricer
    _fares: dict[object, Fare] = field(default_factory=dict)

    def seconds(self, given: Layout, wanted: Iterable[Layout], tensor: Tensor, backward: bool) -> float:
        """From `given` to every one of `wanted`; `backward`: gradients travel back and cost too."""
        return sum(seconds for seconds, _, _ in self._order(given, wanted, tensor, backward))

    def paths(self, given: Layout, wanted: Iterable[Layout], tensor: Tensor, backward: bool) -> dict[Layout, Path]:
        """The steps from `given` to each wanted layout."""
        paths: dict[Layout, Path] = {given: ()}
        for _, start, goal in self._order(given, wanted, tensor, backward):
            paths[goal] = (*paths[start], *self.path(start, goal, tensor))
        return paths

    def _order(
        self, given: Layout, wanted: Iterable[Layout], tensor: Tensor, backward: bool
    ) -> list[tuple[float, Layout, Layout]]:
        """(seconds, from, to) of the ways taken: the shortest next one from what is there."""
        missing = [w for w in dict.fromkeys(wanted) if w != given]
        nearest = [(self.between(given, w, tensor, backward), given, w) for w in missing]
        out: list[tuple[float, Layout, Layout]] = []
        while nearest:
            best = min(nearest, key=lambda way: way[0])
            out.append(best)
            nearest = [way for way in nearest if way is not best]
            for i, (seconds, _, goal) in enumerate(nearest):
                other = self.between(best[2], goal, tensor, backward)
                if other < seconds:
                    nearest[i] = (other, best[2], goal)
        return out

    def between(self, source: Layout, target: Layout, tensor: Tensor, backward: bool) -> float:
        """Seconds from one layout to another."""
        fare = self.fare(source, target, tensor)
        return fare.forward + fare.backward if backward else fare.forward

    def fare(self, source: Layout, target: Layout, tensor: Tensor) -> Fare:
        """What the way costs: that of the local tensor on the axes on which the layouts differ, found once."""
        if source == target:
            return FREE
        changed = [(i, a, b) for i, (a, b) in enumerate(zip(source.axes, target.axes, strict=True)) if a != b]
        shape = list(tensor.shape)
        free = not (source.order or target.order)
        for axis, (a, b) in enumerate(zip(source.axes, target.axes, strict=True)):
            if a == b and isinstance(a, Shard):
                shape[a.dim] = chunk_size(shape[a.dim], self.pricer.mesh.shape[axis])
                free = free and all(i > axis or a not in ends for i, *ends in changed)
        local = tuple(shape) if free else (source, target, tensor.shape)
        key = (local, tuple(changed), tensor.element_size, tensor.requires_grad, self._paid_for(tensor))
        fare = self._fares.get(key)
        if fare is None:
            if self.pricer.mesh.num_axes > SEARCHED_AXES:
                fare = self._estimate(source, target, tensor)
            else:
                fare = self._paid(self.path(source, target, tensor), tensor)
            self._fares[key] = fare
        return fare

    def _paid_for(self, tensor: Tensor) -> tuple[bool, float]:
        """Whether it is a parameter, and its part of a start: as if its copies lived for the step."""
        return tensor.kind == "parameter", self.pricer.share(tensor, "")

    def _paid(self, path: Path, tensor: Tensor) -> Fare:
        prices = [self.pricer.step(step, tensor.shape, tensor.element_size, *self._paid_for(tensor)) for step in path]
        return Fare(
            forward=sum(total(forward) for forward, _ in prices),
            backward=sum(total(back) for _, back in prices),
            gathers=sum(total(f) for step, (f, _) in zip(path, prices, strict=True) if step.forward == "all_gather"),
        )

    def _estimate(self, source: Layout, target: Layout, tensor: Tensor) -> Fare:
        """Without a search, as if all axes that change alike were one: first what makes local shapes smaller."""
        mesh = self.pricer.mesh
        alike: dict[tuple[Placement, Placement], list[int]] = {}
        for axis, (before, after) in enumerate(zip(source.axes, target.axes, strict=True)):
            if before != after:
                alike.setdefault((before, after), []).append(axis)
            elif isinstance(before, Shard) and _returns(source, target, axis):
                alike.setdefault((before, REPLICATE), []).append(axis)
                alike.setdefault((REPLICATE, before), []).append(axis)
        local = list(local_shape(tensor.shape, source, mesh))
        forward = backward = gathers = 0.0
        for (before, after), axes in sorted(alike.items(), key=lambda item: _growth(*item[0])):
            together = [(axis,) for axis in axes] if isinstance(before, Shard) and isinstance(after, Shard) else [axes]
            for group in together:
                n = math.prod(mesh.shape[a] for a in group)
                whole = math.prod(local) * tensor.element_size * (n if isinstance(before, Shard) else 1)
                if isinstance(before, Shard):
                    local[before.dim] *= n
                if isinstance(after, Shard):
                    local[after.dim] = chunk_size(local[after.dim], n)
                    whole = whole // n if isinstance(before, Shard) else whole
                kinds = TABLE[type(before), type(after)]
                sizes = (whole, whole * (self.pricer.target.widening(tensor) if kinds[1] in SUMS else 1))
                costs = [
                    self.pricer.message(k, tuple(group), size, *self._paid_for(tensor))[0] if k in COLLECTIVES else 0.0
                    for k, size in zip(kinds, sizes, strict=True)
                ]
                forward, backward = forward + costs[0], backward + costs[1]
                gathers += costs[0] if kinds[0] == "all_gather" else 0.0
        return Fare(forward=forward, backward=backward, gathers=gathers)

    def path(self, source: Layout, target: Layout, tensor: Tensor) -> Path:
        """The steps that cost least."""
        if self.pricer.mesh.num_axes > SEARCHED_AXES:
            return self.swift(source, target, tensor)
        shape, mesh, paid_for = tensor.shape, self.pricer.mesh, self._paid_for(tensor)

        def seconds(step: Step) -> float:
            forward, back = self.pricer.step(step, shape, tensor.element_size, *paid_for)
            return total(forward) + (total(back) if tensor.requires_grad else 0.0) + TIE

        return cheapest_route(source, target, shape, mesh, tensor.requires_grad, seconds)

    def swift(self, source: Layout, target: Layout, tensor: Tensor) -> Path:
        """One order without a search: first what makes local shapes smaller, last what makes them larger."""
        path: list[Step] = []
        layout = source
        while layout != target:
            moves = sorted(_moves(layout, target), key=lambda move: (_growth(*move[:2]), -len(move[2])))
            layout_steps = (self._step(layout, target, after, axes) for _, after, axes in moves)
            step = next(s for s in layout_steps if s is not None and is_possible(s, tensor.shape, self.pricer.mesh))
            path.append(step)
            layout = step.target
        return tuple(path)

    def _step(self, layout: Layout, target: Layout, after: Placement, axes: tuple[int, ...]) -> Step | None:
        """None where one collective cannot, or where a new shard would not stand where `target` nests it."""
        step = single_step(layout, axes[0], after) if len(axes) == 1 else flattened_step(layout, axes, after)
        if step is None or not isinstance(after, Shard):
            return step
        now = step.target.axes_of(after.dim)
        return step if now == target.axes_of(after.dim)[: len(now)] else None


Move = tuple[Placement, Placement, tuple[int, ...]]
"""(before, after, axes)."""


def _moves(layout: Layout, target: Layout) -> list[Move]:
    """Towards `target`: one axis, or the first or last of those that go the same way."""
    alike: dict[tuple[Placement, Placement], list[int]] = {}
    for axis, (before, after) in enumerate(zip(layout.axes, target.axes, strict=True)):
        if before != after:
            alike.setdefault((before, after), []).append(axis)
        if isinstance(before, Shard) and isinstance(after, Shard) and _returns(layout, target, axis):
            alike.setdefault((before, REPLICATE), []).append(axis)
    moves: list[Move] = []
    for (before, after), axes in alike.items():
        moves += [(before, after, (axis,)) for axis in axes]
        groups = {tuple(axes[i:]) for i in range(len(axes) - 1)} | {tuple(axes[:i]) for i in range(2, len(axes))}
        moves += [(before, after, group) for group in sorted(groups)]
    return moves


def _growth(before: Placement, after: Placement) -> int:
    """0 where local shapes shrink, 2 where they grow."""
    return 1 + isinstance(before, Shard) - isinstance(after, Shard)


def _returns(layout: Layout, target: Layout, axis: int) -> bool:
    """Whether the shards that `axis` stands among are not those that `target` has there, in its order."""
    before, after = layout.axes[axis], target.axes[axis]
    assert isinstance(before, Shard) and isinstance(after, Shard)
    if before != after:
        return True
    now, wanted = layout.axes_of(before.dim), target.axes_of(before.dim)
    place = now.index(axis)
    return now[: place + 1] != wanted[: place + 1]
