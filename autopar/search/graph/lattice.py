"""Which layouts can a tensor pass through, and what does each step between them cost?"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from autopar.search.costs.many_steps import Steps, make_steps, step_seconds
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.storages import orders
from autopar.search.graph.strategy_graph import Floats, Ints
from autopar.search.graph.ways_kernel import everywhere
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Placement
from autopar.values.redistribution import Step, steps_from

Placements = tuple[frozenset[Placement], ...]
"""What may stand on each mesh axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """Layouts and the steps between them; `forward[arc]`, `backward[arc]` in seconds."""

    layouts: tuple[Layout, ...]
    number: dict[Layout, int]
    steps: tuple[Step, ...]
    source: Ints
    target: Ints
    forward: Floats
    backward: Floats
    _useful: dict[float, Ints] = field(default_factory=dict)

    def seconds(self, ahead: float, back: float) -> Floats:
        """Of each step so often, and of the way its gradient goes back."""
        return self.forward * ahead + self.backward * back

    def useful(self, ahead: float, back: float) -> Ints:
        """The steps that are themselves the cheapest way between their ends: all that anyone needs for whom seconds
        alone count, for a way of several is at least as good as any other step."""
        ratio = back / ahead if ahead else math.inf
        if ratio not in self._useful:
            seconds = self.backward if ratio == math.inf else self.seconds(1.0, ratio)
            last = cheapest_ways(self, seconds).last
            numbers = np.arange(len(self.source))
            self._useful[ratio] = numbers[last[self.source, self.target] == numbers]
        return self._useful[ratio]


@dataclass(slots=True)
class Lattices:
    """Lattices of one mesh, made once for equal tensors: those of parameters for all programs of the mesh."""

    pricer: Pricer

    def of(
        self,
        shape: tuple[int, ...],
        element_size: int,
        grad: bool,
        axes: Placements,
        parameter: bool,
        share: float = 1.0,
    ) -> Lattice:
        """All layouts with these placements and whole ones (those of parameters nested in any order).

        share: what part of a start counts.
        """
        key = ("lattice", shape, element_size, grad, axes, share)
        made = self.pricer.parameters if parameter else self.pricer.made
        if key not in made:
            made[key] = self._make(shape, element_size, grad, axes, parameter, share)
        found: Lattice = made[key]
        return found

    def _make(
        self, shape: tuple[int, ...], element_size: int, grad: bool, axes: Placements, parameter: bool, share: float
    ) -> Lattice:
        wide = tuple(n > 1 for n in self.pricer.mesh.shape)
        found = _steps(axes, len(shape), grad, wide, parameter, () if parameter else self.pricer.loose)
        possible, forward, backward = step_seconds(found, shape, element_size, self.pricer, parameter, share)
        return Lattice(
            layouts=found.layouts,
            number={layout: i for i, layout in enumerate(found.layouts)},
            steps=tuple(itertools.compress(found.steps, possible)),
            source=found.source[possible],
            target=found.target[possible],
            forward=forward[possible],
            backward=backward[possible],
        )


@lru_cache(maxsize=512)
def _steps(
    axes: Placements,
    rank: int,
    grad: bool,
    wide: tuple[bool, ...],
    nested: bool,
    loose: tuple[tuple[int, ...], ...] = (),
) -> Steps:
    """Between all layouts that there are on a mesh whose axes are `wide`, or of one rank.

    loose: with the steps of meshes that have its axes in these orders; a layout stands for those of all orders.
    """
    whole: frozenset[Placement] = frozenset({REPLICATE, INVARIANT} if grad else {REPLICATE})
    sets: list[list[Placement]] = [sorted(a | whole if w else a, key=str) for a, w in zip(axes, wide, strict=True)]
    layouts: dict[Layout, None] = {}
    for placements in itertools.product(*sets):
        layouts.update(dict.fromkeys(orders(placements) if nested else (Layout(placements),)))
    steps = [s for layout in layouts for s in steps_from(layout, rank, grad) if s.target in layouts]
    if loose:
        steps = list(
            dict.fromkeys(_in_order(step, order) for order in loose for step in _ordered(layouts, order, rank, grad))
        )
    return make_steps(tuple(layouts), steps)


def _ordered(layouts: dict[Layout, None], order: tuple[int, ...], rank: int, grad: bool) -> Iterator[Step]:
    """Steps on the mesh that has the axes in this order, which names them by their places there."""
    there = dict.fromkeys(Layout(tuple(layout.axes[axis] for axis in order)) for layout in layouts)
    return (step for layout in there for step in steps_from(layout, rank, grad) if step.target in there)


def _in_order(step: Step, order: tuple[int, ...]) -> Step:
    """The step with the names that axes have here."""
    places = {axis: place for place, axis in enumerate(order)}
    source, target = (
        Layout(tuple(layout.axes[places[axis]] for axis in range(len(order)))) for layout in (step.source, step.target)
    )
    return replace(step, source=source, target=target, axes=tuple(sorted(order[axis] for axis in step.axes)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distances:
    """Cheapest ways between all layouts of a lattice."""

    lattice: Lattice
    seconds: Floats
    last: Ints

    def path(self, source: int, target: int) -> list[int]:
        """Arcs from one layout to another."""
        out: list[int] = []
        while source != target:
            arc = int(self.last[source, target])
            assert arc >= 0, f"no way from {self.lattice.layouts[source]} to {self.lattice.layouts[target]}"
            out.append(arc)
            target = int(self.lattice.source[arc])
        return out[::-1]


def cheapest_ways(lattice: Lattice, seconds: Floats) -> Distances:
    """Between all layouts; `seconds[arc]`. Ties go to fewer steps."""
    distance, last = everywhere(len(lattice.layouts), lattice.source, lattice.target, seconds + 1e-12)
    return Distances(lattice=lattice, seconds=distance, last=last)


def slices_of(whole: Layout, wanted: Sequence[Layout]) -> Lattice:
    """From a tensor that is whole on every rank, without a gradient, to each of these layouts: free slices."""
    count = len(wanted)
    layouts = (whole, *wanted)
    return Lattice(
        layouts=layouts,
        number={layout: i for i, layout in enumerate(layouts)},
        steps=(),
        source=np.zeros(count, dtype=np.int64),
        target=np.arange(1, count + 1, dtype=np.int64),
        forward=np.zeros(count),
        backward=np.zeros(count),
    )
