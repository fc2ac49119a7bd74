"""Calibrate this machine, predict, then measure: how far are collectives and whole training steps from predictions?

    python -m benchmarks.calibration [--json] [--ranks 4] [--meshes 4,2x2] [--interleaved] [--keep FILE] [--quick]

1. What `autopar calibrate` measures on Gloo processes of this machine, message sizes from 1 KB to 64 MB.
2. All-reduce, all-gather, reduce-scatter and all-to-all measured again, at 9 sizes, most of them others.
3. A small Llama trains under DDP, FSDP and Megatron's tensor parallelism, in the distributed modules that autopar makes
   of the plans. Predictions are the planner's own, from the cluster file that 1 gives.

With --interleaved the rounds of the three take turns: on a machine that others use, minutes differ from minutes, and
only what was measured at the same time compares. Predictions see the calibration's measurements alone either way.
Exit code 1 if the median error of a collective, or the error of a step, is beyond 20%.
"""

import argparse
import dataclasses
import json
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from autopar.calibration.check import CheckRow, compared, median_errors
from autopar.calibration.file import calibration_toml
from autopar.calibration.fit import fit_cluster
from autopar.calibration.measure import Effort
from autopar.calibration.processes import on_processes
from autopar.calibration.timing import interquartile_mean
from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.search.costs.evaluate import evaluate
from autopar.search.known.baselines import make_baseline
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import parse_mesh
from autopar.values.plan import one_stage
from autopar.values.serialize import dump
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from benchmarks.calibration_steps import Seen, Work, measure_all, small_llama

TOLERANCE = 0.2
FOUR = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ORDER = ("calibration", "fresh", "steps")
BASELINES = ("ddp", "fsdp", "megatron")
TIMEOUT_SECONDS = 3000.0
CALIBRATION = Effort(kinds=FOUR, num_sizes=13, dtypes=("fp32",))
FRESH = Effort(kinds=FOUR, num_sizes=9, dtypes=("fp32",))
QUICK = {"num_sizes": 6, "most_nbytes": 1 << 20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--meshes", default="4,2x2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--interleaved", action="store_true", help="the three parts take turns")
    parser.add_argument("--keep", type=Path, help="write the calibrated cluster file here")
    parser.add_argument("--quick", action="store_true", help="few and small messages, to try the benchmark itself")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json, width=120)
    quick: dict[str, Any] = QUICK if arguments.quick else {}
    # Steps are few, long and as noisy as anything: two of each plan a round.
    parts, rounds = ("calibration", "steps", "fresh", "steps"), arguments.rounds
    turns = parts * rounds if arguments.interleaved else tuple(sorted(parts * rounds, key=ORDER.index))

    model, kwargs = small_llama(hidden=256, layers=4, seq=128, batch=16, vocabulary=2048)
    captured = capture(model, (), kwargs, name="small llama")
    plans = make_plans(captured, arguments.ranks, arguments.meshes.split(","))
    values = {k: v.detach() for k, v in (parameters_of(captured, model) | buffers_of(captured, model)).items()}
    inputs = {spec.placeholder: kwargs[spec.path] for spec in captured.inputs}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="autopar-calibration-") as name, console.status("") as status:
        (Path(name) / "captured").write_bytes(dump(captured))
        torch.save({"values": values, "inputs": inputs}, Path(name) / "tensors.pt")
        (Path(name) / "plans").write_bytes(
            pickle.dumps({label: one_stage(plan).to_json() for label, plan in plans.items()})
        )
        work = Work(
            folder=name,
            calibration=dataclasses.replace(CALIBRATION, **quick),
            fresh=dataclasses.replace(FRESH, **quick),
            turns=turns,
        )

        def tell(text: str) -> None:
            status.update(text)
            load.append(os.getloadavg()[0])

        seen: Seen = on_processes(
            measure_all, work, num_processes=arguments.ranks, timeout_seconds=TIMEOUT_SECONDS, tell=tell
        )[0]

    cluster = fit_cluster(seen.calibration, "calibrated")
    if arguments.keep is not None:
        arguments.keep.write_text(calibration_toml(cluster, seen.calibration), encoding="utf-8")
    fitted, rows = median_errors(compared(cluster, seen.calibration)), compared(cluster, seen.fresh)
    errors = median_errors(rows)
    steps = compared_steps(captured, plans, cluster, seen)
    print_collectives(rows, errors, fitted, console)
    print_steps(steps, console)
    passed = all(errors[kind] <= TOLERANCE for kind in FOUR) and all(abs(step["error"]) <= TOLERANCE for step in steps)
    console.print(f"load of the machine: {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores", highlight=False)
    console.print("all within 20%" if passed else "NOT all within 20%", style="green" if passed else "red")
    if arguments.json:
        result = {
            "passed": passed,
            "fit_errors": fitted,
            "errors": errors,
            "load": [min(load), max(load)],
            "steps": steps,
            "collectives": [dataclasses.asdict(row) for row in rows],
        }
        print(json.dumps(result, indent=1))
    return 0 if passed else 1


def make_plans(captured: CapturedModel, ranks: int, meshes: list[str]) -> dict[str, StagePlan]:
    """The baselines that apply, made before anything is calibrated."""
    cluster, plans = load_cluster(f"{ranks}xcpu"), {}
    for mesh in meshes:
        for name in BASELINES:
            try:
                plan = make_baseline(name, captured, cluster, parse_mesh(mesh), TrainConfig(precision="fp32"))
            except InfeasibleError:
                continue
            plans[f"{name} on {mesh}"] = plan
    return plans


def compared_steps(
    captured: CapturedModel, plans: dict[str, StagePlan], cluster: Cluster, seen: Seen
) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each plan."""
    steps = []
    for label, plan in plans.items():
        estimate = evaluate(plan, captured, cluster)
        seconds = seen.steps[label]["step"]
        typical = interquartile_mean(seconds)
        steps.append(
            {
                "plan": label,
                "predicted": estimate.step_seconds,
                "measured": typical,
                "error": estimate.step_seconds / typical - 1,
                "fastest": min(seconds),
                "slowest": max(seconds),
                "predicted_parts": {kind: part for kind, part in estimate.seconds.items() if part},
                "measured_parts": {part: interquartile_mean(own) for part, own in seen.steps[label].items()},
            }
        )
    return steps


def print_collectives(
    rows: tuple[CheckRow, ...], errors: dict[str, float], fitted: dict[str, float], console: Console
) -> None:
    for row in rows:
        console.print(
            f"{row.subject:16} {row.what:32} predicted {row.predicted * 1e3:9.3f} ms  measured "
            f"{row.measured * 1e3:9.3f} ms  {row.error:+5.0%}",
            highlight=False,
        )
    for kind, error in errors.items():
        console.print(
            f"{kind:16} median error {error:.1%} (of the fit to the calibration {fitted[kind]:.1%})",
            style="bold",
            highlight=False,
        )


def print_steps(steps: list[dict[str, Any]], console: Console) -> None:
    for step in steps:
        parts = ", ".join(f"{part} {seconds * 1e3:.0f}" for part, seconds in step["predicted_parts"].items())
        console.print(
            f"{step['plan']:16} predicted {step['predicted'] * 1e3:6.0f} ms  measured {step['measured'] * 1e3:6.0f} ms "
            f"({step['fastest'] * 1e3:.0f} to {step['slowest'] * 1e3:.0f})  {step['error']:+5.0%}   predicted: {parts}",
            highlight=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
