"""Ranks that computed: a collective waits for the last of them, and calibration finds by how much."""

import random

import numpy as np
import pytest

from autopar.calibration.fit_skew import fit_skew
from autopar.calibration.samples import SkewSample
from autopar.cost_models.collectives import cheapest, cheapest_in_step, skew_seconds
from autopar.cost_models.links import axis_links
from autopar.errors import ClusterError
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.link import LinkLevel

DEVICE = load_cluster("4xcpu").device


def level(name: str, size: int, skew: float) -> LinkLevel:
    return LinkLevel(name=name, size=size, alpha=1e-5, bandwidth=1e9, skew=skew)


def cluster(*levels: LinkLevel) -> Cluster:
    return Cluster(name="late", device=DEVICE, levels=levels)


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_a_group_waits_for_the_last_of_its_ranks(size: int) -> None:
    delays = np.random.default_rng(size).exponential(2e-3, (100_000, size))
    waited = (delays.max(axis=1) - delays.mean(axis=1)).mean()
    links = axis_links(cluster(level("l", size, 2e-3)), (size,), (0,))
    assert skew_seconds(links) == pytest.approx(waited, rel=0.03)
    for kind in ("all_reduce", "all_gather", "send_recv"):
        waits = 0.0 if kind == "send_recv" else skew_seconds(links)
        for alone, in_step in zip(cheapest(kind, links), cheapest_in_step(kind, links), strict=True):
            assert in_step.seconds(1e6) == pytest.approx(alone.seconds(1e6) + waits)


def test_a_group_over_several_levels_waits_by_the_latest() -> None:
    slow_network, slow_node = (
        cluster(level("a", 2, 3e-3), level("b", 2, 1e-3)),
        cluster(level("a", 2, 1e-3), level("b", 2, 3e-3)),
    )
    for late in (slow_network, slow_node):
        assert skew_seconds(axis_links(late, (4,), (0,))) == pytest.approx(3e-3 * (1 / 2 + 1 / 3 + 1 / 4))
    assert skew_seconds(axis_links(slow_network, (2, 2), (1,))) == pytest.approx(1e-3 / 2)
    assert skew_seconds(axis_links(slow_network, (4, 1), (1,))) == 0.0


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"skew -1\.0 must be finite and not negative"):
        level("l", 2, -1.0)


@pytest.mark.parametrize("seed", range(4))
def test_delays_are_recovered_from_noise_and_never_below_nothing(seed: int) -> None:
    rng = random.Random(seed)
    truth, noise = 10 ** rng.uniform(-5, -2), rng.uniform(0.1, 0.5)
    groups = [rng.choice((2, 4)) for _ in range(200)]
    waits = [truth * sum(1 / rank for rank in range(2, n + 1)) + rng.gauss(0, noise * truth) for n in groups]
    skew, error = fit_skew(_samples(groups, waits))
    assert 0 < error < noise * truth and abs(skew - truth) < 4 * error
    assert fit_skew(_samples(groups, [-abs(wait) for wait in waits]))[0] == 0 == fit_skew([])[0]


def _samples(groups: list[int], waits: list[float]) -> list[SkewSample]:
    return [
        SkewSample(kind="all_reduce", level=0, group_size=n, compute_seconds=5e-3, seconds=wait)
        for n, wait in zip(groups, waits, strict=True)
    ]
