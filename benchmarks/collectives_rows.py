"""What does a row of a nccl-tests listing say? A collective over a group on a named cluster, its bytes and seconds.

Sizes are those that nccl-tests prints: the tensor of an all-reduce, the gathered tensor of an all-gather, the local
tensor of an all-to-all, the message of a send/recv; so they are `nbytes` of `cost_models.collectives`. Out-of-place
times are taken. Left out: rows without a size or time (peaks read off pictures) or with wrong elements. Rows at and
below `LEAST_BYTES` are read, for what they say of latencies, and not scored.

A cluster is a source, its hardware and what its note says of the machine. Line rates that a source leaves open are
filled in below, each with its reason; where nobody states one it stays open.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_models.collectives import KINDS
from autopar.errors import ArgumentError

LEAST_BYTES = 65536
STANDARD_RATES = tuple(gigabits / 8 * 1e9 for gigabits in (1, 10, 25, 40, 50, 100, 200, 400, 800))
COLUMNS = {"collective", "hardware", "nodes", "gpus_per_node", "size_bytes", "time_us", "interconnect", "software"}

TELLING = {"collective", "size_bytes"}

NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}

# Hardware -> (GPU generation, bytes/s of its NVLink one way). GH200's and H200's GPUs are H100's, with other memory.
# Where the hardware is not stated, NVLink of A100 is assumed, and a generation of its own.
GENERATIONS = {
    "GB200": ("Blackwell", 9e11),
    "B200": ("Blackwell", 9e11),
    "GH200": ("Hopper", 4.5e11),
    "H200": ("Hopper", 4.5e11),
    "H100": ("Hopper", 4.5e11),
    "A100": ("Ampere", 3e11),
    "V100": ("Volta", 1.5e11),
}

# Words of a source -> bytes/s a GPU between nodes, where the row's interconnect column does not print it.
NETWORK_RATES = {
    "nccl-benchmark-on-alps": 2.5e10,  # CSCS Alps: one Slingshot-11 NIC of 200 Gb/s a GH200
    "a3mega": 2.5e10,  # GCP A3 Mega: 8 NICs of 200 Gb/s for 8 GPUs
}


# Lines of ml-engineering's network/README.md that stand under B200, but are half of its other table's (L937-L941) and
# equal to its H200 rows (L978-L981: ring 367, NVLS 480 GB/s): another machine's.
MISLABELLED = re.compile(r"ml-engineering@.*README\.md:L92[5-9]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`variant`: what a source fixed by hand ("ring", "NVLS"), "" where the library chose."""

    id: str
    cluster: str
    generation: str
    harness: str
    kind: str
    nodes: int
    per_node: int
    nbytes: float
    seconds: float
    variant: str
    node_rate: float
    network_rate: float | None
    is_mislabelled: bool

    @property
    def is_scored(self) -> bool:
        return self.nbytes > LEAST_BYTES

    @property
    def crossing_bytes(self) -> float:
        """Bytes that a device must send into the network at the least, a reduction in switches apart."""
        outside, n = 1 - 1 / self.nodes, self.nodes * self.per_node
        parts = {
            "all_reduce": 2 * outside / self.per_node,
            "all_gather": outside / self.per_node,
            "reduce_scatter": outside / self.per_node,
            "all_to_all": (n - self.per_node) / n,
            "broadcast": 1 / self.per_node,
            "reduce": 1 / self.per_node,
            "scatter": outside / self.per_node,
            "gather": outside / self.per_node,
            "send_recv": 1.0,
        }
        return parts[self.kind] * self.nbytes


def read_measurements(folder: Path) -> list[Measurement]:
    """Rows of every file of the folder that is such a listing.

    Raises:
        ArgumentError: if one lacks a column, or a row has what is no number or no collective.
    """
    found = []
    for file in sorted(folder.glob("*.csv")):
        with file.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            columns = set(table.fieldnames or ())
            if not columns >= TELLING:
                continue
            if missing := sorted(COLUMNS - columns):
                raise ArgumentError(
                    f"{file}: a listing of collectives needs the columns {', '.join(missing)}; add them"
                )
            found += [m for row in table if (m := _measurement(row, file)) is not None]
    return found


def stated_rates(measurements: list[Measurement]) -> dict[str, float]:
    """Line rate a device of each cluster's network, where it is known."""
    return {m.cluster: m.network_rate for m in measurements if m.nodes > 1 and m.network_rate is not None}


def network_rates(measurements: list[Measurement]) -> dict[str, float]:
    """`stated_rates`, and for other clusters the least standard rate that no row exceeds."""
    stated = stated_rates(measurements)
    rates = {}
    for cluster in sorted({m.cluster for m in measurements if m.nodes > 1}):
        rows = [m for m in measurements if m.cluster == cluster and m.nodes > 1]
        fastest = max(m.crossing_bytes / m.seconds for m in rows)
        rates[cluster] = stated.get(cluster) or next(rate for rate in STANDARD_RATES if rate >= fastest)
    return rates


def contradictory(measurements: list[Measurement]) -> set[str]:
    """Ids of rows of another machine, and of others of one case and source that differ by more than half."""
    found = {m.id for m in measurements if m.is_mislabelled}
    cases: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        if not m.is_mislabelled:
            cases.setdefault((m.cluster, m.kind, m.nodes, m.per_node, m.nbytes, m.variant, m.harness), []).append(m)
    for rows in cases.values():
        seconds = [m.seconds for m in rows]
        if max(seconds) > 1.5 * min(seconds):
            found |= {m.id for m in rows}
    return found


def _measurement(row: Mapping[str, str], file: Path) -> Measurement | None:
    if not row["size_bytes"] or not row["time_us"] or row.get("wrong_elements", "") not in ("", "0"):
        return None
    kind = NAMES.get(row["collective"], row["collective"])
    try:
        nodes, per_node = int(row["nodes"]), int(row["gpus_per_node"])
        nbytes, seconds = float(row["size_bytes"]), float(row["time_us"]) * 1e-6
    except ValueError as error:
        raise ArgumentError(f"{file}, row {row['id']}: {error}; correct the number") from error
    if kind not in KINDS:
        raise ArgumentError(f"{file}, row {row['id']}: collective {kind!r} is none of {', '.join(KINDS)}")
    if not (nodes > 0 < per_node and nbytes >= 0 < seconds):
        raise ArgumentError(
            f"{file}, row {row['id']}: {nodes} nodes of {per_node} GPUs, {nbytes:g} bytes in {seconds:g} s cannot be"
        )
    hardware = "" if row["hardware"].startswith("not ") else row["hardware"]
    generation, node_rate = next((g for word, g in GENERATIONS.items() if word in hardware), ("unknown", 3e11))
    source = row.get("source", file.stem)
    return Measurement(
        id=row["id"],
        cluster=_cluster(row, source),
        generation=generation,
        harness="all_reduce_bench" if "all_reduce_bench" in row["software"] else "nccl-tests",
        kind=kind,
        nodes=nodes,
        per_node=per_node,
        nbytes=nbytes,
        seconds=seconds,
        variant=_variant(row.get("algo", "")),
        node_rate=node_rate,
        network_rate=_network_rate(row["interconnect"], source),
        is_mislabelled=MISLABELLED.search(source) is not None,
    )


def _cluster(row: Mapping[str, str], source: str) -> str:
    owner = re.sub(r"^github:|@.*|\(.*", "", source).strip().rsplit("/", 1)[-1][:28]
    tag = re.match(r"(cluster\d+)", row.get("note", ""))
    hardware = "unstated GPUs" if row["hardware"].startswith("not ") else row["hardware"].split(" (")[0]
    return f"{hardware.removeprefix('NVIDIA ').replace(' 80GB HBM3', '')}, {tag.group(1) if tag else owner}"


def _variant(algo: str) -> str:
    return "" if "default" in algo else "ring" if algo.startswith("Ring") else "in_network" if algo == "NVLS" else ""


def _network_rate(interconnect: str, source: str) -> float | None:
    if found := re.search(r"(\d+) Gb/s port per GPU", interconnect):
        return float(found.group(1)) / 8 * 1e9
    if found := re.search(r"(?<!NVLink )(\d+) GB/s per GPU", interconnect):
        return float(found.group(1)) * 1e9
    return next((rate for word, rate in NETWORK_RATES.items() if word in source), None)
