"""Which runs are there? Plans of a small model, faults, and the jobs that make runs of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import tests.runtime_cases as cases
from autopar.search.known.baselines import make_baseline
from autopar.values.cluster import load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.placement import REPLICATE, Layout, Placement, Shard
from autopar.values.plan import Plan, one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from benchmarks import fault_points, fault_saves
from benchmarks.fault_points import Point
from tests import word_pipelines
from tests.shared_graphs import SHARED

DROPOUT = 0.1
STAGES, WIDE_STAGES, ALIKE = "2 stages", "2 stages of 2 ranks", "no collectives"
KINDS = {
    "ddp": (2, "ddp"),
    "fsdp": (2, "fsdp:recompute=full"),
    STAGES: (2, ""),
    WIDE_STAGES: (4, ""),
    ALIKE: (2, "ddp"),
}
"""Plans: ranks, and the named configuration where there are no stages."""

POINTS: Mapping[str, Mapping[str, Point]] = {
    "ddp": fault_points.SINGLE | fault_points.BACKWARD_COLLECTIVES,
    "fsdp": fault_points.SINGLE
    | fault_points.BACKWARD_COLLECTIVES
    | fault_points.FORWARD_COLLECTIVES
    | fault_points.REPLAYS,
    STAGES: fault_points.STAGED,
    WIDE_STAGES: fault_points.STAGED | fault_points.INSIDE_STAGES,
    ALIKE: fault_points.SINGLE,
}
"""Points of a step, by plan."""

SAVE_POINTS = fault_saves.EVERY_RANK | fault_saves.FIRST_RANK | fault_saves.BESIDE
STEPS, STRUCK_STEP, STRUCK_SAVE = 5, 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a rank, at which point of a step or save. how: killed, stopped, read-only, or noted: nothing."""

    rank: int
    how: str
    point: str
    kind: str

    @property
    def in_save(self) -> bool:
        return self.point in SAVE_POINTS

    @property
    def target(self) -> Point:
        return SAVE_POINTS[self.point] if self.in_save else POINTS[self.kind][self.point]

    @property
    def step(self) -> int:
        """The step in which it strikes, or after which it strikes in the save."""
        return STRUCK_SAVE if self.in_save else STRUCK_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. folder: of outputs. root: of checkpoints. resumes: from the newest checkpoint. slow: saves take long."""

    kind: str
    folder: str
    root: str
    name: str
    fault: Fault | None = None
    resumes: bool = False
    asynchronous: bool = False
    slow: bool = False
    timeout_seconds: float = 10.0

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Job":
        fault = found.pop("fault")
        return cls(**found, fault=None if fault is None else Fault(**fault))

    @property
    def world(self) -> int:
        return KINDS[self.kind][0]

    @property
    def is_staged(self) -> bool:
        return not KINDS[self.kind][1]

    @property
    def saved_steps(self) -> tuple[int, ...]:
        return (1, 2, 3) if self.slow else (1, 2, 4)

    def output(self, rank: int) -> str:
        return f"{self.folder}/{self.name}-{rank}.txt"

    def digests(self, rank: int) -> Path:
        return Path(f"{self.folder}/{self.name}-{rank}.jsonl")

    def noted(self) -> Path:
        """When the fault struck."""
        return Path(f"{self.folder}/{self.name}-struck.txt")


def make_cases() -> None:
    """Capture and plan, once for all processes; a process that has planned has threads, and is not copied."""
    cases.captured(DROPOUT, word_pipelines.MICROBATCHES)
    for kind, (world, named) in KINDS.items():
        if not named:
            plan = word_pipelines.plan_of("1f1b", (world // 2,), 2, dropout=DROPOUT, seed=1)
        else:
            captured, mesh = cases.captured(DROPOUT), make_mesh((world,))
            own = make_baseline(named, captured, load_cluster(f"{world}xcpu"), mesh, TrainConfig(precision="fp64"))
            plan = one_stage(without_collectives(own) if kind == ALIKE else own)
        _plan_file(kind).write_text(plan.to_json())


def load_cases() -> None:
    """What every rank needs, once for all that are copies of this process."""
    torch.set_num_threads(1)
    cases.captured(DROPOUT)
    cases.captured(DROPOUT, word_pipelines.MICROBATCHES)
    for kind in KINDS:
        plan_of(kind)


@cache
def plan_of(kind: str) -> Plan:
    return plan_from_json(_plan_file(kind).read_text())


def _plan_file(kind: str) -> Path:
    return Path(os.environ[SHARED]) / f"faults-{kind}.json"


def without_collectives(plan: StagePlan) -> StagePlan:
    """Every rank computes everything."""
    layouts = {name: Layout(tuple(map(_whole, own.axes))) for name, own in plan.layouts.items()}
    whole = ("invariant",) * len(plan.mesh.shape)
    lifetimes = dict.fromkeys(plan.lifetimes, "always")
    return replace(plan, layouts=layouts, choices=dict.fromkeys(plan.choices, whole), lifetimes=lifetimes, buckets=())


def _whole(placement: Placement) -> Placement:
    return REPLICATE if isinstance(placement, Shard) else placement
