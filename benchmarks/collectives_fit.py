"""Which few constants of links explain measured collectives? Least squares on the logarithm of the time, outliers
damped.

A node's link has three constants a GPU generation and its reducing switch two, a network ten a cluster; what
distinguishes NCCL's protocols is not fitted but NCCL's own: latencies a hop, launches and bandwidth fractions of
github NVIDIA/nccl src/graph/tuning.cc (hwLatencies, baseLatencies, protocol efficiency). The harness that measured
adds one constant, the time of a call that its clock sees. Bandwidths are fitted as fractions of the line rate, so none
can exceed it; latencies are positive. The times fitted are those of `cost_models.collectives`, nothing is modelled
here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.cost_models.collectives import Form, algorithms
from autopar.cost_models.links import Links, axis_links
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.link import Line, LinkLevel
from benchmarks.collectives_rows import Measurement

# name -> (least, first guess, most)
Bounds = Mapping[str, tuple[float, float, float]]
NODE: Bounds = {
    "alpha_scale": (0.1, 1.0, 10.0),  # of NCCL's latencies a hop inside a node
    "fraction": (0.3, 0.8, 1.0),  # of the line rate
    "protocol_fraction": (0.1, 0.92, 1.0),  # bandwidth of LL128, of that of Simple
}
SWITCH: Bounds = {
    "switch_alpha": (1e-6, 2.5e-5, 1e-3),  # seconds of an all-reduce in the switch
    "switch_fraction": (0.3, 0.7, 1.0),  # of the line rate
}
REDUCING_SWITCHES = ("Hopper", "Blackwell")  # NVLink SHARP came with the third NVSwitch
NETWORK: Bounds = {
    "ring_alpha": (1e-6, 1.4e-5, 1e-3),  # seconds a hop
    "ring_fraction": (0.1, 0.9, 1.0),  # of the line rate
    "tiny_alpha": (1e-6, 5e-6, 1e-3),  # a tree's hop under LL, NCCL's own for a first guess
    "tiny_fraction": (1e-4, 0.1, 0.5),
    "small_alpha": (1e-6, 2e-5, 1e-3),  # a tree's hop under LL128
    "small_fraction": (0.01, 0.4, 1.0),
    "large_alpha": (1e-6, 1e-4, 1e-2),  # a tree's hop under Simple: it fills a pipeline of large chunks first
    "large_fraction": (0.05, 0.8, 1.0),
    "peer_alpha": (1e-7, 5e-6, 5e-5),  # seconds a peer of an all-to-all
    "send_fraction": (0.1, 0.7, 1.0),
}
HARNESS: Bounds = {"nccl-tests": (1e-7, 3e-6, 1e-3), "all_reduce_bench": (1e-7, 3e-5, 1e-3)}

# NCCL tuning.cc: hwLatencies of NVLINK and PCI Ring LL, LL128, Simple (PCIe has no LL128: it does not keep 128 bytes
# together); baseLatencies of Ring; protocol efficiency of LL.
NVLINK_HOP = {"": 3.4e-6, "ll": 0.6e-6, "ll128": 1.9e-6}
PCI_HOP = {"": 5.7e-6, "ll": 1.0e-6}
BASE = {"ll": 6.6e-6, "ll128": 14.0e-6, "": 8.4e-6}
LL_FRACTION = 0.5
RING_TO_TREE = 2.7 / 5.0  # hwLatencies of NET under LL

UNSCORED_WEIGHT = 0.3
PULL = 0.02
"""Weight of a first guess against a measurement: it settles what the rows leave open, and little else."""

Constants = Mapping[str, float]


def node_level(
    size: int, rate: float, node: Constants, launch: float, hop: Mapping[str, float] = NVLINK_HOP
) -> LinkLevel:
    bandwidth = rate * node["fraction"]
    parts = {"ll": LL_FRACTION, "ll128": node["protocol_fraction"], "": 1.0}
    general, *lines = (
        Line(
            protocol=protocol,
            alpha=alpha * node["alpha_scale"],
            bandwidth=bandwidth * parts[protocol],
            launch=launch + BASE[protocol],
        )
        for protocol, alpha in hop.items()
    )
    return LinkLevel(
        name="node",
        size=size,
        scope="node",
        alpha=general.alpha,
        bandwidth=general.bandwidth,
        launch=general.launch,
        line_rate=rate,
        lines=tuple(lines),
        in_network=Line(alpha=node["switch_alpha"], bandwidth=rate * node["switch_fraction"], launch=launch)
        if "switch_alpha" in node
        else None,
    )


def network_level(size: int, rate: float, net: Constants, launch: float) -> LinkLevel:
    ring = rate * net["ring_fraction"]
    return LinkLevel(
        name="network",
        size=size,
        alpha=net["ring_alpha"],
        bandwidth=ring,
        launch=launch + BASE[""],
        line_rate=rate,
        lines=(
            *(
                Line(
                    protocol=protocol,
                    algorithm="tree",
                    alpha=net[f"{which}_alpha"],
                    bandwidth=rate * net[f"{which}_fraction"],
                    launch=launch + BASE[protocol],
                )
                for which, protocol in (("tiny", "ll"), ("small", "ll128"), ("large", ""))
            ),
            Line(
                protocol="ll",
                alpha=net["tiny_alpha"] * RING_TO_TREE,
                bandwidth=rate * net["tiny_fraction"],
                launch=launch + BASE["ll"],
            ),
            Line(kind="all_to_all", alpha=net["peer_alpha"], bandwidth=ring, launch=launch + BASE[""]),
            *(
                Line(kind="send_recv", alpha=net["ring_alpha"], bandwidth=rate * part, launch=launch + BASE[""])
                for part in (net.get("send_fraction"),)
                if part is not None
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Measurements of one collective on one group, as arrays."""

    kind: str
    nodes: int
    per_node: int
    variant: str
    harness: str
    node_rate: float
    nbytes: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]

    def residuals(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self.weight * np.log(seconds / self.seconds)


def batches(measurements: Sequence[Measurement]) -> list[Batch]:
    groups: dict[tuple[str, int, int, str, str, float], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.kind, m.nodes, m.per_node, m.variant, m.harness, m.node_rate), []).append(m)
    return [
        Batch(
            *key,
            nbytes=np.array([m.nbytes for m in rows]),
            seconds=np.array([m.seconds for m in rows]),
            weight=np.array([1.0 if m.is_scored else UNSCORED_WEIGHT for m in rows]),
        )
        for key, rows in groups.items()
    ]


def predict(batch: Batch, node: Constants, net: Constants | None, rate: float | None) -> npt.NDArray[np.float64]:
    """Seconds of each measurement of a batch; `net` and `rate` are needed across nodes."""
    launch = node[batch.harness]
    levels = [node_level(batch.per_node, batch.node_rate, node, launch)]
    if batch.nodes > 1:
        assert net is not None and rate is not None, "a group on several nodes needs its network's constants"
        levels.insert(0, network_level(batch.nodes, rate, net, launch))
    # Past the cache: it would keep the forms of every guess of a fit.
    return forms_seconds(algorithms.__wrapped__(batch.kind, links_of(tuple(levels))), batch)


def forms_seconds(forms: Sequence[Form], batch: Batch) -> npt.NDArray[np.float64]:
    """The cheapest of the forms, of those of the batch's algorithm if its source fixed one."""
    chosen = [form for form in forms if batch.variant in ("", form.algorithm)]
    assert chosen, f"no form of {batch.kind} is {batch.variant}"
    seconds = np.stack([form.alpha_seconds + batch.nbytes * form.seconds_per_byte for form in chosen])
    return np.asarray(seconds.min(axis=0), dtype=np.float64)


def links_of(levels: tuple[LinkLevel, ...]) -> Links:
    """Links of the group of all devices."""
    group = _group(tuple(level.size for level in levels))
    by_name = {level.name: level for level in levels}
    return replace(group, crossings=tuple(replace(c, level=by_name[c.name]) for c in group.crossings))


@lru_cache
def _group(sizes: tuple[int, ...]) -> Links:
    """Who crosses what, which no constant changes."""
    names = ("node",) if len(sizes) == 1 else ("network", "node")
    levels = tuple(LinkLevel(name=name, size=n, alpha=1.0, bandwidth=1.0) for name, n in zip(names, sizes, strict=True))
    cluster = Cluster(name="measured", device=load_cluster("8xh100").device, levels=levels)
    return axis_links(cluster, (cluster.num_devices,), (0,))


def fit(bounds: Bounds, residuals: Callable[[Constants], npt.NDArray[np.float64]]) -> dict[str, float]:
    """Constants within their bounds for which the residuals are least; errors beyond 10% count less than their
    square."""
    names = list(bounds)
    low, first, high = (np.log([bounds[name][k] for name in names]) for k in range(3))

    def constants(point: npt.NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(names, np.exp(np.clip(point, low, high)).tolist(), strict=True))

    def pulled(point: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.concatenate([residuals(constants(point)), PULL * (point - first)])

    solution = least_squares(
        pulled, np.clip(first, low + 1e-9, high - 1e-9),
        bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=60,
    )  # fmt: skip
    return constants(solution.x)


def fit_node(measurements: Sequence[Measurement], generation: str) -> dict[str, float]:
    """Constants of a generation's node link and of the harnesses, from its rows inside one node.

    A generation without such rows has the first guesses.
    """
    bounds = {**NODE, **(SWITCH if generation in REDUCING_SWITCHES else {}), **HARNESS}
    groups = batches([m for m in measurements if m.nodes == 1 and m.generation == generation])

    def residuals(c: Constants) -> npt.NDArray[np.float64]:
        parts = [b.residuals(predict(b, c, None, None)) for b in groups]
        return np.concatenate([np.zeros(0), *parts])

    return fit(bounds, residuals)


def fit_network(measurements: Sequence[Measurement], node: Constants, rates: Mapping[str, float]) -> dict[str, float]:
    """Constants of a network, from rows across nodes of one cluster or several with their own line rates."""
    groups = [
        (rates[cluster], batch)
        for cluster in sorted({m.cluster for m in measurements if m.nodes > 1})
        for batch in batches([m for m in measurements if m.cluster == cluster and m.nodes > 1])
    ]

    def residuals(c: Constants) -> npt.NDArray[np.float64]:
        parts = [b.residuals(predict(b, node, c, rate)) for rate, b in groups]
        return np.concatenate([np.zeros(0), *parts])

    return fit(NETWORK, residuals)
