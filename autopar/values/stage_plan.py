"""What was decided of a stage, as a value: a choice per node and mesh axis, where parameters live, how tensors travel.

It names no process and no tensor data.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PlanMismatchError
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout
from autopar.values.redistribution import Step, in_levels, route, step_between
from autopar.values.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Layouts from a parameter's storage to where it is used, one step between neighbours. inside: names of axes over
    which the all-reduce of its gradients goes level by level (`redistribution.in_levels`)."""

    path: tuple[Layout, ...]
    inside: tuple[str, ...] = ()

    def steps(self, mesh: Mesh) -> tuple[Step, ...]:
        axes = {mesh.names.index(axis) for axis in self.inside}
        steps = [step_between(a, b) for a, b in itertools.pairwise(self.path)]
        return tuple(in_levels(s, tuple(sorted(axes))) if axes and axes < set(s.axes) else s for s in steps)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A distribution of one stage, which is a captured model, over one mesh.

    choices: for every call node, the name of its rule's choice on each mesh axis (`autopar.rules.rule.Choice.name`).
    layouts: for every placeholder: storage of parameters, and what each rank holds of buffers, constants, inputs.
    lifetimes: for every parameter, one of `values.lifetimes`.
    microbatches: in how many equal parts a step runs the global batch; shapes and choices are those of one part.
    copies: how many of these run at once, woven so that one computes while another communicates: 1 or 2.
    routes: tensors that travel another way than `redistribution.route` would send them: for each a list of layouts
        from the producer's to a wanted one, one step between neighbours.
    recompute: ops that backward runs again instead of keeping what they made.
    remade: layouts of tensors that backward redistributes again instead of keeping them.
    buckets: parameters that are gathered, and whose gradients are reduced, in one message where they are alike
        (`passes.fuse_collectives`); none: each alone.
    prefetch: gathers of buckets begin when the bucket before is there (`passes.prefetch`).
    ways: of parameters that travel another way than `routes` say, because a bucket's message is not one parameter's:
        collectives over several axes one after the other, as one, or in levels; or one that all of a bucket can take.
    """

    model: str
    fingerprint: str
    mesh: Mesh
    cluster: str
    config: TrainConfig
    choices: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Layout]
    lifetimes: Mapping[str, str]
    routes: Mapping[str, tuple[tuple[Layout, ...], ...]] = field(default_factory=dict)
    recompute: frozenset[str] = frozenset()
    remade: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    microbatches: int = 1
    copies: int = 1
    buckets: tuple[tuple[str, ...], ...] = ()
    prefetch: bool = False
    ways: Mapping[str, Way] = field(default_factory=dict)
    origin: str = "ilp"
    estimate: Estimate = field(default_factory=Estimate)

    def check(self, captured: CapturedModel) -> None:
        """Raises PlanMismatchError if the plan was made for another model."""
        check_model(self.model, self.fingerprint, self.microbatches, captured)

    def steps(
        self, name: str, source: Layout, wanted: Layout, shape: tuple[int, ...], element_size: int, grad: bool
    ) -> tuple[Step, ...]:
        """How a tensor of that name comes from one layout to another; `grad`: whether it needs a gradient."""
        way = self.ways.get(name)
        if way is not None and (way.path[0], way.path[-1]) == (source, wanted):
            return way.steps(self.mesh)
        for path in self.routes.get(name, ()):
            if (path[0], path[-1]) == (source, wanted):
                return tuple(step_between(a, b) for a, b in itertools.pairwise(path))
        return route(source, wanted, shape, element_size, self.mesh, grad)

    def with_estimate(self, estimate: Estimate) -> "StagePlan":
        return replace(self, estimate=estimate)

    def to_body(self) -> dict[str, Any]:
        """What a stage alone decides, as JSON values; equal choices and layouts are written once."""
        tables = _Tables()
        body = {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "copies": self.copies,
            "origin": self.origin,
            "choices": {name: tables.index(",".join(choice)) for name, choice in self.choices.items()},
            "layouts": {name: tables.index(str(layout)) for name, layout in self.layouts.items()},
            "lifetimes": dict(self.lifetimes),
            "routes": {
                name: [[tables.index(str(layout)) for layout in path] for path in paths]
                for name, paths in self.routes.items()
            },
            "recompute": sorted(self.recompute),
            "remade": {name: [tables.index(str(v)) for v in layouts] for name, layouts in self.remade.items()},
            "buckets": self.buckets,
            "prefetch": self.prefetch,
            "ways": {
                name: {"path": [tables.index(str(layout)) for layout in way.path], "inside": way.inside}
                for name, way in self.ways.items()
            },
        }
        return {**body, "table": tables.texts}


def check_model(model: str, fingerprint: str, microbatches: int, captured: CapturedModel) -> None:
    """Raises PlanMismatchError if a plan of that model and number of micro-batches is not for `captured`."""
    if captured.fingerprint != fingerprint:
        raise PlanMismatchError(
            f"this plan was made for {model} (fingerprint {fingerprint}), the model at hand is "
            f"{captured.name} (fingerprint {captured.fingerprint}): another architecture, batch shape or "
            "precision; plan again for this model"
        )
    if captured.microbatches != microbatches:
        raise PlanMismatchError(
            f"this plan runs {microbatches} micro-batches a step, the graph at hand is that of one of "
            f"{captured.microbatches}; capture the model for the plan's micro-batches or plan again"
        )


class _Tables:
    """Numbers texts in the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
