"""Between which machines are gradients exchanged? The few figures of a network that decide between systems."""

import math
from dataclasses import dataclass

from autopar.errors import ArgumentError
from autopar.values.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`nodes` machines of `devices` devices each; bandwidths in bytes/s in each direction.

    node_bandwidth: of a machine's link to the others. local_bandwidth: of a device within its machine.
    hop_seconds: latency of one hop of a ring. crowding: part of the bandwidth that each machine beyond the second costs
    (many flows that meet). For parameter servers, None as fast as the link: server_bandwidth, of a server's link and
    software; staging_bandwidth, of a device through its host's memory.
    """

    name: str
    nodes: int
    devices: int
    node_bandwidth: float
    local_bandwidth: float
    hop_seconds: float
    crowding: float = 0.0
    server_bandwidth: float | None = None
    staging_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise ArgumentError(
                f"network {self.name}: {self.nodes} machines of {self.devices} devices; give at least 1"
            )
        bandwidths = [self.node_bandwidth, self.local_bandwidth, self.served_bandwidth, self.staged_bandwidth]
        if not all(0 < bandwidth < math.inf for bandwidth in bandwidths):
            raise ArgumentError(f"network {self.name}: bandwidths {bandwidths} must be finite and above 0 bytes/s")
        if not (0 <= self.hop_seconds < math.inf and 0 <= self.crowding < math.inf):
            raise ArgumentError(
                f"network {self.name}: hop_seconds {self.hop_seconds} and crowding {self.crowding} must not be negative"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def served_bandwidth(self) -> float:
        return self.node_bandwidth if self.server_bandwidth is None else self.server_bandwidth

    @property
    def staged_bandwidth(self) -> float:
        return self.local_bandwidth if self.staging_bandwidth is None else self.staging_bandwidth

    @property
    def crowded_bandwidth(self) -> float:
        """Of a machine's link when all exchange with all."""
        return self.node_bandwidth / (1 + self.crowding * max(self.nodes - 2, 0))


def network_of(cluster: Cluster, split: int = 1) -> Network:
    """The network between the replicas of a model of which each takes `split` devices of one machine.

    The cluster's slowest level joins the machines, its fastest the devices of one. Every `split`-th device exchanges
    with its like, so a machine's link serves `split` exchanges at once.

    Raises:
        ArgumentError: if replicas do not fit machines.
    """
    inner, outer = cluster.levels[-1], cluster.levels[0]
    if inner.size % split:
        raise ArgumentError(
            f"replicas of {split} devices do not fit machines of {inner.size} in cluster {cluster.name}; use a divisor"
        )
    devices = inner.size // split
    nodes = cluster.num_devices // inner.size
    return Network(
        name=cluster.name,
        nodes=nodes,
        devices=devices,
        node_bandwidth=outer.bandwidth_per_device * devices,
        local_bandwidth=inner.bandwidth_per_device,
        hop_seconds=max(outer.alpha, inner.alpha),
    )
