"""Do all eight model families train as one process does, under the best plan, every baseline and random plans?

    python -m benchmarks.verify_families [--families llama,t5] [--meshes 4,2x2,2x2x2] [--random 20] [--seed 0]
                                        [--device cuda]

Tiny float64 models (tests/zoo.py), real Gloo processes. A row a family and mesh; exit code 1 if any loss is off by more
than 1e-10, any gradient on any rank by more than 1e-8 (relative), any collective sends other bytes than predicted, or
any rank's peak of tensors is more than 5% from the prediction.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.oracle import Subject, check_module
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.promote_casts import promote_casts, promoted_eager
from autopar.search.known.baselines import BASELINES, make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.search.timeline.buckets import with_buckets
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import Mesh, parse_mesh
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from autopar.verification import DEVICES, TOLERANCES, PlanCheck, verify_plans
from tests.zoo import FAMILIES, zoo


def plans_for(
    captured: CapturedModel, mesh: Mesh, num_random: int, seed: int
) -> tuple[dict[str, StagePlan], dict[str, str]]:
    """The best plan and the baselines that apply, also in buckets, and random plans, every second one in random
    buckets; and why the other baselines do not apply."""
    cluster = load_cluster(f"{mesh.size}xcpu")
    config = TrainConfig(precision="fp64")
    plans = {"ilp": make_plan(captured, cluster, mesh, config, SearchOptions(with_baselines=False))}
    reasons = {}
    for name in BASELINES:
        try:
            plans[name] = make_baseline(name, captured, cluster, mesh, config)
        except InfeasibleError as error:
            reasons[name] = str(error)
    fused = {f"{name} in buckets": with_buckets(plan, captured, cluster) for name, plan in plans.items()}
    plans |= {name: plan for name, plan in fused.items() if plan.buckets}
    rng = random.Random(f"{captured.name} {mesh.shape} {seed}")
    for i in range(num_random):
        plan = random_plan(captured, mesh, rng)
        plans[f"random {i}"] = random_buckets(plan, captured, rng) if i % 2 else plan
    return plans, reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Plans of a model on a mesh: their names, why baselines do not apply, the worst errors of all (loss, gradient,
    predicted peak), and the checks that failed."""

    plans: tuple[str, ...]
    reasons: tuple[str, ...]
    worst: tuple[float, float, float]
    failed: tuple[PlanCheck, ...]

    def line(self) -> str:
        loss, gradient, peak = self.worst
        return f"worst loss {loss:.0e}, gradient {gradient:.0e}, predicted peak {peak:+.1%}, failed {len(self.failed)}"


def verified(
    captured: CapturedModel,
    model: nn.Module,
    kwargs: Mapping[str, Any],
    meshes: Sequence[Mesh],
    num_random: int,
    seed: int,
    *,
    against_module: bool = True,
    device: str = "cpu",
) -> Iterator[Verified]:
    """What `verify_plans` finds on each mesh, compared with the module or, without that, with its graph."""
    values = {k: v.detach() for k, v in (parameters_of(captured, model) | buffers_of(captured, model)).items()}
    subject = Subject(model=model, captured=captured, args=(), kwargs=dict(kwargs))
    steps = check_module(subject, 3, context=promoted_eager).steps
    inputs = [bind_inputs(captured.inputs, *call) for call in subject.calls(3)]
    for mesh in meshes:
        plans, reasons = plans_for(captured, mesh, num_random, seed)
        wanted = steps if against_module and device == "cpu" else None
        whole = {label: one_stage(plan) for label, plan in plans.items()}
        checks = list(verify_plans(captured, values, inputs, whole, wanted=wanted, device=device))
        found = [(c.loss_error, c.gradient_error, c.peak_error) for c in checks]
        loss, gradient, peak = (max(column, key=abs) for column in zip(*found, strict=True))
        yield Verified(
            plans=tuple(plans),
            reasons=tuple(reasons.values()),
            worst=(loss, gradient, peak),
            failed=tuple(c for c in checks if c.wrong(*TOLERANCES["fp64"])),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--meshes", default="4,2x2,2x2x2")
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", choices=tuple(DEVICES), help="cuda: GPUs, shared if too few")
    arguments = parser.parse_args()
    console = Console(width=150)
    num_checked = num_failed = 0
    meshes = [parse_mesh(text) for text in arguments.meshes.split(",")]
    for family in arguments.families.split(","):
        model, kwargs = zoo(family, dtype=torch.float64, dropout=arguments.dropout)
        captured = promote_casts(capture(model, (), kwargs, name=family))
        options = {"against_module": not arguments.dropout, "device": arguments.device}
        rows = verified(captured, model, kwargs, meshes, arguments.random, arguments.seed, **options)
        for mesh, row in zip(meshes, rows, strict=True):
            num_checked, num_failed = num_checked + len(row.plans), num_failed + len(row.failed)
            named = ", ".join(name for name in row.plans if not name.startswith("random"))
            console.print(
                f"{family:8} {mesh!s:6} {len(row.plans):3} plans ({named}): {row.line()}",
                style="red" if row.failed else "",
                highlight=False,
            )
            for reason in row.reasons:
                console.print(f"    {reason}", style="dim", highlight=False)
            for check in row.failed:
                console.print(f"    {check.plan}: {check}", style="red", highlight=False)
    console.print(f"{num_checked} plans, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
