"""How long does an exchange through parameter servers hold the links? Push to a server that adds up, pull the sum.

A message is cut into parts; by the bytes before it, a part goes to one of the k servers in turn. The g devices of a
machine add up among themselves first and hand the sum round at the end, (g - 1)/g of a part each way, through the
host's memory; then all n machines send their copy to the part's server and receive the sum from it. A server's link
carries in each direction, s bytes of a part:

    own machines        n s / b pushed in, n s / b pulled out, both at once; with k < n a server is the narrow place
    co-located          (n - 1) s / b each, and as its machine pushes and pulls for others over the same link, the two
                        share it: 2 (n - 1)/n S a machine

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; parts, and machines first: Jiang et
al. 2020, "A Unified Architecture for Accelerating Distributed DNN Training" (BytePS), with parts of 4,096,000 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.gradient_exchange.network import Network
from autopar.cost_models.timeline import TaskList
from autopar.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer:
    """`servers` on machines of their own, or `None`: one on each machine that computes."""

    network: Network
    servers: int | None = None
    part_nbytes: float = 4_096_000.0

    def __post_init__(self) -> None:
        if self.servers is not None and self.servers < 1:
            raise ArgumentError(f"{self.servers} parameter servers cannot serve; give at least 1, or None to co-locate")
        if not self.part_nbytes > 0:
            raise ArgumentError(f"parts of {self.part_nbytes} bytes: give more than 0")

    @property
    def name(self) -> str:
        if self.servers is None:
            return "co-located parameter servers"
        return "one parameter server" if self.servers == 1 else f"{self.servers} parameter servers"

    @property
    def _count(self) -> int:
        return self.network.nodes if self.servers is None else self.servers

    @property
    def streams(self) -> tuple[str, ...]:
        count = self._count if self.network.nodes > 1 else 0
        pushes = tuple(f"to server {k}" for k in range(count))
        pulls = () if self.servers is None else tuple(f"from server {k}" for k in range(count))
        return ("within machines", *pushes, *pulls)

    def _copies(self) -> int:
        """Copies of a part that cross its server's link in each direction."""
        return self.network.nodes - 1 if self.servers is None else self.network.nodes

    def _local(self) -> float:
        """Seconds a byte to add up among a machine's devices, and as much to hand round."""
        return (self.network.devices - 1) / self.network.devices / self.network.staged_bandwidth

    def line(self) -> tuple[float, float]:
        """No alpha: parts follow each other."""
        share = self._copies() / self.network.served_bandwidth / self._count
        if self.network.nodes == 1:
            share = 0.0
        return 0.0, max(2 * self._local(), 2 * share if self.servers is None else share)

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        parts = max(1, -int(-nbytes // self.part_nbytes))
        seconds_per_byte = self._copies() / self.network.served_bandwidth
        arrived = []
        for part in range(parts):
            size = min(self.part_nbytes, nbytes - part * self.part_nbytes)
            task = build.add(stream, size * self._local(), after, priority)
            if self.network.nodes > 1:
                server = int((offset + part * self.part_nbytes) // self.part_nbytes) % self._count
                seconds = self.network.hop_seconds + size * seconds_per_byte
                pull = 0 if self.servers is None else self._count
                pushed = build.add(stream + 1 + server, seconds, [task], priority)
                task = build.add(stream + 1 + server + pull, seconds, [pushed], priority)
            arrived.append(build.add(stream, size * self._local(), [task], priority))
        return arrived
