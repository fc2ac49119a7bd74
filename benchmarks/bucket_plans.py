"""How near the best in buckets are plans where starts are dear? Models of the race, planned for two hosts, nothing run.

    python -m benchmarks.bucket_plans [--models gpt2,llama,bert,vit] [--ranks 4,8] [--rates 1e8,1e10] [--start 3e-4]

rates: of the link between hosts, bit/s; start: seconds of a message between hosts, a quarter of it inside one. A row:
the predicted step, everything in turn and with what runs beside compute taken off, how far it can be from the best,
CPU seconds of planning, and what each search found, as a multiple of the best.
"""

import argparse
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

import autopar
from autopar.values.cluster import Cluster, load_cluster
from benchmarks.race import OPTIMIZER
from benchmarks.race_models import make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,bert,vit")
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--rates", default="1e8,1e10")
    parser.add_argument("--start", type=float, default=3e-4)
    arguments = parser.parse_args()
    table = Table("model", "ranks", "bit/s", "in turn ms", "step ms", "gap", "CPU s", "found by")
    for model in arguments.models.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            for rate in map(float, arguments.rates.split(",")):
                cluster = hosts(ranks, rate / 8, arguments.start)
                table.add_row(model, str(ranks), f"{rate:g}", *planned(model, cluster))
    Console(width=180).print(table)


def hosts(ranks: int, bandwidth: float, start: float) -> Cluster:
    """Two hosts; bytes/s and seconds of a message between them."""
    cluster = load_cluster(f"2x{ranks // 2}xcpu@10gbe")
    slow, fast = cluster.levels
    levels = replace(slow, bandwidth=bandwidth, alpha=start), replace(fast, alpha=start / 4)
    return replace(cluster, levels=levels)


def planned(model: str, cluster: Cluster) -> list[str]:
    module, batch = make(model)
    began = time.process_time()
    plan = autopar.plan(module, batch, cluster=cluster, optimizer=OPTIMIZER, precision="fp32", with_baselines=False)
    estimate, spent = plan.estimate, time.process_time() - began
    found = estimate.search.in_buckets
    best = min(found.values())
    said = ", ".join(f"{name} {seconds / best:.2f}" for name, seconds in found.items())
    times = f"{estimate.in_turn_seconds * 1e3:.2f}", f"{estimate.step_seconds * 1e3:.2f}"
    return [*times, f"{estimate.gap:.1%}", f"{spent:.1f}", said]


if __name__ == "__main__":
    main()
