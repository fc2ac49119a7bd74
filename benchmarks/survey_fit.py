"""Which few constants make the survey's BSP rows, and what follows from them for its other rows?

Fitted to the rows of the two BSP methods alone, which overlap nothing: a bandwidth within machines, directly and
through host memory; for each network a bandwidth, a crowding and a parameter server's bandwidth; for each model the
seconds that being distributed adds to its step; for the servers the seconds to pack one buffer. Read, not fitted: the
latency of a hop, NCCL's own (`nccl_tuning_constants.csv`: ring, simple, net), and the alpha and beta with which MG-WFBP
merges, which its authors wrote into their code (`alpha_beta.csv`).
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.cost_models.gradient_exchange.all_reduce import RingAllReduce
from autopar.cost_models.gradient_exchange.bulk_synchronous import BulkSynchronous
from autopar.cost_models.gradient_exchange.byte_scheduler import ByteScheduler
from autopar.cost_models.gradient_exchange.contract import Architecture, Schedule
from autopar.cost_models.gradient_exchange.exchange import exchange
from autopar.cost_models.gradient_exchange.merged_gradients import MergedGradients
from autopar.cost_models.gradient_exchange.network import Network
from autopar.cost_models.gradient_exchange.parameter_server import ParameterServer
from autopar.cost_models.gradient_exchange.wait_free import WaitFree
from benchmarks import survey_models

REFERENCES = Path(__file__).parents[2] / "shared" / "references"
BSP = ("BSP-A2A", "BSP-PS")
METHODS = (*BSP, "WFBP-A2A", "WFBP-PS", "MG-WFBP", "ByteScheduler-A2A", "ByteScheduler-PS")
NETWORKS = ("10GbE with TCP/IP", "100GbE with TCP/IP", "100GbIB with RDMA")
MODELS = ("ResNet-50", "BERT-Base")
GPUS_PER_NODE = 4
PROFILED = "ByteScheduler-A2A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured step."""

    id: str
    model: str
    network: str
    method: str
    gpus: int
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
    believed: dict[tuple[str, int], tuple[float, float]]

    def network(self, name: str, gpus: int) -> Network:
        return Network(
            name=name,
            nodes=gpus // GPUS_PER_NODE,
            devices=GPUS_PER_NODE,
            node_bandwidth=self.node_bandwidth[name],
            local_bandwidth=self.local_bandwidth,
            hop_seconds=self.hop_seconds,
            crowding=self.crowding[name],
            server_bandwidth=self.server_bandwidth[name],
            staging_bandwidth=self.staging_bandwidth,
        )


def read_rows(references: Path) -> list[Row]:
    with (references / "ddl_survey.csv").open(newline="", encoding="utf-8") as file:
        return [
            Row(
                id=row["id"],
                model=row["model"],
                network=row["connection"],
                method=row["method"],
                gpus=int(row["gpus"]),
                single_seconds=float(row["batch_per_gpu"]) / float(row["single_gpu_samples_per_s"]),
                seconds=float(row["batch_per_gpu"]) * int(row["gpus"]) / float(row["samples_per_s"]),
            )
            for row in csv.DictReader(file)
            if row["method"] in METHODS
        ]


def read_hop_seconds(references: Path) -> float:
    with (references / "nccl_tuning_constants.csv").open(newline="", encoding="utf-8") as file:
        [value] = [
            row["value"]
            for row in csv.DictReader(file)
            if (row["table"], row["group"], row["index"]) == ("hwLatencies", "NET Ring", "Simple")
        ]
    return float(value) * 1e-6


def read_believed(references: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """Alpha and beta in MG-WFBP's code, by network and number of GPUs; its `rdma` table serves both fast networks."""
    tables: dict[str, tuple[str, ...]] = {"used for the non-RDMA runs, named 10Gbps": NETWORKS[:1]}
    tables["used for the RDMA (100 Gb/s IB) runs, named 56Gbps"] = NETWORKS[1:]
    with (references / "alpha_beta.csv").open(newline="", encoding="utf-8") as file:
        return {
            (network, int(row["workers"])): (float(row["alpha_s"]), float(row["beta_s_per_byte"]))
            for row in csv.DictReader(file)
            for network in tables.get(row["network"], ())
        }


def system(
    method: str, constants: Constants, network: str, gpus: int, overhead_seconds: float = 0.0
) -> tuple[Architecture, Schedule]:
    """The survey's method: Horovod with NCCL's ring for all-to-all, BytePS with a server a machine otherwise.

    `overhead_seconds`: of ByteScheduler on all-to-all.
    """
    link = constants.network(network, gpus)
    servers = ParameterServer(network=link, servers=link.nodes)
    ring = RingAllReduce(network=link)
    systems: dict[str, tuple[Architecture, Schedule]] = {
        "BSP-A2A": (ring, BulkSynchronous()),
        "BSP-PS": (servers, BulkSynchronous(overhead_seconds=constants.pack_seconds)),
        "WFBP-A2A": (ring, WaitFree()),
        "WFBP-PS": (servers, WaitFree()),
        "MG-WFBP": (ring, MergedGradients(believed=constants.believed.get((network, gpus)))),
        "ByteScheduler-A2A": (ring, ByteScheduler(overhead_seconds=overhead_seconds)),
        "ByteScheduler-PS": (
            servers,
            ByteScheduler(partition_nbytes=servers.part_nbytes, credit_nbytes=0.0, overlaps_forward=False),
        ),
    }
    return systems[method]


def predict(row: Row, constants: Constants, overhead_seconds: float = 0.0) -> float:
    """Seconds of the step of `row`."""
    model = survey_models.model(row.model, row.single_seconds, constants.update_seconds[row.model])
    if row.method in BSP:
        model = survey_models.undivided(model)
    return exchange(model, *system(row.method, constants, row.network, row.gpus, overhead_seconds)).seconds


def profile(rows: Iterable[Row], constants: Constants) -> dict[str, float]:
    """What ByteScheduler's own threads add to each model's step, seen on one machine, where no network takes part."""
    mine = [row for row in rows if row.method == PROFILED and row.gpus == GPUS_PER_NODE]
    return {
        model: float(np.median([row.seconds - predict(row, constants) for row in mine if row.model == model]))
        for model in MODELS
    }


def fit(rows: Iterable[Row], references: Path) -> Constants:
    """Constants from the BSP rows among `rows`. Robust: one contradictory network does not bend the others."""
    rows = [row for row in rows if row.method in BSP]
    hop_seconds, believed = read_hop_seconds(references), read_believed(references)
    count = len(NETWORKS)

    def unpack(x: npt.NDArray[np.float64]) -> Constants:
        values = np.exp(x).tolist()
        return Constants(
            local_bandwidth=values[0],
            staging_bandwidth=values[1],
            pack_seconds=values[2],
            update_seconds=dict(zip(MODELS, values[3:5], strict=True)),
            node_bandwidth=dict(zip(NETWORKS, values[5 : 5 + count], strict=True)),
            crowding=dict(zip(NETWORKS, values[5 + count : 5 + 2 * count], strict=True)),
            server_bandwidth=dict(zip(NETWORKS, values[5 + 2 * count :], strict=True)),
            hop_seconds=hop_seconds,
            believed=believed,
        )

    def errors(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        constants = unpack(x)
        return np.array([math.log(predict(row, constants) / row.seconds) for row in rows])

    start = [7e9, 7e9, 0.02, 1e-3, 0.05, *[1.2e9, 3e9, 7e9], *[0.01] * count, *[0.7e9, 1.5e9, 4e9]]
    low = [1e9, 1e9, 1e-4, 1e-5, 1e-5, *[1e8] * count, *[1e-4] * count, *[1e8] * count]
    # no link is faster than its name says, and no device than a x16 slot of PCIe 3.0
    high = [15.75e9, 15.75e9, 0.1, 0.1, 0.1, *[1.25e9, 12.5e9, 12.5e9], *[0.3] * count, *[1.25e9, 12.5e9, 12.5e9]]
    bounds = np.log(low), np.log(high)
    return unpack(
        least_squares(errors, np.log(start), bounds=bounds, loss="soft_l1", f_scale=0.03, xtol=1e-4, ftol=1e-4).x
    )
