"""Do all eight model families train as one process does when they are cut into stages at random?

    python -m benchmarks.verify_pipelines [--families llama,t5] [--random 20] [--seed 0]

For each family random plans in 2 to 8 stages on 4 and 8 ranks: every schedule, 1 to 8 micro-batches, meshes of 1, 2 and
2x2 ranks a stage, every lifetime, in every third plan half of the ops recomputed. Tiny float64 models (tests/zoo.py),
real Gloo processes. Exit code 1 if any loss is off by more than 1e-10, any gradient on any rank by more than 1e-8
(relative), a rank's peak memory by more than 5%, or other bytes are sent than predicted (with recomputing: more; a
CPU's kernels keep copies of their own).
"""

import argparse
import random
import sys

import torch
from rich.console import Console
from torch import Tensor

from autopar.capture import capture
from autopar.errors import ArgumentError
from autopar.oracle import Subject, check_module
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.promote_casts import promote_casts, promoted_eager
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import parse_mesh
from autopar.values.plan import Plan
from autopar.values.schedules import check_microbatches, parse_pipeline
from autopar.verification import TOLERANCES, PlanCheck, verify_plans
from tests.zoo import SPLIT_FAMILIES, zoo

ROWS = 4
SHAPES = {
    4: (
        *(("2", text) for text in ("gpipe:2", "1f1b:2", "interleaved-1f1b:2:4", "interleaved-1f1b:2:6", "zbv:2")),
        *(("1", text) for text in ("gpipe:4", "1f1b:4", "interleaved-1f1b:4:8", "zbv:4")),
    ),
    8: (("2x2", "1f1b:2"), ("2x2", "zbv:2"), ("2", "interleaved-1f1b:4:8"), ("2", "gpipe:4")),
}
GROUPS = ((4, 1), (4, 2), (4, 5), (4, 8), (8, 4))
"""Ranks and micro-batches."""


def runs(text: str, microbatches: int) -> bool:
    schedule, pipeline, _ = parse_pipeline(text)
    try:
        check_microbatches(schedule, pipeline, microbatches)
    except ArgumentError:
        return False
    return True


def is_good(check: PlanCheck, recomputed: bool) -> bool:
    loss, gradient = TOLERANCES["fp64"]
    wrong = set(check.wrong(loss, gradient))
    less = all(sent <= check.predicted.get(key, (0, 0)) for key, sent in check.counted.items())
    return not (wrong - {"bytes sent"} if recomputed and less else wrong)


def verify(family: str, ranks: int, microbatches: int, count: int, seed: int) -> list[tuple[PlanCheck, bool]]:
    """Checks of random plans of one group, each with whether it is good."""
    model, batch = zoo(family, dtype=torch.float64, batch=ROWS * microbatches, seq=8)
    part = {k: v[:ROWS] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}
    whole = promote_casts(capture(model, (), batch, name=family))
    captured = accumulate_gradients(promote_casts(capture(model, (), part, name=family)), microbatches, lambda: whole)
    values = {k: v.detach() for k, v in (parameters_of(captured, model) | buffers_of(captured, model)).items()}
    subject = Subject(model=model, captured=whole, args=(), kwargs=batch)
    steps = check_module(subject, 3, context=promoted_eager).steps
    inputs = [bind_inputs(captured.inputs, *call) for call in subject.calls(3)]
    rng = random.Random(f"{family} {ranks} {microbatches} {seed}")
    shapes = [(mesh, text) for mesh, text in SHAPES[ranks] if runs(text, microbatches)]
    plans: dict[str, Plan] = {}
    for number in range(count):
        mesh, text = rng.choice(shapes)
        schedule, pipeline, num_stages = parse_pipeline(text)
        cuts, share = random_cuts(captured, num_stages, rng), 0.5 * (number % 3 == 2)
        plan = random_staged_plan(captured, parse_mesh(mesh), schedule, pipeline, cuts, rng, recompute=share)
        plans[f"{number} {text} of {mesh}"] = plan
    checks = verify_plans(captured, values, inputs, plans, wanted=steps, reference=whole)
    return [(check, is_good(check, bool(plans[check.plan].stages[0].recompute))) for check in checks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(SPLIT_FAMILIES))
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(width=150)
    num_checked = num_failed = 0
    for family in arguments.families.split(","):
        checks = [
            pair
            for ranks, microbatches in GROUPS
            for pair in verify(family, ranks, microbatches, -(-arguments.random // len(GROUPS)), arguments.seed)
        ]
        failed = [check for check, good in checks if not good]
        num_checked, num_failed = num_checked + len(checks), num_failed + len(failed)
        farthest = max((c.peak_error for c, _ in checks), key=abs)
        console.print(
            f"{family:8} {len(checks):3} plans: worst loss {max(c.loss_error for c, _ in checks):.0e}, gradient "
            f"{max(c.gradient_error for c, _ in checks):.0e}, predicted peak {farthest:+.1%}, failed {len(failed)}",
            style="red" if failed else "",
            highlight=False,
        )
        for check in failed:
            console.print(f"    {check.plan}: {check.peak_error:+.1%}, {check}", style="red", highlight=False)
    console.print(f"{num_checked} plans, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
