"""Do simulated exchange systems take as long as the survey measured, and would we have chosen the fastest?

    python -m benchmarks.survey [--references DIR] [--json]

Reads `ddl_survey.csv` (Shi et al. 2020: 2 models, 3 networks, 4 to 32 GPUs, 7 methods); which constants are fitted to
which rows says `survey_fit`. `predicted` knows the rows of BSP alone. `profiled` knows also what ByteScheduler's own
threads cost on one machine of 4 GPUs, a figure a model that no row of BSP can show; other methods have none.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.survey_fit import METHODS, PROFILED, REFERENCES, Constants, fit, predict, profile, read_rows

Table = list[dict[str, Any]]


def predictions(references: Path) -> tuple[Constants, Table]:
    """The constants, and each row with what is predicted for it."""
    rows = read_rows(references)
    constants = fit(rows, references)
    overhead = profile(rows, constants)
    table = []
    for row in rows:
        seconds = predict(row, constants)
        profiled = predict(row, constants, overhead.get(row.model, 0.0)) if row.method == PROFILED else seconds
        keys = {"id": row.id, "model": row.model, "network": row.network, "method": row.method, "gpus": row.gpus}
        keys["nodes"] = row.gpus // row.gpus_per_node
        values = {"single": row.single_seconds, "measured": row.seconds, "predicted": seconds, "profiled": profiled}
        table.append(keys | values)
    return constants, table


def error(row: dict[str, Any], key: str = "predicted") -> float:
    """Of a row, as a part of what was measured."""
    return float(row[key] / row["measured"] - 1)


def mean_errors(table: Table) -> dict[str, float]:
    """Of each method, sign left out."""
    return {method: float(np.mean([abs(error(r)) for r in table if r["method"] == method])) for method in METHODS}


def profiled_error(table: Table) -> float:
    """Of the profiled method on more than one machine: the rows that the profile has not seen."""
    return float(np.mean([abs(error(r, "profiled")) for r in table if r["method"] == PROFILED and r["nodes"] > 1]))


def choices(table: Table, key: str = "predicted") -> Table:
    """For each model, network and size: the method predicted fastest, and how much longer it took than the fastest."""
    groups: dict[tuple[str, str, int], Table] = defaultdict(list)
    for row in table:
        groups[row["model"], row["network"], row["gpus"]].append(row)
    out = []
    for (model, network, gpus), group in groups.items():
        chosen = min(group, key=lambda row: float(row[key]))
        fastest = min(group, key=lambda row: float(row["measured"]))
        names = {"chosen": chosen["method"], "fastest": fastest["method"]}
        regret = chosen["measured"] / fastest["measured"]
        out.append({"model": model, "network": network, "gpus": gpus} | names | {"regret": regret})
    return out


def headlines(table: Table) -> Table:
    """The best speedup over one GPU of each model on the fewest and on the most, measured and predicted."""
    out = []
    for model in _kinds(table, "model"):
        sizes = _kinds(table, "gpus")
        for gpus in (min(sizes), max(sizes)):
            rows = [row for row in table if (row["model"], row["gpus"]) == (model, gpus)]
            best = {key: max(gpus * row["single"] / row[key] for row in rows) for key in ("measured", "profiled")}
            out.append({"model": model, "gpus": gpus, "measured": best["measured"], "predicted": best["profiled"]})
    return out


def _kinds(table: Table, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=Path, default=REFERENCES)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    constants, table = predictions(arguments.references)
    if arguments.json:
        print(json.dumps(report(table)))
    else:
        print_report(constants, table)


def report(table: Table) -> dict[str, Any]:
    """Everything that there is to say, for JSON."""
    answer = {"rows": table, "mean_errors": mean_errors(table), "profiled_error": profiled_error(table)}
    return answer | {"choices": choices(table, "profiled"), "headlines": headlines(table)}


def print_report(constants: Constants, table: Table) -> None:
    """The same as text."""
    print_constants(constants)
    print_errors(table)
    for row in headlines(table):
        print(f"{row['model']} on {row['gpus']}: {row['predicted']:.1f}x predicted, {row['measured']:.1f}x measured")
    for key in ("predicted", "profiled"):
        chosen = choices(table, key)
        near = sum(row["regret"] <= 1.05 for row in chosen)
        print(f"{key}: chosen system fastest or within 5% in {near} of {len(chosen)} groups; not in")
        for row in (row for row in chosen if row["regret"] > 1.05):
            print(
                f"    {row['model']} {row['network']} {row['gpus']}: {row['chosen']} took {row['regret']:.2f} times "
                f"the time of {row['fastest']}"
            )


def print_constants(constants: Constants) -> None:
    print(
        f"bandwidth within machines {constants.local_bandwidth:.3g} B/s, staged {constants.staging_bandwidth:.3g} B/s"
    )
    print(f"packing for servers {constants.pack_seconds:.3g} s, hop {constants.hop_seconds:.3g} s")
    for model, seconds in constants.update_seconds.items():
        print(f"added to a step of {model} {seconds:.3g} s")
    for name in constants.node_bandwidth:
        print(
            f"{name}: {constants.node_bandwidth[name]:.3g} B/s, crowding {constants.crowding[name]:.2g}, server "
            f"{constants.server_bandwidth[name]:.3g} B/s"
        )


def print_errors(table: Table) -> None:
    print(f"\n{'method':18} {'mean error':>10}   error on 4, 8, 16, 32 GPUs, %")
    for method, mean in mean_errors(table).items():
        print(f"{method:18} {100 * mean:9.1f}%")
        for model in _kinds(table, "model"):
            for name in _kinds(table, "network"):
                mine = [r for r in table if (r["method"], r["model"], r["network"]) == (method, model, name)]
                errors = "".join(f"{100 * error(r):7.1f}" for r in sorted(mine, key=lambda r: int(r["gpus"])))
                print(f"    {model:10} {name:20}{errors}")
    print(f"{PROFILED}, profiled on one machine, on more: {100 * profiled_error(table):.1f}%")


if __name__ == "__main__":
    main()
