"""Do simulated exchange systems take as long as the survey measured, and would we have chosen the fastest?

    python -m benchmarks.survey [--references DIR] [--json] [--check]

Reads `ddl_survey.csv` (Shi et al. 2020: 2 models, 3 networks, 4 to 32 GPUs, 7 methods); which constants are fitted to
which rows says `survey_fit`: every constant of a network to rows of BSP alone. `profiled` knows also what
ByteScheduler's own threads cost on one machine of 4 GPUs, where there is no network: a figure a model that no row of
BSP can show, and no constant of a network. It is the one to judge by, its error is over rows on more than one machine,
which the profile has not seen; without it is `unprofiled`, beside.
Other methods have no such figure. With --check exit code 1 if something that should hold does not.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.survey_fit import METHODS, PROFILED, REFERENCES, Constants, fit, predict, profile, read_rows

Table = list[dict[str, Any]]
LIMIT, NEAR = 0.06, 0.9


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


def error(row: dict[str, Any], key: str = "profiled") -> float:
    """Of a row, as a part of what was measured."""
    return float(row[key] / row["measured"] - 1)


def mean_errors(table: Table, key: str = "profiled") -> dict[str, float]:
    """Of each method, sign left out; of the profiled one on the rows that its profile has not seen."""
    judged = [r for r in table if key != "profiled" or r["method"] != PROFILED or r["nodes"] > 1]
    return {method: float(np.mean([abs(error(r, key)) for r in judged if r["method"] == method])) for method in METHODS}


def near_fastest(table: Table, key: str = "profiled") -> float:
    """The part of the groups in which the method chosen is the fastest or within 5% of it."""
    chosen = choices(table, key)
    return sum(row["regret"] <= 1.05 for row in chosen) / len(chosen)


def misses(table: Table) -> list[str]:
    """What should hold and does not, in words."""
    errors = mean_errors(table)
    found = [f"survey: {method} {e:.1%}, should be {LIMIT:.0%}" for method, e in errors.items() if e > LIMIT]
    if (part := near_fastest(table)) < NEAR:
        found.append(f"survey: choice near the fastest in {part:.0%} of the groups, should be {NEAR:.0%}")
    return found


def choices(table: Table, key: str = "profiled") -> Table:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=Path, default=REFERENCES)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--check", action="store_true", help="exit code 1 if something that should hold does not")
    arguments = parser.parse_args()
    constants, table = predictions(arguments.references)
    missed = misses(table)
    if arguments.json:
        print(json.dumps(report(table) | {"missed": missed}))
    else:
        print_report(constants, table)
        print("does not hold: " + ("; ".join(missed) or "nothing"))
    return 1 if arguments.check and missed else 0


def report(table: Table) -> dict[str, Any]:
    """Everything that there is to say, for JSON."""
    errors = {"mean_errors": mean_errors(table), "unprofiled_errors": mean_errors(table, "predicted")}
    return {"rows": table} | errors | {"choices": choices(table), "headlines": headlines(table)}


def print_report(constants: Constants, table: Table) -> None:
    """The same as text."""
    print_constants(constants)
    print_errors(table)
    for row in headlines(table):
        print(f"{row['model']} on {row['gpus']}: {row['predicted']:.1f}x predicted, {row['measured']:.1f}x measured")
    for key, name in (("profiled", "profiled"), ("predicted", "unprofiled")):
        chosen = choices(table, key)
        near = sum(row["regret"] <= 1.05 for row in chosen)
        print(f"{name}: chosen system fastest or within 5% in {near} of {len(chosen)} groups; not in")
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
    unprofiled = mean_errors(table, "predicted")[PROFILED]
    for method, mean in mean_errors(table).items():
        beside = f"   profiled on 4 GPUs, the error on more; {unprofiled:.1%} unprofiled" if method == PROFILED else ""
        print(f"{method:18} {100 * mean:9.1f}%{beside}")
        for model in _kinds(table, "model"):
            for name in _kinds(table, "network"):
                mine = [r for r in table if (r["method"], r["model"], r["network"]) == (method, model, name)]
                errors = "".join(f"{100 * error(r):7.1f}" for r in sorted(mine, key=lambda r: int(r["gpus"])))
                print(f"    {model:10} {name:20}{errors}")


if __name__ == "__main__":
    sys.exit(main())
