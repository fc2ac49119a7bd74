"""Which few constants make the survey's BSP rows, and what follows from them for its other rows?

Fitted to the rows of the two BSP methods alone, which overlap nothing: a bandwidth within machines, directly and
through host memory; for each network a bandwidth, a crowding and a parameter server's bandwidth; for each model the
seconds that being distributed adds to its step; for the servers the seconds to pack one buffer. Read, not fitted: the
latency of a hop, NCCL's own (`nccl_tuning_constants.csv`: ring, simple, net), and the alpha and beta with which MG-WFBP
merges, which its authors wrote into their code (`alpha_beta.csv`).
"""

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.cost_models.gradient_exchange.all_reduce import RingAllReduce
from autopar.cost_models.gradient_exchange.bulk_synchronous import BulkSynchronous
from autopar.cost_models.gradient_exchange.byte_scheduler import ByteScheduler
from autopar.cost_models.gradient_exchange.contract import Architecture, ExchangeSchedule
from autopar.cost_models.gradient_exchange.exchange import exchange
from autopar.cost_models.gradient_exchange.merged_gradients import MergedGradients
from autopar.cost_models.gradient_exchange.network import Network
from autopar.cost_models.gradient_exchange.parameter_server import ParameterServer
from autopar.cost_models.gradient_exchange.wait_free import WaitFree
from autopar.errors import ArgumentError
from benchmarks import survey_models

REFERENCES = Path(__file__).parents[2] / "shared" / "references"
BSP = ("BSP-A2A", "BSP-PS")
METHODS = (*BSP, "WFBP-A2A", "WFBP-PS", "MG-WFBP", "ByteScheduler-A2A", "ByteScheduler-PS")
PCIE_BANDWIDTH = 15.75e9  # 16 lanes of PCIe 3.0: no device of the survey reaches more
PROFILED = "ByteScheduler-A2A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured step."""

    id: str
    model: str
    sizes: survey_models.Bert | int
    network: str
    method: str
    gpus: int
    gpus_per_node: int
    single_seconds: float
    seconds: float

    @property
    def group(self) -> tuple[str, str, int]:
        return self.model, self.network, self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted (see above), in seconds and bytes/s, and what is read."""

    local_bandwidth: float
    staging_bandwidth: float
    node_bandwidth: dict[str, float]
    crowding: dict[str, float]
    server_bandwidth: dict[str, float]
    update_seconds: dict[str, float]
    pack_seconds: float
    hop_seconds: float
    believed: dict[tuple[bool, int], tuple[float, float]]

    def network(self, row: Row) -> Network:
        return Network(
            name=row.network,
            nodes=max(row.gpus // row.gpus_per_node, 1),
            devices=min(row.gpus, row.gpus_per_node),
            node_bandwidth=self.node_bandwidth[row.network],
            local_bandwidth=self.local_bandwidth,
            hop_seconds=self.hop_seconds,
            crowding=self.crowding[row.network],
            server_bandwidth=self.server_bandwidth[row.network],
            staging_bandwidth=self.staging_bandwidth,
        )


def read_rows(references: Path) -> list[Row]:
    """The rows of the survey's methods.

    Raises:
        ArgumentError: if the file lacks a column, or a row its sizes; its message names the line.
    """
    path = references / "ddl_survey.csv"
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                if row["method"] in METHODS:
                    rows.append(_row(row))
            except (KeyError, ValueError, TypeError) as error:
                raise ArgumentError(f"{path}, line {line}: {error!r}; see the columns of the survey's file") from error
    return rows


def _row(row: dict[str, str]) -> Row:
    batch = int(row["batch_per_gpu"])
    sizes: survey_models.Bert | int = batch
    if row["model"] != "ResNet-50":
        names = {"layers": "layers", "hidden": "hidden", "heads": "heads", "inner": "ffn"}
        names |= {"vocabulary": "vocab", "tokens": "seq"}
        sizes = survey_models.Bert(sentences=batch, **{key: int(row[column]) for key, column in names.items()})
    return Row(
        id=row["id"],
        model=row["model"],
        sizes=sizes,
        network=row["connection"],
        method=row["method"],
        gpus=int(row["gpus"]),
        gpus_per_node=int(row["gpus_per_node"]),
        single_seconds=batch / float(row["single_gpu_samples_per_s"]),
        seconds=batch * int(row["gpus"]) / float(row["samples_per_s"]),
    )


def read_hop_seconds(references: Path) -> float:
    with (references / "nccl_tuning_constants.csv").open(newline="", encoding="utf-8") as file:
        [value] = [
            row["value"]
            for row in csv.DictReader(file)
            if (row["table"], row["group"], row["index"]) == ("hwLatencies", "NET Ring", "Simple")
        ]
    return float(value) * 1e-6


def read_believed(references: Path) -> dict[tuple[bool, int], tuple[float, float]]:
    """Alpha and beta in MG-WFBP's code, by whether the network is 10GbE and number of GPUs: fast networks share one."""
    tables = {"used for the non-RDMA runs, named 10Gbps": True}
    tables["used for the RDMA (100 Gb/s IB) runs, named 56Gbps"] = False
    with (references / "alpha_beta.csv").open(newline="", encoding="utf-8") as file:
        return {
            (tables[row["network"]], int(row["workers"])): (float(row["alpha_s"]), float(row["beta_s_per_byte"]))
            for row in csv.DictReader(file)
            if row["network"] in tables
        }


def line_rate(network: str) -> float:
    """Bytes/s that a network's name promises.

    Raises:
        ArgumentError: if it promises none.
    """
    match = re.match(r"(\d+)Gb", network)
    if match is None:
        raise ArgumentError(f"network {network!r} does not begin with its line rate, as 10GbE or 100GbIB does")
    return float(match[1]) * 1e9 / 8


def system(row: Row, constants: Constants, overhead_seconds: float = 0.0) -> tuple[Architecture, ExchangeSchedule]:
    """The survey's method: Horovod with NCCL's ring for all-to-all, BytePS with a server a machine otherwise.

    `overhead_seconds`: of ByteScheduler on all-to-all.
    """
    link = constants.network(row)
    servers = ParameterServer(network=link, servers=link.nodes)
    ring = RingAllReduce(network=link)
    systems: dict[str, tuple[Architecture, ExchangeSchedule]] = {
        "BSP-A2A": (ring, BulkSynchronous()),
        "BSP-PS": (servers, BulkSynchronous(overhead_seconds=constants.pack_seconds)),
        "WFBP-A2A": (ring, WaitFree()),
        "WFBP-PS": (servers, WaitFree()),
        "MG-WFBP": (
            ring,
            MergedGradients(believed=constants.believed.get((row.network.startswith("10GbE"), row.gpus))),
        ),
        "ByteScheduler-A2A": (ring, ByteScheduler(overhead_seconds=overhead_seconds)),
        "ByteScheduler-PS": (
            servers,
            ByteScheduler(partition_nbytes=servers.part_nbytes, credit_nbytes=0.0, overlaps_forward=False),
        ),
    }
    return systems[row.method]


def predict(row: Row, constants: Constants, overhead_seconds: float = 0.0) -> float:
    """Seconds of the step of `row`."""
    update = constants.update_seconds[row.model]
    model = survey_models.model(row.model, row.sizes, row.single_seconds, update)
    if row.method in BSP:
        model = survey_models.undivided(model)
    return exchange(model, *system(row, constants, overhead_seconds)).seconds


def profile(rows: Iterable[Row], constants: Constants) -> dict[str, float]:
    """What ByteScheduler's own threads add to each model's step, seen on one machine, where no network takes part."""
    added: dict[str, list[float]] = {}
    for row in rows:
        if row.method == PROFILED and row.gpus <= row.gpus_per_node:
            added.setdefault(row.model, []).append(row.seconds - predict(row, constants))
    return {model: float(np.median(seconds)) for model, seconds in added.items()}


def fit(rows: Iterable[Row], references: Path) -> Constants:
    """Constants from the BSP rows among `rows`. Robust: one contradictory network does not bend the others."""
    rows = [row for row in rows if row.method in BSP]
    models, networks = (tuple(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("model", "network"))
    hop_seconds, believed = read_hop_seconds(references), read_believed(references)
    rates = np.array([line_rate(network) for network in networks])
    # start, least and most of each: no link is faster than its name says, no device than its slot
    one = np.ones(len(networks))
    ranges = [
        (np.array([7e9, 7e9, 0.02]), np.array([1e9, 1e9, 1e-4]), np.array([PCIE_BANDWIDTH, PCIE_BANDWIDTH, 0.1])),
        (np.full(len(models), 0.02), np.full(len(models), 1e-5), np.full(len(models), 1.0)),
        (0.5 * rates, 0.05 * rates, rates),
        (0.01 * one, 1e-4 * one, 0.3 * one),
        (0.4 * rates, 0.05 * rates, rates),
    ]
    start, low, high = (np.log(np.concatenate(column)) for column in zip(*ranges, strict=True))
    ends = np.cumsum([len(column[0]) for column in ranges])[:-1]

    def unpack(x: npt.NDArray[np.float64]) -> Constants:
        shared, update, bandwidth, crowding, server = (part.tolist() for part in np.split(np.exp(x), ends))
        return Constants(
            local_bandwidth=shared[0],
            staging_bandwidth=shared[1],
            pack_seconds=shared[2],
            update_seconds=dict(zip(models, update, strict=True)),
            node_bandwidth=dict(zip(networks, bandwidth, strict=True)),
            crowding=dict(zip(networks, crowding, strict=True)),
            server_bandwidth=dict(zip(networks, server, strict=True)),
            hop_seconds=hop_seconds,
            believed=believed,
        )

    def errors(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        constants = unpack(x)
        return np.array([math.log(predict(row, constants) / row.seconds) for row in rows])

    found = least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.03, xtol=1e-4, ftol=1e-4)
    return unpack(found.x)
