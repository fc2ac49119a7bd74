"""Does a planned model train as the original does? Plan, print, export, train both, compare: exit code 1 if they part.

    make demo        or, from the repository's root:        python -m examples.demo.demo

One process trains the model as it is; four Gloo processes train what autopar made of it for a 2x2 mesh, on the same
batches. Both start from the same weights, so their losses may differ by rounding only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import autopar
from examples.demo.curves import largest_difference, side_by_side
from examples.demo.data import batches, corpus
from examples.demo.model import GLOBAL_BATCH, SEQUENCE, llama
from examples.demo.training import LEARNING_RATE, NUM_STEPS, train

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "demo"
NUM_PROCESSES = 4
TOLERANCE = 1e-4  # loss, float32: cutting the batch in four parts on one process moves 40 losses by 6e-7 at most

Report = Callable[[int, float], None]


def train_in_one_process(report: Report) -> list[float]:
    """The whole model in this process: what the distributed run must equal.

    One thread, as each of the four processes has: two threads that wait for each other took 0.28 s a step on two idle
    cores, but 9.5 s on two busy ones, where one thread took 1.1 s.
    """
    model, _ = llama()
    torch.set_num_threads(1)
    steps = batches(corpus(), num_steps=NUM_STEPS, batch=GLOBAL_BATCH, sequence=SEQUENCE)
    return train(model, steps, LEARNING_RATE, report)


def train_in_processes(command: list[str], log: Path, report: Report) -> list[float]:
    """Run `command`, which prints `{"step", "loss"}` lines, and report each as it comes; returns the losses.

    Its other lines and its standard error go to `log`. Raises RuntimeError with the log's end if it fails.
    """
    losses = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith('{"step"'):
                    errors.write(line)
                    continue
                losses.append(json.loads(line)["loss"])
                report(len(losses), losses[-1])
        except BaseException:
            process.terminate()  # torchrun stops its workers; an interrupted demo leaves none behind
            raise
    if process.returncode:
        end = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"the {NUM_PROCESSES}-process run ended with exit code {process.returncode}:\n{end}")
    return losses


def run_with_progress(console: Console, title: str, run: Callable[[Report], list[float]]) -> list[float]:
    """Run with a live bar, and every tenth step as a line of its own (all that a log file or a pipe will see)."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=NUM_STEPS)

        def report(step: int, loss: float) -> None:
            progress.update(task, completed=step)
            if step == 1 or step % 10 == 0:
                progress.console.print(f"  {title}: step {step:3d} of {NUM_STEPS}, loss {loss:.4f}", highlight=False)

        return run(report)


def main() -> int:
    console = Console()
    console.rule("1  plan")
    model, example = llama()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Llama, {num_parameters / 1e6:.1f} million parameters, global batch {GLOBAL_BATCH} x {SEQUENCE} bytes"
    )
    with console.status("planning for 4 CPU processes on a 2x2 mesh"):
        plan = autopar.plan(model, example, cluster="4xcpu", mesh="2x2", optimizer="adamw", precision="fp32")
    print(plan)
    plan.export(OUT)
    console.print(f"exported to {OUT.relative_to(ROOT)}: " + ", ".join(sorted(file.name for file in OUT.iterdir())))

    console.rule(f"2  train, {NUM_STEPS} steps")
    one = run_with_progress(console, "one process", train_in_one_process)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    command = [*torchrun, "-m", "examples.demo.worker", str(OUT / "plan.json")]
    try:
        four = run_with_progress(
            console, "four processes", lambda report: train_in_processes(command, OUT / "workers.log", report)
        )
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1

    console.rule("3  compare")
    console.print(side_by_side({"one process": one, "four processes, planned": four}))
    difference, step = largest_difference(one, four)
    same = difference <= TOLERANCE
    verdict = "the same training" if same else "the runs part"
    console.print(
        f"largest difference of the losses: {difference:.1e} at step {step} (tolerance {TOLERANCE:.0e}): {verdict}",
        style="green" if same else "red",
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
