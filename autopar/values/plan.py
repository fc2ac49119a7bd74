"""What was decided, as a value: where the model is cut, which rank runs which stage, and what each stage decides.

A plan is one or more stages. Every stage is a captured model of its own (`passes.split_stages`; one stage is the model
itself), with what is decided of it on a mesh of its own; all these meshes have one shape. The pipeline axis is the
outermost: global rank = pipeline rank · mesh size + rank within the mesh. Stage s of S runs on the pipeline rank

    gpipe, 1f1b          s                              S = p
    interleaved-1f1b     s mod p                        S = v p, v >= 2
    zbv                  s, then back: 2p - 1 - s       S = 2p

which is where `torch.distributed.pipelining` looks for it. One stage on one rank is `1f1b`: each micro-batch runs
forward, then backward. Saved as JSON (schema `VERSION`), a plan is refused for another model or mesh (`plan_file`).
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autopar.errors import ArgumentError, PlanMismatchError
from autopar.values.estimate import Estimate
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.schedules import check_microbatches, stage_ranks
from autopar.values.stage_plan import StagePlan, check_model
from autopar.values.train_config import TrainConfig
from autopar.values.version import TORCH_RANGE
from autopar.values.whole_file import write_whole

VERSION = 5
"""Schema of a saved plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A distribution of one captured model (that of one micro-batch) over one stage or more.

    model, fingerprint: of the whole model; stages have their own.
    mesh: of one stage; every pipeline rank has as many devices.
    cuts: for each stage after the first, the name of its first call in the order of the whole model's graph.
    stages: what is decided of each, in the order of the model; cluster and config of the whole are theirs, what they
        take is estimated of the whole.
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
    stages: tuple[StagePlan, ...]
    origin: str = "stages"
    estimate: Estimate = field(default_factory=Estimate)

    def __post_init__(self) -> None:
        """Raises ArgumentError if the parts do not make a pipeline."""
        own = (replace(s, cluster=self.cluster, config=self.config, estimate=Estimate()) for s in self.stages)
        object.__setattr__(self, "stages", tuple(own))
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
    def arrangement(self) -> str:
        """Stages, pipeline ranks and the mesh of each, in words."""
        if self.num_stages == 1:
            return f"mesh {self.mesh}"
        return f"{self.num_stages} stages on {self.pipeline} pipeline ranks of mesh {self.mesh}"

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

    def with_estimate(self, estimate: Estimate) -> "Plan":
        return replace(self, estimate=estimate)

    @property
    def single(self) -> StagePlan:
        """The one stage of a plan of one, with the estimate, as the search of a mesh knows it.

        Raises:
            ArgumentError: if there are several.
        """
        if self.num_stages != 1:
            raise ArgumentError(f"a plan of {self.num_stages} stages has no single one; use plan.stages")
        return self.stages[0].with_estimate(self.estimate)

    def to_json(self) -> str:
        """The plan as JSON text."""
        body = {
            "schema": VERSION,
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
            "stages": [stage.to_body() for stage in self.stages],
            "call": None,
            "source": None,
            "checked": "",
        }
        return json.dumps(body, indent=1)

    def save(self, path: str | Path) -> None:
        write_whole(path, self.to_json())


def decided(plan: Plan) -> str:
    """A hash of what a plan decides: not of what it is estimated to take, nor of where its model was found."""
    body = json.loads(plan.to_json())
    for said in ("estimate", "origin", "cluster", "torch", "call", "source", "checked"):
        del body[said]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def one_stage(stage: StagePlan) -> Plan:
    """The plan of a model in one stage, which is the whole of it."""
    return Plan(
        model=stage.model,
        fingerprint=stage.fingerprint,
        cluster=stage.cluster,
        config=stage.config,
        mesh=stage.mesh,
        pipeline=1,
        schedule="1f1b",
        microbatches=stage.microbatches,
        cuts=(),
        stages=(stage,),
        origin=stage.origin,
        estimate=stage.estimate,
    )


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
