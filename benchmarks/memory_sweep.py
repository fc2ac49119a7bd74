"""What do plans become as memory shrinks? The limit is lowered from what everything fits in until nothing does.

    python -m benchmarks.memory_sweep [--cluster 4x8xa100] [--layers 8] [--batch 32] [--steps 12] [--gap 0.01]

The model is Llama-3-8B's block in a few layers. A row says how a plan lives: what part of the parameters' bytes a rank
stores, which lifetimes gathered copies have, how many operations run again, how many stages there are. Of plans found
each is within a gap of the best, so that one found under a lower limit may be faster: it fits under this one too, and
the table has it there as well. One that is faster by more than the gap was missed: exit code 1.
"""

import argparse
import math
import sys
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError, InfeasibleError
from autopar.models import load_model

SEQ = 4096


def planned(loaded: Any, arguments: argparse.Namespace, memory_gb: float | None) -> Any:
    return autopar.plan(
        loaded.model,
        args=loaded.args,
        kwargs=loaded.kwargs,
        cluster=arguments.cluster,
        mesh="auto",
        pipeline=None if arguments.pipeline == "auto" else int(arguments.pipeline),
        precision="bf16",
        memory_gb=memory_gb,
        relative_gap=arguments.gap,
        seconds=arguments.seconds,
        with_baselines=False,
    )


def character(made: Any) -> list[str]:
    """Stages, mesh and micro-batches, lifetimes, and how many calls are run again."""
    lives = Counter(lifetime for plan in made.stages for lifetime in plan.lifetimes.values())
    again = sum(len(plan.recompute) for plan in made.stages)
    stages = f"{made.pipeline} x " if made.num_stages > 1 else ""
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(lives.items()))
    return [f"{stages}{made.mesh}, {made.microbatches}", kinds, str(again)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="4x8xa100")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--pipeline", default="auto")
    parser.add_argument("--seconds", type=float, default=None, help="of search, for each row")
    arguments = parser.parse_args()
    loaded = load_model(
        spec="hf:examples/llama3_8b/config.json",
        batch=arguments.batch,
        seq=SEQ,
        overrides={"num_hidden_layers": str(arguments.layers)},
        precision="bf16",
        device="meta",
    )
    table = Table(
        "limit GB", "peak GB", "step ms", "gap", "mesh, micro-batches", "lifetimes", "recomputed", "found in s"
    )

    rows: list[tuple[str, float, list[str]]] = []

    def add_row(limit: float, seconds: float, *cells: str) -> None:
        rows.append((f"{limit:.3g}", seconds, list(cells)))
        print(" | ".join([f"{limit:.3g}", *cells]), file=sys.stderr, flush=True)  # rows take minutes

    first = planned(loaded, arguments, None)
    limit, least, falls, before = first.estimate.peak_nbytes / 1e9, 0.0, 0, 0.0
    found = 0.0
    factor = None
    for _ in range(arguments.steps):
        began = time.monotonic()
        try:
            made = planned(loaded, arguments, limit)
        except InfeasibleError as error:
            add_row(limit, math.inf, "", "", "", str(error), "", "", f"{time.monotonic() - began:.0f}")
            least = (error.least_nbytes or 0.0) / 1e9
            break
        except AutoparError as error:
            add_row(limit, math.inf, "", "", "", str(error), "", "", f"{time.monotonic() - began:.0f}")
            break
        estimate = made.estimate
        seconds = estimate.step_seconds
        found = limit
        falls += seconds < before * (1 - arguments.gap)
        before = max(before, seconds)
        row = [f"{estimate.peak_nbytes / 1e9:.3g}", f"{seconds * 1e3:.1f}", f"{estimate.gap:.2%}"]
        add_row(limit, seconds, *row, *character(made), f"{time.monotonic() - began:.0f}")
        factor = factor or 0.8
        limit = min(limit, estimate.peak_nbytes / 1e9) * factor
    for number, (limit_text, seconds, cells) in enumerate(rows):
        fastest = min(rows[number:], key=lambda row: row[1])
        own = cells if fastest[1] == seconds else [*fastest[2][:-1], f"{cells[-1]}, as under {fastest[0]}"]
        table.add_row(limit_text, *own)
    console = Console(width=160)
    console.print(table)
    console.print(f"the last limit under which a plan was found is {found:.4g} GB")
    if least:
        console.print(f"the least that would do is {least:.4g} GB")
    console.print(f"{falls} of the plans under a lower limit are faster than one before, beyond the gap")
    return 1 if falls else 0


if __name__ == "__main__":
    sys.exit(main())
