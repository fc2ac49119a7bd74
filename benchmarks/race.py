"""Do plans run as fast as their order says? Two hosts, a slow link, everything for real, ours beside torch's.

    python -m benchmarks.race [--models gpt2,llama,bert,vit] [--rates 100mbit,1gbit] [--ranks 4,8]
                              [--rounds 9] [--next 5] [--keep FOLDER] [--json] [--quick] [--check]

Hosts are network namespaces of this machine (`benchmarks.race_hosts`; needs root), half of the Gloo ranks on each. For
each rate and number of ranks the cluster is calibrated first, as `autopar calibrate` does, and planning reads what that
found. Contenders of a model: the chosen plan, the search's next best, ddp, fsdp and megatron as plans of ours, and
torch's DistributedDataParallel, fully_shard and (Llama) parallelize_module. They take turns, every round in another
order. A turn is a step that does not count, for the others have taken the caches, and three that do, or as many as take
0.2 s; of each the slowest rank counts. What is compared are medians over rounds of a step's seconds over those of that
round's median contender, so that a machine that is slow for a while is so for all. A host keeps to its half of the
machine's cores.

A row: chosen / fastest of all; best of torch's / chosen; Spearman's rank correlation of predicted and measured seconds
of our plans, once as they are and once with predictions within 3% of each other as ties (the next plans are near the
chosen one); the quartiles of the chosen plan's steps around their median; bytes counted on the link / payload predicted
by plan and algorithm, least and most over our plans. What is counted has headers: 66 bytes (Ethernet 14, IP
20, TCP 32) a packet of at most 1448 bytes of payload, 4.6%, and one such packet of acknowledgement for about two that
come, up to 2.3%. Small messages fill no packets.
"""

import argparse
import dataclasses
import json
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import autopar
from autopar.calibration.fit import fit_cluster
from autopar.calibration.measure import Effort
from autopar.errors import AutoparError
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.values.cluster import Cluster, cluster_toml
from autopar.values.serialize import dump
from benchmarks.race_hosts import ADDRESSES, Hosts, HostsError
from benchmarks.race_models import MODELS, make
from benchmarks.race_ranks import DONE, Calibrate, Race, Ran
from benchmarks.race_traffic import crossing_nbytes

FOUR = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CALIBRATION = Effort(kinds=FOUR, least_nbytes=1 << 10, most_nbytes=4 << 20, num_sizes=6, num_rounds=3, dtypes=("fp32",))
NAMED = ("ddp", "fsdp", "megatron")
OPTIMIZER = "adamw-fused"
RATES, RANKS, ROUNDS, NEXT = "100mbit,1gbit", "4,8", 9, 5
TIE = 0.03


class Ranks:
    """Rank processes on two hosts, which take jobs."""

    def __init__(self, hosts: Hosts, world: int, folder: Path) -> None:
        self.folder, self.count = folder, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // 2)}
        self.processes = [
            hosts.start(
                rank * 2 // world,
                [sys.executable, "-c", "from benchmarks.race_ranks import main; main()"],
                {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % (world // 2))},
            )
            for rank in range(world)
        ]
        self._wait()

    def run(self, job: Calibrate | Race) -> Any:
        """What rank 0 found."""
        path = self.folder / f"job{self.count}"
        self.count += 1
        path.write_bytes(pickle.dumps(job))
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
        self._wait()
        return pickle.loads(path.with_suffix(".result").read_bytes())

    def _wait(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith(DONE):
                if not line:
                    raise RuntimeError(f"rank {rank} ended with code {process.wait()}; its output above says why")

    def stop(self) -> None:
        for process in self.processes:
            process.communicate()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender. predicted, payload, calls: of ours alone: seconds a step, bytes from the first host to the second,
    collectives a step."""

    label: str
    text: str
    predicted: float | None = None
    payload: float | None = None
    calls: int | None = None


def entries_of(model: str, cluster: Cluster, num_next: int, keep: Path | None = None) -> tuple[list[Entry], bytes]:
    """All contenders, the chosen plan first, and the graph that their plans are for. keep: where plans are written."""
    module, batch = make(model)
    chosen = autopar.plan(module, batch, cluster=cluster, optimizer=OPTIMIZER, precision="fp32")
    assert chosen.captured is not None
    plans = {"chosen": chosen}
    for number, plan in enumerate(chosen.alternatives(num_next, cluster=cluster, seconds=30.0) if num_next else ()):
        plans[f"next {number + 1}"] = plan
    for name in NAMED:
        try:
            plan = autopar.plan(module, batch, cluster=cluster, optimizer=OPTIMIZER, precision="fp32", baseline=name)
        except AutoparError:
            continue  # it does not apply to the model
        plans[name] = plan
    entries = []
    for label, plan in plans.items():
        if keep is not None:
            (keep / f"{model} {label}.json").write_text(plan.to_json())
        local = emit(chosen.captured, plan.single)
        entries.append(
            Entry(
                label=label,
                text=plan.to_json(),
                predicted=plan.estimate.step_seconds,
                payload=crossing_nbytes(local),
                calls=sum(calls for calls, _ in messages_of(local.captured, local.plan, on_host=True).values()),
            )
        )
    recipes = ("ddp", "fsdp", "tp") if model == "llama" else ("ddp", "fsdp")
    return entries + [Entry(label=f"torch {recipe}", text=recipe) for recipe in recipes], dump(chosen.captured)


def row_of(setting: str, entries: Sequence[Entry], ran: dict[str, Ran]) -> dict[str, Any]:
    rounds = [statistics.median(together) for together in zip(*(one.seconds for one in ran.values()), strict=True)]
    seconds = {
        label: statistics.median(own / common for own, common in zip(one.seconds, rounds, strict=True))
        for label, one in ran.items()
    }
    ours = [entry for entry in entries if entry.predicted is not None]
    low, middle, high = statistics.quantiles(ran["chosen"].seconds, n=4, method="inclusive")
    predicted, measured = [e.predicted or 0.0 for e in ours], [seconds[e.label] for e in ours]
    ratios = [ran[e.label].crossed / e.payload for e in ours if e.payload]
    return {
        "setting": setting,
        "chosen_over_fastest": seconds["chosen"] / min(seconds.values()),
        "fastest": min(seconds, key=seconds.__getitem__),
        "torch_over_chosen": min(s for label, s in seconds.items() if label.startswith("torch")) / seconds["chosen"],
        "spearman": spearman(predicted, measured),
        "spearman_of_ties": spearman(tied(predicted), measured),
        "spread": [low / middle, high / middle],
        "traffic": [min(ratios), max(ratios)],
        "contenders": [
            {**dataclasses.asdict(ran[e.label]), **{k: v for k, v in dataclasses.asdict(e).items() if k != "text"}}
            for e in entries
        ],
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's correlation of ranks; ties have their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(xs), ranks(ys))


def tied(values: Sequence[float]) -> list[float]:
    """Each value as the least of those that it is within `TIE` of, going up from the least of all."""
    out: dict[float, float] = {}
    least = 0.0
    for value in sorted(values):
        least = least if least and value <= least * (1 + TIE) else value
        out[value] = least
    return [out[value] for value in values]


def print_row(row: dict[str, Any], console: Console) -> None:
    low, high = row["spread"]
    console.print(
        f"{row['setting']:20} chosen/fastest {row['chosen_over_fastest']:.2f} ({row['fastest']})  "
        f"torch/chosen {row['torch_over_chosen']:.2f}  "
        f"Spearman {row['spearman']:.2f}, {row['spearman_of_ties']:.2f}  "
        f"chosen {low:.2f}-{high:.2f}  traffic {row['traffic'][0]:.3f}-{row['traffic'][1]:.3f}"
    )
    for one in row["contenders"]:
        predicted = "" if one["predicted"] is None else f"predicted {one['predicted'] * 1e3:8.1f} ms  "
        payload = "" if one["payload"] is None else f" of {one['payload'] / 1e6:.3f} MB predicted"
        console.print(
            f"    {one['label']:11} {statistics.median(one['seconds']) * 1e3:8.1f} ms  {predicted:23}"
            f"link {one['crossed'] / 1e6:7.3f} MB{payload}"
            + ("" if one["calls"] is None else f"  {one['calls']} collectives")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rates", default=RATES, help="of the link, as tc writes them")
    parser.add_argument("--ranks", default=RANKS, help="even numbers, half on each host")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--next", type=int, default=NEXT, help="how many of the search's next plans race too")
    parser.add_argument("--keep", type=Path, help="a folder for each setting's cluster and the plans of its models")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one setting, few rounds")
    parser.add_argument("--check", action="store_true", help="fail if the chosen plan is over 3%% slower than another")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.rates, arguments.ranks = "llama", "200mbit", "4"
        arguments.rounds, arguments.next = 3, 1
    console = Console(stderr=arguments.json, width=160, highlight=False)
    rows = []
    try:
        with Hosts() as hosts, tempfile.TemporaryDirectory() as folder:
            for world in map(int, arguments.ranks.split(",")):
                ranks = Ranks(hosts, world, Path(folder))
                for rate in arguments.rates.split(","):
                    rows += raced(arguments, hosts, ranks, rate, world, console)
                ranks.stop()
    except HostsError as error:
        console.print(f"no race: two hosts cannot be made here: {error}", style="red")
        return 2
    summary(rows, console)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    return int(arguments.check and max(row["chosen_over_fastest"] for row in rows) > 1.03)


def raced(
    arguments: argparse.Namespace, hosts: Hosts, ranks: Ranks, rate: str, world: int, console: Console
) -> list[dict[str, Any]]:
    """All models at one rate."""
    hosts.shape(rate)
    start = time.monotonic()
    cluster = fit_cluster(ranks.run(Calibrate(effort=CALIBRATION)), f"{world} ranks, {rate}")
    console.print(
        f"{world} ranks, {rate}: calibrated in {time.monotonic() - start:.0f} s; load {os.getloadavg()[0]:.1f}"
    )
    keep = None if arguments.keep is None else arguments.keep / f"{world}_{rate}"
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / "cluster.toml").write_text(cluster_toml(cluster))
    rows = []
    for model in arguments.models.split(","):
        entries, captured = entries_of(model, cluster, arguments.next, keep)
        contenders = {entry.label: entry.text for entry in entries}
        ran = ranks.run(Race(model=model, captured=captured, contenders=contenders, rounds=arguments.rounds))
        first = ran["chosen"].loss
        for label, one in ran.items():
            assert abs(one.loss - first) <= 1e-4 * abs(first), f"{label} has loss {one.loss}, the chosen plan {first}"
        rows.append(row_of(f"{model} {rate} {world}", entries, ran))
        print_row(rows[-1], console)
    return rows


def summary(rows: Sequence[dict[str, Any]], console: Console) -> None:
    console.print(
        f"{len(rows)} settings: chosen/fastest at most {max(r['chosen_over_fastest'] for r in rows):.2f}, torch/chosen "
        f"{statistics.geometric_mean(r['torch_over_chosen'] for r in rows):.2f} in the (geometric) mean, Spearman at "
        f"least {min(r['spearman'] for r in rows):.2f}, mean {statistics.fmean(r['spearman'] for r in rows):.2f}, with "
        f"ties at least {min(r['spearman_of_ties'] for r in rows):.2f}, "
        f"mean {statistics.fmean(r['spearman_of_ties'] for r in rows):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
