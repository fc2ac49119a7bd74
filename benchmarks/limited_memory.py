"""How long does a plan take where the memory limit binds? Build and solve of Llama-3-8B on 64 GPUs, in CPU seconds.

    python -m benchmarks.limited_memory [--meshes 8x8,4x4x4,2x4x8] [--parts 0.05,0.2,0.6] [--gap 0.005] [--recompute]

Limits lie so far of the way from the least that fits to what the fastest plan takes; sequence 8192, batch 64, bf16. The
strategy graph alone, as `search.ilp` takes it, no retries for what is counted more finely later.
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.lower.program import make_program
from autopar.models import load_model
from autopar.search.costs.pricing import make_pricer
from autopar.search.exact.ilp import solve
from autopar.search.exact.least_peak import least_peak
from autopar.search.exact.under_limit import UnderLimit
from autopar.search.graph.build import Builder, build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.strategy_graph import usage
from autopar.values.cluster import load_cluster
from autopar.values.mesh import parse_mesh
from autopar.values.train_config import TrainConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", default="8x8,4x4x4,2x4x8")
    parser.add_argument("--parts", default="0.05,0.2,0.6")
    parser.add_argument("--gap", type=float, default=5e-3)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    spec = "hf:examples/llama3_8b/config.json"
    loaded = load_model(spec=spec, batch=64, seq=8192, overrides={}, precision="bf16", device="meta")
    program = make_program(capture(loaded.model, loaded.args, loaded.kwargs))
    cluster, config = load_cluster("8x8xh100"), TrainConfig(precision="bf16")
    builder = RecomputeBuilder if arguments.recompute else Builder
    table = Table("mesh", "limit GB", "build s", "solve s", "wall s", "step s", "gap")
    for text in arguments.meshes.split(","):
        plain = make_pricer(mesh=parse_mesh(text), cluster=cluster, config=config)
        graph = build(program, plain, limit=1e15, builder=builder).graph
        assert graph.memory is not None
        fastest = solve(graph, relative_gap=arguments.gap)
        most = float(usage(graph, fastest.choice, fastest.arcs).max())
        least = least_peak(build(program, plain.for_another(), limit=1e15).graph)
        assert least is not None
        for part in map(float, arguments.parts.split(",")):
            limit = least + part * (most - least)
            pricer = make_pricer(mesh=plain.mesh, cluster=cluster, config=config)
            began = time.process_time()
            graph = build(program, pricer, limit=limit, builder=builder).graph
            built, wall = time.process_time(), time.monotonic()
            row = [str(plain.mesh), f"{limit / 1e9:.1f}", f"{built - began:.1f}"]
            try:
                under = UnderLimit(binds=True, say_least=False)
                found = solve(graph, relative_gap=arguments.gap, seconds=120, under=under)
                answer = [f"{found.seconds:.4f}", f"{found.gap:.2%}"]
            except AutoparError as error:
                answer = [str(error), ""]
            table.add_row(*row, f"{time.process_time() - built:.1f}", f"{time.monotonic() - wall:.1f}", *answer)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
