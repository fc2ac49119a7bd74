"""Do two micro-batches at once pay? Tensor parallelism over a slow link, one at a time and two at once, side by side.

    python -m benchmarks.weaving [--rates 200mbit,1gbit] [--baseline megatron] [--rounds 11] [--parts 1,2,4]

Two hosts as in `benchmarks.race` (needs root), a Gloo rank on each, calibrated first. Contenders: one named plan of a
Llama (two blocks, hidden 256, 16 samples of 64 tokens, fp32) in 1, 2 and 4 micro-batches, those that pair also woven
(`copies`). They take turns; of each step the slower rank counts. A row: median milliseconds; the step over that of
the first contender in the same round, median and quartiles; predicted milliseconds, ratio and what is hidden.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import autopar
from autopar.calibration.fit import fit_cluster
from autopar.search.costs.evaluate import evaluate
from autopar.values.cluster import Cluster
from autopar.values.estimate import Estimate
from autopar.values.plan import one_stage
from autopar.values.serialize import dump
from benchmarks.race import CALIBRATION, Ranks
from benchmarks.race_hosts import Hosts, HostsError
from benchmarks.race_models import make
from benchmarks.race_ranks import Calibrate, Race, Ran

MODEL = "wide"


def contenders(cluster: Cluster, baseline: str, parts: list[int]) -> tuple[Race, dict[str, Estimate]]:
    """What races, and what is predicted of it."""
    module, batch = make(MODEL)
    race = Race(model=MODEL, captured=b"", contenders={}, rounds=0)
    predicted = {}
    for count in parts:
        plan = autopar.plan(
            module, batch, cluster=cluster, mesh="2", precision="fp32", baseline=baseline, microbatches=count
        )
        assert plan.captured is not None
        for copies in (1, 2) if count % 2 == 0 else (1,):
            own = replace(plan.single, copies=copies)
            label = f"{count} micro-batch{'es' * (count > 1)}{', two at once' * (copies > 1)}"
            predicted[label] = evaluate(own, plan.captured, cluster)
            race.contenders[label] = one_stage(own).to_json()
            race.graphs[label] = dump(plan.captured)
    return race, predicted


def print_rows(ran: dict[str, Ran], predicted: dict[str, Estimate]) -> None:
    first = next(iter(ran))
    for label, one in ran.items():
        ratios = [a / b for a, b in zip(one.seconds, ran[first].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        said, base = predicted[label], predicted[first].step_seconds
        print(
            f"    {label:28} {statistics.median(one.seconds) * 1e3:8.1f} ms  {middle:.2f} ({low:.2f}-{high:.2f})  "
            f"predicted {said.step_seconds * 1e3:8.1f} ms  {said.step_seconds / base:.2f}  "
            f"hidden {said.hidden * 1e3:6.1f} ms  link {one.crossed / 1e6:.2f} MB",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="200mbit,1gbit", help="of the link, as tc writes them")
    parser.add_argument("--baseline", default="megatron")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--parts", default="1,2,4", help="numbers of micro-batches")
    arguments = parser.parse_args()
    try:
        with Hosts() as hosts, tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(hosts, 2, Path(folder))
            for rate in arguments.rates.split(","):
                hosts.shape(rate)
                cluster = fit_cluster(ranks.run(Calibrate(effort=CALIBRATION)), f"2 ranks, {rate}")
                race, predicted = contenders(cluster, arguments.baseline, [int(n) for n in arguments.parts.split(",")])
                ran = ranks.run(replace(race, rounds=arguments.rounds))
                print(f"{arguments.baseline}, {rate}, load {os.getloadavg()[0]:.1f}", flush=True)
                print_rows(ran, predicted)
            ranks.stop()
    except HostsError as error:
        print(f"no race: two hosts cannot be made here: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
