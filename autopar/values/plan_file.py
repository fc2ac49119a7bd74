"""How is a saved plan read? By the types of its tables.

`PlanFile` is what `Plan.to_json` and `ModelPlan.to_json` write. Reading it imports and calls nothing that it names.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autopar.errors import AutoparError, PlanFileError, PlanMismatchError
from autopar.values.calls import Call, call_from_json
from autopar.values.estimate import Estimate
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, parse_layout
from autopar.values.plan import VERSION, Plan
from autopar.values.precision import PRECISIONS
from autopar.values.redistribution import step_between
from autopar.values.schema import Count, Index, Word, checked, file_text, json_value, of_file
from autopar.values.stage_plan import StagePlan, Way
from autopar.values.train_config import NUM_STATES, TrainConfig
from autopar.values.version import in_range

MAX_RANKS = 1 << 20
"""Ranks of the largest plan that is read: more than any machine has, and few enough to count them."""

REMEDY = "give a plan.json that autopar saved, or plan again"

Lifetime = Literal["always", "step", "microbatch", "use"]
Numbers = tuple[Index, ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTable:
    """A `Mesh`."""

    shape: Annotated[tuple[Count, ...], Field(max_length=16)]
    names: tuple[Word, ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class WayTable:
    """A `Way`: numbers of layouts in the stage's table, and names of axes."""

    path: Numbers
    inside: tuple[Word, ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """What one stage decides; choices and layouts are numbers into `table`."""

    model: Word
    fingerprint: Word
    origin: Word
    copies: Literal[1, 2]
    choices: Mapping[str, Index]
    layouts: Mapping[str, Index]
    lifetimes: Mapping[str, Lifetime]
    routes: Mapping[str, tuple[Numbers, ...]]
    recompute: tuple[str, ...]
    remade: Mapping[str, Numbers]
    buckets: tuple[tuple[str, ...], ...]
    prefetch: bool
    ways: Mapping[str, WayTable]
    table: tuple[Word, ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTable:
    """What the command line was told of the model. It is run only where a person says so (`--trust`)."""

    spec: str
    batch: Count | None
    seq: Count | None
    overrides: Mapping[str, str]
    precision: Word


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan as it stands in a file."""

    schema: Literal[5]
    torch: tuple[Word, Word]
    model: Word
    fingerprint: Word
    cluster: str
    config: TrainConfig
    mesh: MeshTable
    pipeline: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    schedule: Word
    microbatches: Count
    cuts: tuple[str, ...]
    origin: Word
    estimate: Estimate
    stages: tuple[StageTable, ...]
    call: Any
    source: SourceTable | None
    checked: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan, how its model is called, what the command line was told of it, and on what it was checked."""

    plan: Plan
    call: Call | None
    source: SourceTable | None
    checked: str


def load_saved(path: str | Path) -> SavedPlan:
    """What a plan's file says.

    Raises:
        PlanFileError: if it cannot be read, or is no plan.
        PlanMismatchError: for another schema version, or a torch outside the plan's range.
    """
    return saved_from(file_text(path, PlanFileError, REMEDY), str(path))


def saved_from(text: str, where: str = "plan") -> SavedPlan:
    """The inverse of `to_json`; where: what messages call the text. Raises as `load_saved` does."""
    body = json_value(text, where, PlanFileError, REMEDY)
    if not isinstance(body, dict) or "schema" not in body:
        raise PlanFileError(f"{where} is not a plan that autopar saved: no object with a schema version; {REMEDY}")
    if body["schema"] != VERSION:
        raise PlanMismatchError(
            f"{where} has schema version {body['schema']!r:.60}, this autopar reads {VERSION}; plan again"
        )
    file = checked(PlanFile, body, where, PlanFileError, REMEDY)
    low, high = file.torch
    try:
        fits = in_range(low, high)
    except ValueError as error:
        raise PlanFileError(
            f"{where}: torch: expected two versions, found {low!r:.20} and {high!r:.20}; {REMEDY}"
        ) from error
    if not fits:
        raise PlanMismatchError(f"the plan is for torch >= {low}, < {high}; install such a torch or plan again")
    try:
        call = None if file.call is None else call_from_json(file.call)
        return SavedPlan(plan=_plan(file), call=call, source=file.source, checked=file.checked)
    except AutoparError as error:
        raise PlanFileError(f"{where}: {error}; {REMEDY}") from error


def plan_from_json(text: str) -> Plan:
    """The plan alone, without its model. Raises as `load_saved` does."""
    return saved_from(text).plan


def load_plan(path: str | Path) -> Plan:
    """The plan alone, without its model. Raises as `load_saved` does."""
    return load_saved(path).plan


def _plan(file: PlanFile) -> Plan:
    mesh = Mesh(shape=file.mesh.shape, names=file.mesh.names)
    if mesh.size * file.pipeline > MAX_RANKS:
        raise PlanFileError(f"mesh.shape: {mesh.size * file.pipeline} ranks are more than {MAX_RANKS}")
    for name, known in (("optimizer", NUM_STATES), ("precision", PRECISIONS)):
        if (said := getattr(file.config, name)) not in known:
            raise PlanFileError(f"config.{name}: {said!r} is none of {', '.join(known)}")
    shared: dict[str, Any] = {
        "cluster": file.cluster,
        "config": file.config,
        "mesh": mesh,
        "microbatches": file.microbatches,
    }
    return Plan(
        model=file.model,
        fingerprint=file.fingerprint,
        pipeline=file.pipeline,
        schedule=file.schedule,
        cuts=file.cuts,
        stages=tuple(_Reader(table, mesh, f"stages[{i}]").stage(shared) for i, table in enumerate(file.stages)),
        origin=file.origin,
        estimate=file.estimate,
        **shared,
    )


class _Reader:
    """The inverse of `StagePlan.to_body`; where: the path of the stage's table."""

    def __init__(self, stage: StageTable, mesh: Mesh, where: str) -> None:
        self.of, self.mesh, self.where = stage, mesh, where

    def stage(self, shared: Mapping[str, Any]) -> StagePlan:
        """shared: what all stages have in common."""
        of = self.of
        return StagePlan(
            model=of.model,
            fingerprint=of.fingerprint,
            copies=of.copies,
            origin=of.origin,
            choices={name: self._choice(i, f"choices.{name}") for name, i in of.choices.items()},
            layouts={name: self._layout(i, f"layouts.{name}") for name, i in of.layouts.items()},
            lifetimes=of.lifetimes,
            routes={
                name: tuple(self._way_path(path, f"routes.{name}[{i}]") for i, path in enumerate(paths))
                for name, paths in of.routes.items()
            },
            recompute=frozenset(of.recompute),
            remade={name: self._layouts(path, f"remade.{name}") for name, path in of.remade.items()},
            buckets=of.buckets,
            prefetch=of.prefetch,
            ways={name: self._way(way, f"ways.{name}") for name, way in of.ways.items()},
            **shared,
        )

    def _text(self, number: int, where: str) -> str:
        if number >= len(self.of.table):
            raise PlanFileError(
                f"{self.where}.{where}: there is no text {number} in the table, which has {len(self.of.table)}"
            )
        return self.of.table[number]

    def _choice(self, number: int, where: str) -> tuple[str, ...]:
        choice = tuple(self._text(number, where).split(","))
        if len(choice) != self.mesh.num_axes:
            raise PlanFileError(f"{self.where}.{where}: {','.join(choice)!r} is no choice for each axis of {self.mesh}")
        return choice

    def _layout(self, number: int, where: str) -> Layout:
        text = self._text(number, where)
        try:
            layout = parse_layout(text)
        except ValueError as error:
            raise PlanFileError(f"{self.where}.{where}: {error}") from error
        if len(layout.axes) != self.mesh.num_axes:
            raise PlanFileError(f"{self.where}.{where}: {text!r} is no placement for each axis of {self.mesh}")
        return layout

    def _layouts(self, numbers: tuple[int, ...], where: str) -> tuple[Layout, ...]:
        return tuple(self._layout(number, where) for number in numbers)

    def _way(self, way: WayTable, where: str) -> Way:
        if unknown := [axis for axis in way.inside if axis not in self.mesh.names]:
            raise PlanFileError(f"{self.where}.{where}.inside: {unknown[0]!r} is no axis of {self.mesh}")
        return Way(path=self._way_path(way.path, f"{where}.path"), inside=way.inside)

    def _way_path(self, numbers: Numbers, where: str) -> tuple[Layout, ...]:
        """Layouts with one step between neighbours."""
        path = self._layouts(numbers, where)
        if len(path) < 2:
            raise PlanFileError(f"{self.where}.{where}: expected two layouts or more, found {len(path)}")
        try:
            for before, after in itertools.pairwise(path):
                step_between(before, after)
        except ValueError as error:
            raise PlanFileError(f"{self.where}.{where}: {error}") from error
        return path
