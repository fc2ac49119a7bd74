"""How far is the double recursion from the best, and how long does it take?

    python -m benchmarks.double_recursion [--families llama,t5] [--meshes 4,2x2] [--llama 8x8] [--blocks 100] [--json]

A row a model and mesh: seconds a step of its plan over those of the ILP's plan and over the ILP's bound, and the CPU
seconds that each took to decide (the ILP: build and solve), the model's tables (`make_program`) not counted. The model
zoo on CPUs whose links let splitting pay (tests/search_cases.py), at two bandwidths; Llama-3-8B, sequence 8192, batch
64, bf16, on 8x8xh100, without a limit and under --memory-gb. Then a Llama of --blocks blocks on 1,000 devices, one axis
a prime factor, where no ILP is built. --families, --llama or --blocks given as "" or 0 leaves that part out.
"""

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.models import load_model
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.recursion.double_recursion import double_recursion, prime_mesh
from autopar.search.recursion.to_plan import plan_of
from autopar.values.cluster import load_cluster, with_memory
from autopar.values.mesh import Mesh, parse_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, program_of
from tests.zoo import FAMILIES

GAP = 1e-3


def compare(name: str, program: Program, pricer: Pricer, limit: float | None, solve_seconds: float) -> dict[str, Any]:
    """One row: both solvers."""
    row: dict[str, Any] = {"model": name, "mesh": "x".join(map(str, pricer.mesh.shape))}
    began = time.process_time()
    decider = double_recursion(program, pricer, limit=limit)
    row["recursion_cpu"] = time.process_time() - began
    row["recursion"] = evaluate_program(plan_of(decider, program), program, pricer).step_seconds
    began = time.process_time()
    problem = build(program, pricer, limit=limit)
    built = time.process_time()
    solution = solve(problem.graph, relative_gap=GAP, seconds=solve_seconds)
    row |= {"build_cpu": built - began, "ilp_cpu": time.process_time() - built}
    row |= {"ilp": solution.seconds, "bound": solution.bound, "ilp_status": solution.status}
    row["over_ilp"] = row["recursion"] / solution.seconds
    row["over_bound"] = row["recursion"] / solution.bound
    return row


def llama(num_blocks: int, batch: int, seq: int) -> Program:
    loaded = load_model(
        "hf:examples/llama3_8b",
        batch=batch,
        seq=seq,
        precision="bf16",
        overrides={"num_hidden_layers": str(num_blocks)},
        device="meta",
    )
    return make_program(capture(loaded.model, loaded.args, loaded.kwargs))


def thousand_devices(num_blocks: int) -> dict[str, Any]:
    """Seconds to decide on 125 nodes of 8, mesh 5x5x5x2x2x2, memory aside and within what a device has."""
    program = llama(num_blocks, 1000, 2048)
    cluster = load_cluster("125x8xh100")
    row: dict[str, Any] = {"model": f"llama, {num_blocks} blocks", "devices": cluster.num_devices}
    for what, limit in (("free", None), ("limited", cluster.device.memory_bytes)):
        pricer = make_pricer(mesh=prime_mesh(cluster), cluster=cluster, config=TrainConfig(precision="bf16"))
        began = time.process_time()
        decider = double_recursion(program, pricer, limit=limit)
        row[f"{what}_cpu"] = time.process_time() - began
        row[f"{what}_step_seconds"] = decider.seconds()
    row["mesh"] = _shape(pricer.mesh)
    row |= {"ops": len(program.ops), "clusters": len(decider.neighbours.clusters)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--meshes", default="4,2x2")
    parser.add_argument("--llama", default="8x8,4x4x4")
    parser.add_argument("--memory-gb", type=float, default=66.0)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one ILP solve")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(width=150, stderr=arguments.json)
    rows: list[dict[str, Any]] = []
    for family in filter(None, arguments.families.split(",")):
        for bandwidth in (5e9, 5e8):
            for mesh in map(parse_mesh, arguments.meshes.split(",")):
                pricer = make_pricer(mesh=mesh, cluster=machine(mesh.size, bandwidth), config=TrainConfig())
                name = f"{family}, {bandwidth / 1e9:g} GB/s"
                rows.append(compare(name, program_of(family), pricer, None, arguments.seconds))
                console.print(rows[-1], highlight=False)
    if arguments.llama:
        rows += _llama_rows(arguments.llama.split(","), arguments.memory_gb, arguments.seconds, console)
    large = thousand_devices(arguments.blocks) if arguments.blocks else {}
    if arguments.json:
        print(json.dumps({"compared": rows, "thousand_devices": large}, indent=1))
        return
    console.print(_table(rows))
    console.print(large, highlight=False)


def _llama_rows(meshes: list[str], memory_gb: float, seconds: float, console: Console) -> list[dict[str, Any]]:
    program = llama(32, 64, 8192)
    cluster = load_cluster("8x8xh100")
    rows = []
    for mesh in map(parse_mesh, meshes):
        for limit in (None, memory_gb * 1e9):
            machine_of = cluster if limit is None else with_memory(cluster, int(limit))
            pricer = make_pricer(mesh=mesh, cluster=machine_of, config=TrainConfig(precision="bf16"))
            name = "llama-3-8b" + ("" if limit is None else f", {memory_gb:g} GB")
            try:
                rows.append(compare(name, program, pricer, limit, seconds))
            except InfeasibleError as error:
                rows.append({"model": name, "mesh": _shape(mesh), "error": str(error)})
            console.print(rows[-1], highlight=False)
    return rows


def _shape(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "mesh", "recursion s", "over ILP", "over bound", "CPU s", "ILP CPU s")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["mesh"], row["error"])
            continue
        table.add_row(
            row["model"],
            row["mesh"],
            f"{row['recursion']:.5g}",
            f"{row['over_ilp']:.3f}",
            f"{row['over_bound']:.3f}",
            f"{row['recursion_cpu']:.2f}",
            f"{row['build_cpu']:.2f} + {row['ilp_cpu']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
