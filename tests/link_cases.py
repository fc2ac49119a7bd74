"""Random machines and groups for tests of collectives: any number of levels, any sharing, any protocols."""

import math
import random
from dataclasses import replace

from autopar.cost_models.collectives import KINDS
from autopar.cost_models.links import Links, axis_links
from autopar.values.cluster import LIBRARIES, Cluster, load_cluster
from autopar.values.link import Line, LinkLevel

DEVICE = load_cluster("8xh100").device


def one_level(
    size: int, alpha: float = 1e-5, bandwidth: float = 1e9, *, library: str = "any", scope: str = "network"
) -> Links:
    level = LinkLevel(name="l", size=size, alpha=alpha, bandwidth=bandwidth, scope=scope)
    return axis_links(Cluster(name="c", device=DEVICE, levels=(level,), library=library), (size,), (0,))


def two_levels(nodes: int, per_node: int, *, library: str = "any") -> Links:
    """Latencies 1e-5 and 1e-6 s, bandwidths 1e9 and 1e10 bytes/s, a link a device, switches that reduce in the node."""
    levels = (
        LinkLevel(name="network", size=nodes, alpha=1e-5, bandwidth=1e9),
        LinkLevel(
            name="node", size=per_node, alpha=1e-6, bandwidth=1e10, scope="node",
            in_network=Line(alpha=2e-6, bandwidth=8e9),
        ),
    )  # fmt: skip
    cluster = Cluster(name="c", device=DEVICE, levels=levels, library=library)
    return axis_links(cluster, (cluster.num_devices,), (0,))


def random_cluster(rng: random.Random) -> Cluster:
    levels = []
    for k in range(rng.randint(1, 3)):
        bandwidth = 10 ** rng.uniform(8, 12)
        levels.append(
            LinkLevel(
                name=f"level{k}",
                size=rng.choice([1, 2, 3, 4, 6, 8]),
                alpha=10 ** rng.uniform(-7, -3),
                bandwidth=bandwidth,
                launch=rng.choice([0.0, 1e-5]),
                devices_per_link=rng.choice([1, 1, 2, 4]),
                scope=rng.choice(["node", "network"]),
                lines=(
                    *(_random_line(rng, bandwidth) for _ in range(rng.randint(0, 3))),
                    *(_random_ranges(rng, bandwidth) if rng.random() < 0.3 else ()),
                ),
                in_network=rng.choice([None, _random_line(rng, bandwidth)]),
            )
        )
    return Cluster(name="random", device=DEVICE, levels=tuple(levels), library=rng.choice(LIBRARIES))


def _random_line(rng: random.Random, bandwidth: float) -> Line:
    return Line(
        alpha=10 ** rng.uniform(-7, -3),
        bandwidth=bandwidth * rng.uniform(0.1, 1.0),
        protocol=rng.choice(["", "ll", "ll128"]),
        algorithm=rng.choice(["", "", "ring", "tree"]),
        kind=rng.choice(["", "", *KINDS]),
    )


def _random_ranges(rng: random.Random, bandwidth: float) -> tuple[Line, ...]:
    """Lines of one collective as a calibration writes them: one for small messages, one for large ones."""
    kind, split = rng.choice(KINDS), 10 ** rng.uniform(3, 8)
    small, large = (replace(_random_line(rng, bandwidth), kind=kind, algorithm="") for _ in range(2))
    return replace(small, protocol="small", up_to=split), replace(large, protocol="large", above=split)


def random_axis(rng: random.Random, cluster: Cluster) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A mesh of the cluster and one or two of its axes."""
    rest, shape = cluster.num_devices, []
    while rest > 1:
        shape.append(rng.choice([n for n in range(2, rest + 1) if rest % n == 0]))
        rest //= shape[-1]
    shape = shape or [1]
    return tuple(shape), tuple(rng.sample(range(len(shape)), rng.randint(1, min(2, len(shape)))))


def random_links(rng: random.Random) -> Links:
    cluster = random_cluster(rng)
    return axis_links(cluster, *random_axis(rng, cluster), is_alone=rng.random() < 0.3)


def scaled(links: Links, *, alpha: float = 1.0, bandwidth: float = 1.0, depth: int | None = None) -> Links:
    """The same group on links whose every line is slower or faster, on one of the levels crossed or on all."""

    def line(one: Line) -> Line:
        return replace(one, alpha=one.alpha * alpha, bandwidth=one.bandwidth * bandwidth)

    def level(one: LinkLevel) -> LinkLevel:
        return replace(
            one,
            alpha=one.alpha * alpha,
            bandwidth=one.bandwidth * bandwidth,
            lines=tuple(line(each) for each in one.lines),
            in_network=None if one.in_network is None else line(one.in_network),
        )

    crossings = tuple(
        replace(c, level=level(c.level)) if depth in (None, k) else c for k, c in enumerate(links.crossings)
    )
    return replace(links, crossings=crossings)


def fastest(links: Links) -> list[float]:
    """The greatest bandwidth of a device on each level crossed, by any line."""
    return [max(line.bandwidth for line in c.level.all_lines()) / c.share for c in links.crossings]


def depth_of(n: int) -> int:
    return math.ceil(math.log2(n)) if n > 1 else 0
