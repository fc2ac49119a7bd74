"""What was decided of a stage, as a value: a choice per node and mesh axis, where parameters live, how tensors travel.

It names no process and no tensor data.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import ArgumentError, PlanMismatchError
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout
from autopar.values.redistribution import Step, in_levels, route, step_between
from autopar.values.search_report import SearchReport, report_from

ROUNDING = 1e-9

LIFETIMES = ("always", "step", "microbatch", "use")
"""How long a gathered copy of a parameter lives: it is never gathered (storage is what is used), it is kept for all
micro-batches of a step (ZeRO-1, -2), from forward to backward, or it is gathered again for backward (ZeRO-3)."""

ONCE_A_STEP = ("always", "step")
"""Lifetimes whose collectives, gradients' included, are paid once a step; others are paid once a micro-batch."""


REDUCE_SIZES = {"fp32": 4, "fp64": 8}
"""Dtypes in which gradients may be summed, wider than they are computed in, and bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the model is trained: what planning needs to know beside the model and the cluster."""

    optimizer: str = "adamw"
    precision: str = "fp32"
    memory_nbytes: float | None = None
    """Memory limit a device; None for what the device has."""
    reduce_dtype: str | None = None
    """One of `REDUCE_SIZES`, in which gradients of parameters are summed over ranks; None for that of compute."""

    def __post_init__(self) -> None:
        if self.reduce_dtype is not None and self.reduce_dtype not in REDUCE_SIZES:
            raise ArgumentError(f"unknown reduce_dtype {self.reduce_dtype!r}; choose one of {', '.join(REDUCE_SIZES)}")

    @property
    def dtypes(self) -> str:
        """What is computed, stored and summed in which dtype, in words."""
        return self.precision + (f", gradients summed in {self.reduce_dtype}" if self.reduce_dtype else "")

    def reduced_size(self, element_size: int) -> int:
        """Bytes of an element of a parameter's gradient while ranks sum it; element_size: of what is computed on."""
        return element_size if self.reduce_dtype is None else max(element_size, REDUCE_SIZES[self.reduce_dtype])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the cost model says of a plan, and the proof of how good it is. Seconds a step, bytes a rank.

    seconds: by kind: forward, backward, recompute?, communication kinds, optimizer.
    hidden: seconds for which collectives run beside compute: those of one micro-batch beside another's (`Plan.copies`),
        or what buckets send beside it (`search.costs.overlapped_seconds`).
    saved: seconds that buckets save, and the ways that they take.
    saved_by_ways: those of them that other ways than those of parameters alone save.
    memory: bytes by kind at the peak moment; their sum is the predicted peak.
    rates: whose formulas priced compute: constants fitted for the device, or the roofline of its own figures.
    bound: a proved lower bound on the step seconds, everything in turn, over the space searched: of plans in buckets
        where it was searched for those, else of every collective alone. 0 if none is proved.
    bounded_alone: the bound is one on `alone_seconds`, and buckets were chosen afterwards.
    baselines: named baselines, in buckets if the plan may be: seconds, or why they do not apply.
    search: what there is to say of how the plan was found.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    saved: float = 0.0
    saved_by_ways: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    rates: str = ""
    bound: float = 0.0
    bounded_alone: bool = False
    baselines: Mapping[str, float | str] = field(default_factory=dict)
    search: SearchReport = field(default_factory=SearchReport)

    @property
    def step_seconds(self) -> float:
        return self.in_turn_seconds - self.hidden

    @property
    def in_turn_seconds(self) -> float:
        """The step if nothing ran beside compute."""
        return sum(self.seconds.values())

    @property
    def alone_seconds(self) -> float:
        """The step if every collective went alone and nothing beside it."""
        return sum(self.seconds.values()) + self.saved

    @property
    def peak_nbytes(self) -> float:
        return sum(self.memory.values())

    @property
    def gap(self) -> float:
        """How far the plan can be from optimal in the space searched, relative to the plan; rounding is none."""
        seconds = self.alone_seconds if self.bounded_alone else self.in_turn_seconds
        gap = (seconds - self.bound) / seconds if seconds else 0.0
        return gap if gap > ROUNDING else 0.0


def estimate_from(body: Mapping[str, Any]) -> Estimate:
    """The inverse of `dataclasses.asdict`. Of a file of a former schema, which said more freely how the plan was found,
    whether it was priced in buckets is kept."""
    fields = dict(body)
    if (former := fields.pop("solver", None)) is not None:
        return Estimate(**fields, search=SearchReport(is_in_buckets="in_buckets" in former))
    return Estimate(**{**fields, "search": report_from(fields["search"])})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A distribution of one stage, which is a captured model, over one mesh.

    choices: for every call node, the name of its rule's choice on each mesh axis (`autopar.rules.rule.Choice.name`).
    layouts: for every placeholder: storage of parameters, and what each rank holds of buffers, constants, inputs.
    lifetimes: for every parameter, one of `LIFETIMES`.
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
            if path[-1] == wanted:
                return tuple(step_between(a, b) for a, b in itertools.pairwise(path))
        return route(source, wanted, shape, element_size, self.mesh, grad)

    def with_estimate(self, estimate: Estimate) -> "Plan":
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
