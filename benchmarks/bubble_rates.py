"""Do our pipeline orders leave as much time idle as the zero-bubble paper says? Prints published and simulated rates.

    python -m benchmarks.bubble_rates [--references DIR] [--json]

Reads `zb_bubble_rates.csv`. A rate is (cost - m (F + B + W)) / cost, cost the longest time of a stage from its first to
its last pass. Its inputs are the pass times that the paper measured (Qi et al. 2023, Table 6), nothing is fitted.
1F1B-I has a layer a stage (section 5.1), ends one layer shorter: as many stages a rank as layers of an inner rank.
Rows of ZB-2p, an order found for each pipeline, are left out.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from autopar.cost_models.pipeline import make_pipeline, uniform_work
from autopar.cost_models.schedules import make_order
from autopar.cost_models.timeline import simulate

REFERENCES = Path(__file__).parents[2] / "shared" / "references"

# Table 6, milliseconds: (model, micro-batches) -> forward, backward of input, of weights, message
PASSES = {
    ("1.5B", 24): (18.522, 18.086, 9.337, 0.601),
    ("1.5B", 32): (18.513, 18.086, 9.331, 0.626),
    ("1.5B", 64): (18.546, 18.097, 9.321, 0.762),
    ("6.2B", 24): (29.718, 29.444, 19.927, 0.527),
    ("6.2B", 32): (29.802, 29.428, 19.530, 0.577),
    ("6.2B", 64): (29.935, 29.621, 19.388, 0.535),
    ("14.6B", 48): (11.347, 11.248, 8.132, 0.377),
    ("14.6B", 64): (11.307, 11.254, 8.101, 0.379),
    ("14.6B", 128): (11.325, 11.308, 8.109, 0.378),
    ("28.3B", 96): (10.419, 10.207, 7.715, 0.408),
    ("28.3B", 128): (10.408, 10.204, 7.703, 0.408),
    ("28.3B", 256): (10.402, 10.248, 7.698, 0.460),
}
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-1p": "zb-h1"}


def simulated_rate(row: dict[str, str]) -> float:
    """Bubble rate of one row of the file."""
    ranks, microbatches, schedule = int(row["pp"]), int(row["microbatches_per_step"]), row["schedule"]
    forward, backward, weight, send = PASSES[row["model"].removeprefix("GPT "), microbatches]
    stages_per_rank = (int(row["layers"]) + 2) // ranks if schedule == "1F1B-I" else 1
    order = make_order(NAMES[schedule], ranks, microbatches, stages_per_rank)
    seconds = {"F": forward, "B": backward + weight, "I": backward, "W": weight}
    work = uniform_work(order, {kind: n / stages_per_rank for kind, n in seconds.items()}, send)
    pipeline = make_pipeline(order, work)
    return 1 - microbatches * (forward + backward + weight) / pipeline.longest_span(simulate(pipeline.tasks))


def rows(references: Path) -> list[dict[str, Any]]:
    """Published and simulated rate of each row."""
    with (references / "zb_bubble_rates.csv").open(newline="", encoding="utf-8") as file:
        return [
            {
                "id": row["id"],
                "schedule": NAMES[row["schedule"]],
                "published": float(row["bubble_rate"]),
                "simulated": simulated_rate(row),
            }
            for row in csv.DictReader(file)
            if row["schedule"] in NAMES
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=Path, default=REFERENCES)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    table = rows(arguments.references)
    if arguments.json:
        print(json.dumps({"rows": table}))
        return
    print(f"{'row':28} {'schedule':18} {'published':>9} {'simulated':>9}")
    for row in table:
        print(f"{row['id']:28} {row['schedule']:18} {row['published']:9.4f} {row['simulated']:9.4f}")
    for name in NAMES.values():
        off = [abs(row["published"] - row["simulated"]) for row in table if row["schedule"] == name]
        print(f"{name:18} mean {100 * sum(off) / len(off):.2f}, most {100 * max(off):.2f} points off")


if __name__ == "__main__":
    main()
