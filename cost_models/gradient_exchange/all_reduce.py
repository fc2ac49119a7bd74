"""How long does an all-to-all exchange of gradients hold the links? All-reduce by ring, tree or in two levels.

With P ranks on n machines of g, S bytes, a hop of a seconds, b the slower of link and device:

    ring            2 (P - 1) a + 2 (P - 1)/P S / b
    tree            2 ceil(log2 P) a + 2 S / b                            (double binary tree)
    hierarchical    2 (g - 1) a + 2 (g - 1)/g S / b_local within machines, around
                    2 (n - 1) a + 2 (n - 1)/n S / b_link between them; both kinds of link work at once on
                    different messages                                     (Horovod's two-level all-reduce)

    library         the collective model's answer for the message

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Sanders, Speck, Träff
2009, "Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.gradient_exchange.network import Network
from autopar.cost_models.links import Links
from autopar.cost_models.timeline import TaskList


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAllReduce:
    network: Network
    name: str = "ring all-reduce"
    streams: tuple[str, ...] = ("ring",)

    def line(self) -> tuple[float, float]:
        ranks = self.network.ranks
        return 2 * (ranks - 1) * self.network.hop_seconds, 2 * (ranks - 1) / ranks / _bandwidth(self.network)

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        return _send_line(self.line(), build, stream, nbytes, after, priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAllReduce:
    network: Network
    name: str = "tree all-reduce"
    streams: tuple[str, ...] = ("tree",)

    def line(self) -> tuple[float, float]:
        if self.network.ranks == 1:
            return 0.0, 0.0
        depth = math.ceil(math.log2(self.network.ranks))
        return 2 * depth * self.network.hop_seconds, 2 / _bandwidth(self.network)

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        return _send_line(self.line(), build, stream, nbytes, after, priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAllReduce:
    network: Network
    name: str = "hierarchical all-reduce"
    streams: tuple[str, ...] = ("within machines", "between machines")

    def line(self) -> tuple[float, float]:
        inner, outer = self._levels()
        twice = 2 * inner[0], 2 * inner[1]  # reduce-scatter and all-gather share the machine's links
        return twice[0] + outer[0], max(twice[1], outer[1])

    def _levels(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """alpha and beta of one pass within machines, and of the all-reduce between them."""
        network = self.network
        inner = (network.devices - 1) * network.hop_seconds, (network.devices - 1) / network.devices
        outer = 2 * (network.nodes - 1) * network.hop_seconds, 2 * (network.nodes - 1) / network.nodes
        return (inner[0], inner[1] / network.local_bandwidth), (outer[0], outer[1] / network.crowded_bandwidth)

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        inner, outer = self._levels()
        scattered = build.add(stream, inner[0] + nbytes * inner[1], after, priority)
        reduced = build.add(stream + 1, outer[0] + nbytes * outer[1], [scattered], priority)
        return [build.add(stream, inner[0] + nbytes * inner[1], [reduced], priority)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryAllReduce:
    """What the collective model expects of the library: for each message the cheapest algorithm on these links."""

    links: Links
    name: str = "all-reduce"
    streams: tuple[str, ...] = ("all-reduce",)

    def line(self) -> tuple[float, float]:
        """The smallest message's seconds, and those a byte of the largest that gradients are merged to."""
        largest = 2.0**30
        alpha = collective_seconds("all_reduce", 1.0, self.links)[0]
        return alpha, (collective_seconds("all_reduce", largest, self.links)[0] - alpha) / largest

    def send(
        self, build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float, offset: float
    ) -> list[int]:
        return [build.add(stream, collective_seconds("all_reduce", nbytes, self.links)[0], after, priority)]


def _bandwidth(network: Network) -> float:
    """Of the slowest part of a ring or tree through all devices."""
    if network.nodes == 1:
        return network.local_bandwidth
    return min(network.local_bandwidth, network.crowded_bandwidth)


def _send_line(
    line: tuple[float, float], build: TaskList, stream: int, nbytes: float, after: Sequence[int], priority: float
) -> list[int]:
    return [build.add(stream, line[0] + nbytes * line[1], after, priority)]
