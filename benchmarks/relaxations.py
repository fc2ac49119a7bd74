"""What is the linear relaxation of a strategy graph, and how soon is it known? The dual ascent beside HiGHS's simplex.

    python -m benchmarks.relaxations [--config examples/llama3_8b/config.json] [--meshes 8x8,4x4x4,2x4x8]

Llama-3-8B on 64 GPUs, sequence 8192, batch 64, bf16, with recompute and without, at prices of memory: nothing, and what
makes the limit cost 1, 3 and 10% of the seconds without one. Seconds of CPU of either, on the same reduced graph:
labels' bound as a part of the program's optimum, and what they suggest as a part of it.
"""

import argparse
import time
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.capture import capture
from autopar.lower.program import make_program
from autopar.models import load_model
from autopar.search.costs.pricing import make_pricer
from autopar.search.exact.dual_ascent import dual_ascent
from autopar.search.exact.formulation import formulate
from autopar.search.exact.priced_memory import priced
from autopar.search.exact.reduction import reduce
from autopar.search.exact.relaxation import relax
from autopar.search.graph.build import Builder, build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.strategy_graph import StrategyGraph
from autopar.values.cluster import load_cluster
from autopar.values.mesh import parse_mesh
from autopar.values.train_config import TrainConfig

LIMIT = 80e9
PARTS = (0.0, 0.01, 0.03, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/llama3_8b/config.json")
    parser.add_argument("--meshes", default="8x8,4x4x4,2x4x8")
    arguments = parser.parse_args()
    loaded = load_model(
        spec=f"hf:{arguments.config}", batch=64, seq=8192, overrides={}, precision="bf16", device="meta"
    )
    program = make_program(capture(loaded.model, loaded.args, loaded.kwargs))
    cluster, config = load_cluster("8x8xh100"), TrainConfig(precision="bf16")
    table = Table("mesh", "recompute", "price", "columns", "simplex s", "labels s", "ratio", "bound", "suggested")
    for text in arguments.meshes.split(","):
        pricer = make_pricer(mesh=parse_mesh(text), cluster=cluster, config=config)
        for builder in (Builder, RecomputeBuilder):
            graph = build(program, pricer, limit=LIMIT, builder=builder).graph
            assert graph.memory is not None
            free = relax(reduce(replace(graph, memory=None)).graph).bound
            for part in PARTS:
                prices = np.full(len(graph.memory.base), part * free / LIMIT / len(graph.memory.base))
                row = measured(reduce(priced(graph, prices)).graph)
                table.add_row(str(pricer.mesh), "yes" if builder is RecomputeBuilder else "no", f"{part:.0%}", *row)
    Console(width=120).print(table)


def measured(graph: StrategyGraph) -> list[str]:
    """Both on one graph, which is reduced already."""
    began = time.process_time()
    linear = formulate(graph)
    answer = linear.model.solve(relaxed=True, perturbs=False)
    simplex = time.process_time() - began
    optimum = answer.bound / linear.scale
    began = time.process_time()
    dual = dual_ascent(graph)
    labels = time.process_time() - began
    assert dual is not None
    ratio = f"{simplex / labels:.0f}"
    parts = [f"{dual.bound / optimum:.6f}", f"{dual.seconds / optimum:.6f}"]
    return [str(linear.model.num_columns), f"{simplex:.2f}", f"{labels:.3f}", ratio, *parts]


if __name__ == "__main__":
    main()
