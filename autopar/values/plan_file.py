"""How is a saved plan read? From the schema of today, or those before it: of one stage (3), of several (stages-2)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, PlanMismatchError
from autopar.values.estimate import estimate_from
from autopar.values.mesh import Mesh
from autopar.values.placement import parse_layout
from autopar.values.plan import VERSION, Plan
from autopar.values.stage_plan import StagePlan, Way
from autopar.values.train_config import TrainConfig
from autopar.values.version import in_range


def load_plan(path: str | Path) -> Plan:
    """A saved plan.

    Raises:
        PlanMismatchError: if the file is missing or is not a plan for this library.
    """
    return plan_from_json(plan_text(path))


def plan_text(path: str | Path) -> str:
    """What a plan's file says.

    Raises:
        PlanMismatchError: if it cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanMismatchError(f"plan {path} cannot be read ({error}); give the path of a plan.json") from error


def plan_from_json(text: str) -> Plan:
    """The inverse of `Plan.to_json`.

    Raises:
        PlanMismatchError: for another schema version, a torch outside the plan's range, or text that is no plan.
    """
    try:
        body = json.loads(text)
        schema = body["schema"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanMismatchError(
            "this is not a plan that autopar saved: no JSON object with a schema version"
        ) from error
    if schema == 3:  # a stage's own, of a whole model
        body |= {"pipeline": 1, "schedule": "1f1b", "cuts": [], "stages": [dict(body)]}
    elif schema not in ("stages-2", VERSION):
        raise PlanMismatchError(f"the plan has schema version {schema}, this autopar reads {VERSION}; plan again")
    try:
        return _plan(body)
    except AutoparError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PlanMismatchError(f"this is not a plan as autopar saves it: {what}; plan again") from error


def _plan(body: Mapping[str, Any]) -> Plan:
    low, high = body["torch"]
    if not in_range(low, high):
        raise PlanMismatchError(f"the plan is for torch >= {low}, < {high}; install such a torch or plan again")
    shared: dict[str, Any] = {
        "cluster": body["cluster"],
        "config": TrainConfig(**body["config"]),
        "mesh": Mesh(shape=tuple(body["mesh"]["shape"]), names=tuple(body["mesh"]["names"])),
        "microbatches": body.get("microbatches", 1),
    }
    return Plan(
        model=body["model"],
        fingerprint=body["fingerprint"],
        pipeline=body["pipeline"],
        schedule=body["schedule"],
        cuts=tuple(body["cuts"]),
        stages=tuple(_stage(stage, shared) for stage in body["stages"]),
        origin=body["origin"],
        estimate=estimate_from(body["estimate"]),
        **shared,
    )


def _stage(body: Mapping[str, Any], shared: Mapping[str, Any]) -> StagePlan:
    """The inverse of `StagePlan.to_body`; shared: what all stages have in common."""
    table = body["table"]
    return StagePlan(
        model=body["model"],
        fingerprint=body["fingerprint"],
        copies=body.get("copies", 1),
        origin=body["origin"],
        choices={name: tuple(table[i].split(",")) for name, i in body["choices"].items()},
        layouts={name: parse_layout(table[i]) for name, i in body["layouts"].items()},
        lifetimes=body["lifetimes"],
        routes={
            name: tuple(tuple(parse_layout(table[i]) for i in path) for path in paths)
            for name, paths in body["routes"].items()
        },
        recompute=frozenset(body["recompute"]),
        remade={name: tuple(parse_layout(table[i]) for i in layouts) for name, layouts in body["remade"].items()},
        buckets=tuple(tuple(names) for names in body.get("buckets", ())),
        prefetch=_flag(body.get("prefetch", False)),
        ways={
            name: Way(path=tuple(parse_layout(table[i]) for i in way["path"]), inside=tuple(way["inside"]))
            for name, way in body.get("ways", {}).items()
        },
        **shared,
    )


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"prefetch is {value!r}, no true or false")
    return value
