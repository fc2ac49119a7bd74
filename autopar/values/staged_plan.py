"""What was decided for a pipeline, as a value: where the model is cut, which rank runs which stage, a plan a stage.

Every stage is a captured model of its own (`passes.split_stages`), with an ordinary plan on a mesh of its own; all
these meshes have one shape. The pipeline axis is the outermost: global rank = pipeline rank · mesh size + rank within
the mesh. Stage s of S runs on the pipeline rank

    gpipe, 1f1b          s                              S = p
    interleaved-1f1b     s mod p                        S = v p, v >= 2
    zbv                  s, then back: 2p - 1 - s       S = 2p

which is where `torch.distributed.pipelining` looks for it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autopar.errors import ArgumentError, PlanMismatchError
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.plan import Estimate, Plan, TrainConfig, check_model, plan_from_json
from autopar.values.version import TORCH_RANGE, in_range

STAGED_VERSION = "stages-2"
"""Schema of a saved plan with stages; plans without have a number."""

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")

PIPELINE = "pipeline"
"""The axis across stages in what is counted."""
SPLITTING = ("zbv",)
"""Schedules that run the backward pass in two parts."""


def stage_ranks(schedule: str, pipeline: int, num_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage.

    Raises:
        ArgumentError: for an unknown schedule, or a number of stages that it cannot run on so many ranks.
    """
    if schedule not in SCHEDULES:
        raise ArgumentError(f"schedule {schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    each, rest = divmod(num_stages, pipeline)
    fits = {"zbv": each == 2, "interleaved-1f1b": each >= 2}.get(schedule, each == 1)
    if rest or not fits:
        wanted = {
            "zbv": f"two stages a rank, {2 * pipeline}",
            "interleaved-1f1b": f"two or more stages a rank, a multiple of {pipeline} from {2 * pipeline}",
        }.get(schedule, f"one stage a rank, {pipeline}")
        raise ArgumentError(
            f"schedule {schedule} on {pipeline} pipeline ranks needs {wanted}; got {num_stages} stages; "
            "change the number of stages, the number of pipeline ranks or the schedule"
        )
    if schedule == "zbv":
        return (*range(pipeline), *reversed(range(pipeline)))
    return tuple(stage % pipeline for stage in range(num_stages))


def check_microbatches(schedule: str, pipeline: int, microbatches: int) -> None:
    """Raises ArgumentError for a number of micro-batches that `torch.distributed.pipelining` does not run so."""
    if schedule == "1f1b" and microbatches < pipeline:
        raise ArgumentError(
            f"schedule 1f1b on {pipeline} pipeline ranks needs as many micro-batches, got {microbatches}; use "
            f"{pipeline} or more, fewer ranks, or gpipe"
        )
    rounds = max(1, microbatches // pipeline)
    if schedule == "interleaved-1f1b" and microbatches % rounds:
        low = microbatches // pipeline * pipeline
        raise ArgumentError(
            f"schedule interleaved-1f1b on {pipeline} pipeline ranks runs micro-batches in {rounds} equal rounds, "
            f"which {microbatches} are not; use {low} or {low + pipeline}"
        )


def parse_pipeline(text: str) -> tuple[str, int, int]:
    """`1f1b:4` or `interleaved-1f1b:2:6` as schedule, pipeline ranks and stages (by default as few as can be).

    Raises:
        ArgumentError: if the text is of neither form, or the schedule does not run so many stages on so many ranks.
    """
    schedule, *numbers = text.split(":")
    if len(numbers) not in (1, 2) or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ArgumentError(
            f"pipeline {text!r} is not of the form schedule:ranks or schedule:ranks:stages, such as 1f1b:4 or "
            "interleaved-1f1b:2:6"
        )
    pipeline = int(numbers[0])
    num_stages = int(numbers[1]) if len(numbers) == 2 else pipeline * (2 if schedule in SCHEDULES[2:] else 1)
    stage_ranks(schedule, pipeline, num_stages)
    return schedule, pipeline, num_stages


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A distribution of one captured model (that of one micro-batch) over the stages of a pipeline.

    model, fingerprint: of the whole model; stages' plans have those of their stages.
    mesh: of one stage; every pipeline rank has as many devices.
    cuts: for each stage after the first, the name of its first call in the order of the whole model's graph.
    stages: one plan a stage, in the order of the model.
    """

    model: str
    fingerprint: str
    cluster: str
    config: TrainConfig
    mesh: Mesh
    pipeline: int
    schedule: str
    microbatches: int
    cuts: tuple[str, ...]
    stages: tuple[Plan, ...]
    origin: str = "stages"
    estimate: Estimate = field(default_factory=Estimate)

    def __post_init__(self) -> None:
        """Raises ArgumentError if the parts do not make a pipeline."""
        stage_ranks(self.schedule, self.pipeline, self.num_stages)
        check_microbatches(self.schedule, self.pipeline, self.microbatches)
        if len(self.cuts) != self.num_stages - 1:
            raise ArgumentError(
                f"{self.num_stages} stages need {self.num_stages - 1} cuts, got {len(self.cuts)}; "
                "give the first call of every stage but the first"
            )
        for number, stage in enumerate(self.stages):
            if stage.mesh != self.mesh:
                raise ArgumentError(f"stage {number} is planned for mesh {stage.mesh}, the plan's is {self.mesh}")
            if stage.microbatches != self.microbatches:
                raise ArgumentError(
                    f"stage {number} is planned for {stage.microbatches} micro-batches a step, the plan has "
                    f"{self.microbatches}"
                )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.mesh.size

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        return stage_ranks(self.schedule, self.pipeline, self.num_stages)[stage]

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Stages that a pipeline rank runs, in the order of the model."""
        ranks = stage_ranks(self.schedule, self.pipeline, self.num_stages)
        return tuple(stage for stage, rank in enumerate(ranks) if rank == pipeline_rank)

    def check(self, captured: CapturedModel) -> None:
        """Raises PlanMismatchError if the plan was made for another model, or its cuts are not in this one's order."""
        check_model(self.model, self.fingerprint, self.microbatches, captured)
        check_cuts(captured, self.cuts)

    def with_estimate(self, estimate: Estimate) -> "StagedPlan":
        return replace(self, estimate=estimate)

    def without_estimates(self) -> "StagedPlan":
        """What all ranks must agree on: solvers time themselves."""
        stages = tuple(stage.with_estimate(Estimate()) for stage in self.stages)
        return replace(self, stages=stages, estimate=Estimate())

    def to_json(self) -> str:
        body = {
            "schema": STAGED_VERSION,
            "torch": list(TORCH_RANGE),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster,
            "config": asdict(self.config),
            "mesh": {"shape": self.mesh.shape, "names": self.mesh.names},
            "pipeline": self.pipeline,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "cuts": self.cuts,
            "origin": self.origin,
            "estimate": asdict(self.estimate),
            "stages": [json.loads(stage.to_json()) for stage in self.stages],
        }
        return json.dumps(body, indent=1)


def check_cuts(captured: CapturedModel, cuts: tuple[str, ...]) -> None:
    """Raises PlanMismatchError if `cuts` are not calls of the model in the order in which its graph makes them."""
    positions = {n.name: i for i, n in enumerate(captured.graph.nodes) if n.op == "call_function"}
    if unknown := [name for name in cuts if name not in positions]:
        raise PlanMismatchError(
            f"the plan cuts {captured.name} before {', '.join(unknown[:3])}, which it does not compute; plan again"
        )
    first = next(iter(positions), "")
    for before, after in zip((first, *cuts), cuts, strict=False):
        if positions[before] >= positions[after]:
            raise PlanMismatchError(
                f"the plan cuts {captured.name} before {after}, which does not come after {before}: a stage would be "
                "empty; give cuts in the order of the graph"
            )


def is_staged(text: str) -> bool:
    """Whether the text is (some version of) a saved plan with stages."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(body, Mapping) and str(body.get("schema", "")).startswith("stages-")


def load_staged_plan(path: Path) -> StagedPlan:
    """A saved plan with stages.

    Raises:
        PlanMismatchError: if the file is missing or is not such a plan for this library.
    """
    try:
        return staged_plan_from_json(path.read_text())
    except OSError as error:
        raise PlanMismatchError(
            f"plan {path} cannot be read ({error.strerror}); give the path of a plan.json"
        ) from error


def staged_plan_from_json(text: str) -> StagedPlan:
    """The inverse of `StagedPlan.to_json`.

    Raises:
        PlanMismatchError: for another schema version, a torch outside the plan's range, or text that is no such plan.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanMismatchError("this is not a plan that autopar saved: no JSON object") from error
    found = body.get("schema") if isinstance(body, dict) else None
    if found != STAGED_VERSION:
        raise PlanMismatchError(
            f"the plan has schema version {found}, this autopar reads {STAGED_VERSION} for stages; plan again"
        )
    low, high = body["torch"]
    if not in_range(low, high):
        raise PlanMismatchError(f"the plan is for torch >= {low}, < {high}; install such a torch or plan again")
    return StagedPlan(
        model=body["model"],
        fingerprint=body["fingerprint"],
        cluster=body["cluster"],
        config=TrainConfig(**body["config"]),
        mesh=Mesh(shape=tuple(body["mesh"]["shape"]), names=tuple(body["mesh"]["names"])),
        pipeline=body["pipeline"],
        schedule=body["schedule"],
        microbatches=body["microbatches"],
        cuts=tuple(body["cuts"]),
        stages=tuple(plan_from_json(json.dumps(stage)) for stage in body["stages"]),
        origin=body["origin"],
        estimate=Estimate(**body["estimate"]),
    )
