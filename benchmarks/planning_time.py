"""How long does a whole plan take, every mesh searched? Wall and CPU seconds of `autopar.plan`, capture included.

    python -m benchmarks.planning_time [--targets 8b,70b,405b] [--layers 8,32,128,512] [--nodes 64] [--seconds 120]
        [--pipeline 1] [--memory-gb 1000]

Three models of the sizes of Llama 3, and Llama-3-8B's block in other numbers of layers, each on as many nodes of 8 as
`NODES` says or all on so many (`--nodes 1,64`: of each).
The gap is that of the plan, everything in turn, to the bound over all meshes, in buckets; of a plan in stages that of
every collective alone.
--memory-gb: of a device, in place of its own: what planning takes where all fits.
--pipeline auto searches stages too; 1, the default, meshes and micro-batches. An empty list leaves a part out.
"""

import argparse
import resource
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.models import load_model
from autopar.search.joint.workers import started
from autopar.values.cluster import load_cluster

TARGETS = {
    "8b": ("8x8xh100", 64, {}),
    "70b": (
        "64x8xh100",
        512,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    ),
    "405b": (
        "2048x8xh100",
        2048,
        {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126},
    ),
}
GAP = 0.02
NODES = {8: 1, 32: 8, 128: 64, 512: 2048}
"""Nodes of 8 for a number of layers in the table."""


def planned(
    cluster: str,
    batch: int,
    config: dict[str, int],
    seconds: float | None,
    pipeline: str,
    memory_gb: float | None = None,
) -> list[str]:
    """A row of the table."""
    began, cpu = time.monotonic(), _cpu_seconds()
    found: list[str]
    try:
        with started(load_cluster(cluster).num_devices):  # as the command does
            loaded = load_model(
                spec="hf:examples/llama3_8b/config.json",
                batch=batch,
                seq=8192,
                overrides={key: str(value) for key, value in config.items()},
                precision="bf16",
                device="meta",
            )
            made = autopar.plan(
                loaded.model,
                args=loaded.args,
                kwargs=loaded.kwargs,
                cluster=cluster,
                mesh="auto",
                pipeline=None if pipeline == "auto" else int(pipeline),
                precision="bf16",
                relative_gap=GAP,
                seconds=seconds,
                memory_gb=memory_gb,
                with_baselines=False,
            )
        estimate: Any = made.estimate
        stages = f"{made.pipeline} x " if made.num_stages > 1 else ""
        found = [f"{stages}{made.mesh}, {made.microbatches}", f"{estimate.step_seconds:.3f}"]
        found += [f"{estimate.gap:.2%}"]
    except AutoparError as error:
        found = [str(error), "", ""]
    return [*found, f"{time.monotonic() - began:.0f}", f"{_cpu_seconds() - cpu:.0f}"]


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + children.ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="8b,70b,405b")
    parser.add_argument("--layers", default="8,32,128,512")
    parser.add_argument("--nodes", default="", help="of 8 devices, for every number of layers")
    parser.add_argument("--seconds", type=float, default=None, help="of search, for each row")
    parser.add_argument("--pipeline", default="1")
    parser.add_argument("--memory-gb", type=float, default=None)
    arguments = parser.parse_args()
    searched = arguments.seconds, arguments.pipeline, arguments.memory_gb
    table = Table("model", "cluster", "mesh, micro-batches", "step s", "gap", "wall s", "CPU s")

    def add_row(*cells: str) -> None:
        table.add_row(*cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)  # rows take minutes

    for name in filter(None, arguments.targets.split(",")):
        cluster, batch, config = TARGETS[name]
        add_row(name, cluster, *planned(cluster, batch, config, *searched))
    for layers in map(int, filter(None, arguments.layers.split(","))):
        for nodes in map(int, filter(None, arguments.nodes.split(","))) if arguments.nodes else (NODES.get(layers, 8),):
            cluster = "8xh100" if nodes == 1 else f"{nodes}x8xh100"
            config = {"num_hidden_layers": layers}
            row = planned(cluster, 8 * nodes, config, *searched)
            add_row(f"{layers} layers of 8b", cluster, *row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
