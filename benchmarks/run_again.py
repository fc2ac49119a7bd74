"""What does it take to run blocks again in backward, beside what is predicted? Steps that do and steps that do not.

    autopar calibrate --processes 4 --out measured.toml
    python -m benchmarks.run_again --cluster measured.toml --processes 4

The models of the race, each on one rank, in as many processes at once as were calibrated, whose cores they share: a
step that keeps everything and one that runs all calls of its blocks again take turns. Printed are medians over rounds
of the first process, and what the cluster's device says.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import autopar
from autopar.lower.emit import emit
from autopar.lower.program import Program, make_program
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.runtime import DistributedModule
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import make_pricer
from autopar.values.cluster import load_cluster
from benchmarks.race_models import MODELS, make

OPTIMIZER, IN_A_ROW, BARRIER_SECONDS = "adamw-fused", 5, 300


def main(
    cluster: Annotated[str, typer.Option(help="A file that autopar calibrate wrote.")],
    processes: Annotated[int, typer.Option(help="At once; as many as were calibrated.")] = 4,
    models: str = ",".join(MODELS),
    rounds: int = 20,
) -> None:
    print(f"{'ms a step':8} {'calls':>6} {'kept':>8} {'said':>8} {'again':>8} {'said':>8} {'more':>8} {'said':>8}")
    for model in models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            barrier = mp.get_context("spawn").Barrier(processes)
            mp.spawn(_run, (model, cluster, rounds, folder, barrier), processes)  # type: ignore[no-untyped-call]


def _run(process: int, model: str, cluster: str, rounds: int, folder: str, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[process * len(cores) // barrier.parties]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/{process}", rank=0, world_size=1)
    module, batch = make(model)
    device = replace(load_cluster("1xcpu"), device=load_cluster(Path(cluster)).device)
    kept = autopar.plan(module, batch, cluster=device, mesh="1", optimizer=OPTIMIZER, precision="fp32")
    program = make_program(kept.captured)
    names = _calls_of_blocks(program)
    pricer = make_pricer(mesh=kept.mesh, cluster=device, config=kept.config)
    said, steps = [], []
    for recompute in (frozenset[str](), names):
        plan = replace(kept.single, recompute=recompute)
        said.append(evaluate_program(plan, program, pricer).step_seconds)
        values = parameters_of(kept.captured, module) | buffers_of(kept.captured, module)
        local = emit(kept.captured, plan)
        own = DistributedModule(local, {name: value.detach().clone() for name, value in values.items()})
        steps.append(_step(own, {i.placeholder: batch[str(i.path)] for i in kept.captured.inputs}))
    seen: list[list[float]] = [[], []]
    for _ in range(rounds):
        for seconds, step in zip(seen, steps, strict=True):
            barrier.wait(BARRIER_SECONDS)
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                step()
            seconds.append((time.perf_counter() - start) / IN_A_ROW)
    barrier.wait(BARRIER_SECONDS)
    if process == 0:
        medians = [statistics.median(seconds) for seconds in seen]
        pairs = [*zip(medians, said, strict=True), (medians[1] - medians[0], said[1] - said[0])]
        print(f"{model:8} {len(names):7} " + " ".join(f"{1e3 * s:8.2f}" for pair in pairs for s in pair), flush=True)
    dist.destroy_process_group()


def _calls_of_blocks(program: Program) -> frozenset[str]:
    """Calls inside numbered modules, views aside, that backward may run again."""
    blocks = [op for op in program.ops if any(part.isdecimal() for part in op.module.split("."))]
    return frozenset(op.name for op in blocks if op.has_backward and op.rule.alias is None)


def _step(module: DistributedModule, inputs: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        module.step(inputs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


if __name__ == "__main__":
    typer.run(main)
