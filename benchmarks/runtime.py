"""How fast and how large is a step beside torch's own DDP, FSDP2 and tensor parallelism with the same sharding?

    python -m benchmarks.runtime [--hidden 64,384,768] [--ranks 2,4] [--recipes ddp,fsdp,tp,tp+sp,fsdp+tp]
                                 [--seconds 6] [--alone] [--json] [--quick] [--check]

A Llama (benchmarks/llama.py) trains on Gloo processes of this machine, one thread a rank, AdamW (fused). Ours runs the
plan of the named baseline (`ddp`, `fsdp`, `megatron` with and without sp, `megatron:zero=3`), torch's the recipe of
that name; `ddp` with gradient_as_bucket_view, tensor parallelism with loss_parallel. Both see the same batch, give the
same loss (checked), and take turns, the first of each round alternating. Of every round the slowest rank counts.

A row: the median over rounds of ours / torch's, with its quartiles, for the whole step and for forward and backward
alone; the ratio of the peaks of tensors on the worst rank (storages counted as they come and go, buckets of DDP
included); collectives of a step and their payload on each side. With --check exit code 1 if a ratio is above 1.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from typing import Any

from rich.console import Console

from autopar.calibration.processes import on_processes
from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.search.known.baselines import make_baseline
from autopar.search.timeline.buckets import with_buckets
from autopar.values.cluster import load_cluster
from autopar.values.mesh import parse_mesh
from autopar.values.placement import Shard
from autopar.values.plan import one_stage
from autopar.values.serialize import dump
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from benchmarks.llama import LlamaSize, make_llama
from benchmarks.runtime_contenders import Outcome, Pair, race

OURS = {"ddp": "ddp", "fsdp": "fsdp", "tp": "megatron:sp=off", "tp+sp": "megatron:sp=on", "fsdp+tp": "megatron:zero=3"}
TIMEOUT_SECONDS = 3000.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", default="64,384,768")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--recipes", default=",".join(OURS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of rounds, a pair; at least 7 rounds")
    parser.add_argument("--alone", action="store_true", help="our plans without buckets")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the small model on 2 ranks, a second a pair")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is above 1")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hidden, arguments.ranks, arguments.seconds = "64", "2", 1.0
    console = Console(stderr=arguments.json, width=160, highlight=False)
    rows = []
    load = [os.getloadavg()[0]]
    for world in map(int, arguments.ranks.split(",")):
        sizes = [size_of(int(hidden)) for hidden in arguments.hidden.split(",")]
        pairs = [
            p for s in sizes for p in make_pairs(s, world, arguments.recipes.split(","), not arguments.alone, console)
        ]
        with console.status("") as status:
            found = on_processes(
                race,
                pairs,
                arguments.seconds,
                num_processes=world,
                timeout_seconds=TIMEOUT_SECONDS,
                tell=status.update,
            )
        load.append(os.getloadavg()[0])
        for outcome in found[0]:
            rows.append(row_of(outcome))
            print_row(rows[-1], console)
    console.print(f"load of the machine: {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores")
    if arguments.json:
        print(json.dumps(rows, indent=1))
    worst = max(max(row["step"][1], row["peak"]) for row in rows)
    return int(arguments.check and worst > 1.0)


def size_of(hidden: int) -> LlamaSize:
    """Two blocks; the small model has the shortest batch, for its time is overhead anyway."""
    seq = 32 if hidden < 128 else 64
    return LlamaSize(hidden=hidden, layers=2, heads=4 * -(-hidden // 256), vocabulary=1024, batch=8, seq=seq)


def make_pairs(size: LlamaSize, world: int, recipes: list[str], buckets: bool, console: Console) -> list[Pair]:
    """Both sides of every recipe that `world` ranks can run."""
    model, batch = make_llama(size)
    captured = capture(model, (), batch, name=f"llama {size.hidden}")
    graph, cluster, pairs = dump(captured), load_cluster(f"{world}xcpu"), []
    for recipe in recipes:
        if recipe == "fsdp+tp" and world < 4:
            continue
        mesh = f"{world // 2}x2" if recipe == "fsdp+tp" else str(world)
        try:
            plan = make_baseline(OURS[recipe], captured, cluster, parse_mesh(mesh), TrainConfig(precision="fp32"))
        except InfeasibleError as error:
            console.print(f"{recipe} of hidden {size.hidden} on {mesh}: {error}")
            continue
        pairs.append(
            Pair(
                label=f"hidden {size.hidden}, mesh {mesh}, {recipe}",
                torch=recipe,
                mesh=tuple(map(int, mesh.split("x"))),
                size=size,
                captured=graph,
                **splits(plan),
                plan=one_stage(with_buckets(plan, captured, cluster) if buckets else plan).to_json(),
            )
        )
    return pairs


def splits(plan: StagePlan) -> dict[str, bool]:
    """What a plan splits by vocabulary over its last axis."""
    (loss,) = (choice for name, choice in plan.choices.items() if "cross_entropy" in name)
    words = plan.layouts["p_tok_embeddings_weight"].axes[-1]
    return {"split_words": isinstance(words, Shard), "split_loss": loss[-1] == "classes"}


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Quartiles of the ratios, and what each side sends and holds."""

    def quartiles(ours: list[float], theirs: list[float]) -> list[float]:
        return statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4, method="inclusive")

    ours, theirs = outcome.ours, outcome.torch
    return {
        "label": outcome.label,
        "rounds": len(ours.steps),
        "seconds": [statistics.median(ours.steps), statistics.median(theirs.steps)],
        "step": quartiles(ours.steps, theirs.steps),
        "gradients": quartiles(ours.gradients, theirs.gradients),
        "peak": ours.peak_nbytes / theirs.peak_nbytes,
        "sent": [ours.sent, theirs.sent],
        "ours": dataclasses.asdict(ours),
        "torch": dataclasses.asdict(theirs),
    }


def print_row(row: dict[str, Any], console: Console) -> None:
    low, median, high = row["step"]
    ours, theirs = (sent_text(sent) for sent in row["sent"])
    console.print(
        f"{row['label']:34} step {median:5.2f} ({low:.2f}-{high:.2f}) of torch's {row['seconds'][1] * 1e3:7.1f} ms  "
        f"without optimizer {row['gradients'][1]:5.2f}  memory {row['peak']:5.2f}  "
        f"sent {ours} | {theirs}",
        style="bold" if median > 1 or row["peak"] > 1 else "",
        soft_wrap=True,
    )


def sent_text(sent: dict[str, tuple[int, int]]) -> str:
    """Calls and megabytes."""
    return f"{sum(c for c, _ in sent.values())} calls {sum(n for _, n in sent.values()) / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
