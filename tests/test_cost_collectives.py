"""Collectives: the theory of the α–β model, and the published measurements that the model must not miss by far."""

import itertools
import math

import numpy as np
import pytest

from autopar.cluster import Cluster, load_cluster
from autopar.cost_models.collectives import (
    KINDS,
    algorithms,
    collective_seconds,
    collective_seconds_array,
    wire_bytes,
)
from autopar.cost_models.links import Links, axis_links
from autopar.device import LinkLevel
from autopar.errors import ArgumentError

SIZES = [0.0, 1.0, 1e3, 1e5, 1e6, 1e7, 1e9, 1e11]
MESHES = [(64,), (8, 8), (2, 32), (4, 4, 4), (16, 4), (32, 2)]
GROUPS = [(shape, axes) for shape in MESHES for n in (1, 2) for axes in itertools.combinations(range(len(shape)), n)]


def links_of(shape: tuple[int, ...], axes: tuple[int, ...]) -> Links:
    return axis_links(load_cluster("8x8xh100"), shape, axes)


def one_level(size: int, alpha: float = 1e-5, bandwidth: float = 1e9) -> Links:
    level = LinkLevel(name="l", size=size, alpha=alpha, bandwidth=bandwidth)
    cluster = Cluster(name="c", device=load_cluster("8xh100").device, levels=(level,))
    return axis_links(cluster, (size,), (0,))


@pytest.mark.parametrize(("n", "nbytes"), [(2, 1e3), (5, 1e6), (8, 1e9)])
def test_closed_forms_on_one_level(n: int, nbytes: float) -> None:
    links, alpha, beta = one_level(n), 1e-5, 1e-9
    part = (n - 1) / n * nbytes
    expected = {
        "all_gather": (n - 1) * alpha + part * beta,
        "reduce_scatter": (n - 1) * alpha + part * beta,
        "all_reduce": 2 * (n - 1) * alpha + 2 * part * beta,
        "all_to_all": (n - 1) * alpha + part * beta,
        "broadcast": (n - 1) * alpha + nbytes * beta,
        "send_recv": alpha + nbytes * beta,
    }
    for kind in KINDS:
        assert collective_seconds(kind, nbytes, links)[0] == pytest.approx(expected[kind]), kind


@pytest.mark.parametrize(("shape", "axes"), GROUPS)
def test_all_reduce_is_reduce_scatter_then_all_gather(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    links = links_of(shape, axes)
    for whole, scatter, gather in zip(
        algorithms("all_reduce", links),
        algorithms("reduce_scatter", links),
        algorithms("all_gather", links),
        strict=True,
    ):
        assert whole.algorithm == scatter.algorithm == gather.algorithm
        assert whole.alpha_seconds == pytest.approx(scatter.alpha_seconds + gather.alpha_seconds)
        assert whole.seconds_per_byte == pytest.approx(scatter.seconds_per_byte + gather.seconds_per_byte)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), GROUPS)
def test_the_cheapest_algorithm_is_taken_and_the_array_form_agrees(
    kind: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    links = links_of(shape, axes)
    seconds = [collective_seconds(kind, nbytes, links) for nbytes in SIZES]
    for nbytes, (value, name) in zip(SIZES, seconds, strict=True):
        costs = {a.algorithm: a.alpha_seconds + nbytes * a.seconds_per_byte for a in algorithms(kind, links)}
        assert value == min(costs.values()) == costs[name]
    np.testing.assert_allclose(
        collective_seconds_array(kind, np.array(SIZES), links), [s for s, _ in seconds], rtol=1e-12
    )
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(seconds)), "more bytes, more seconds"


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_free(kind: str) -> None:
    links = one_level(1)
    assert collective_seconds(kind, 1e9, links) == (0.0, "none")
    assert wire_bytes(kind, 1e9, 1) == 0.0
    assert not collective_seconds_array(kind, np.array(SIZES), links).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), GROUPS)
def test_faster_links_never_cost_more(kind: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    base = load_cluster("8x8xh100")
    for k, (field, factor) in itertools.product(range(2), [("bandwidth", 2.0), ("alpha", 0.5)]):
        level = base.levels[k]
        value = getattr(level, field) * factor
        faster = LinkLevel(
            name=level.name,
            size=level.size,
            alpha=value if field == "alpha" else level.alpha,
            bandwidth=value if field == "bandwidth" else level.bandwidth,
        )
        levels = (faster, base.levels[1]) if k == 0 else (base.levels[0], faster)
        other = axis_links(Cluster(name="f", device=base.device, levels=levels), shape, axes)
        for nbytes in SIZES:
            after, before = (
                collective_seconds(kind, nbytes, other)[0],
                collective_seconds(kind, nbytes, links_of(shape, axes))[0],
            )
            assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_on_one_level_and_more_nodes_never_cost_less(kind: str) -> None:
    for nbytes in SIZES:
        flat = [collective_seconds(kind, nbytes, one_level(n))[0] for n in range(1, 20)]
        nodes = [load_cluster(f"{n}x8xh100") for n in range(2, 20)]
        across = [collective_seconds(kind, nbytes, axis_links(c, (c.num_devices,), (0,)))[0] for c in nodes]
        for series in (flat, across):
            assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(series))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), GROUPS)
def test_no_collective_beats_the_bytes_that_must_cross_the_slowest_level(
    kind: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Bytes that the rest of the group must send into one child, over the links of the child's own ranks."""
    links = links_of(shape, axes)
    slowest = links.crossings[0]
    outside = 1 - slowest.lanes / links.size  # part of the tensor that other children hold
    for nbytes in SIZES:
        entering = {
            "all_gather": outside * nbytes,
            "reduce_scatter": outside * nbytes,
            "all_reduce": 2 * outside * nbytes,
            "all_to_all": outside * nbytes * slowest.lanes,  # of each rank's own tensor
            "broadcast": nbytes,
            "send_recv": nbytes,  # only the ranks at the child's edge have a neighbour outside
        }[kind]
        seconds = collective_seconds(kind, nbytes, links)[0]
        assert seconds >= slowest.alpha
        assert seconds >= entering / slowest.lanes / slowest.bandwidth * (1 - 1e-12)


@pytest.mark.parametrize(("shape", "axes"), GROUPS)
def test_a_shift_waits_for_the_rank_whose_neighbour_is_over_the_slowest_level(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    links = links_of(shape, axes)
    slowest = min(links.crossings, key=lambda c: c.bandwidth)
    assert collective_seconds("send_recv", 1e6, links)[0] == pytest.approx(slowest.alpha + 1e6 / slowest.bandwidth)


def test_hierarchical_is_the_sum_of_its_steps_level_by_level() -> None:
    sizes = (3, 2, 4)
    levels = [LinkLevel(name=str(n), size=n, alpha=10.0**-n, bandwidth=10.0 ** (8 + k)) for k, n in enumerate(sizes)]
    cluster = Cluster(name="3x2x4", device=load_cluster("8xh100").device, levels=tuple(levels))
    nbytes = 2.4e9
    expected = dict.fromkeys(("all_gather", "all_to_all", "broadcast"), 0.0)
    piece = nbytes / math.prod(sizes)
    for level in levels:
        for _ in range(level.size - 1):
            expected["all_gather"] += level.alpha + piece / level.bandwidth
            expected["all_to_all"] += level.alpha + nbytes / level.size / level.bandwidth
            expected["broadcast"] += level.alpha
        expected["broadcast"] += nbytes / level.bandwidth  # pipelined: the chain's length costs alpha only
        piece *= level.size
    assert piece == pytest.approx(nbytes), "every rank holds the whole"
    expected |= {"reduce_scatter": expected["all_gather"], "all_reduce": 2 * expected["all_gather"]}
    for kind, seconds in expected.items():
        form = next(a for a in algorithms(kind, axis_links(cluster, (24,), (0,))) if a.algorithm == "hierarchical")
        assert form.alpha_seconds + nbytes * form.seconds_per_byte == pytest.approx(seconds), kind


def test_devices_that_share_a_link_share_its_bandwidth_whatever_the_mesh() -> None:
    v100 = load_cluster("2x8xv100")
    nic = v100.levels[0].bandwidth
    across = axis_links(v100, (2, 8), (0,))  # 8 groups, each with one rank a node, on 4 NICs
    assert algorithms("all_gather", across)[0].seconds_per_byte == pytest.approx(0.5 / (nic / 2))
    whole = axis_links(v100, (16,), (0,))  # one group has all 4 NICs of a node
    assert algorithms("all_gather", whole)[0].seconds_per_byte == pytest.approx(15 / 16 / (4 * nic))


def test_hierarchical_is_offered_only_to_regular_groups_on_several_levels_and_taken_only_when_cheaper() -> None:
    both = links_of((64,), (0,))
    assert {a.algorithm for a in algorithms("all_reduce", both)} == {"ring", "hierarchical"}
    assert collective_seconds("all_reduce", 1e4, both)[1] == "hierarchical"
    assert collective_seconds("all_reduce", 1e10, both)[1] == "ring"
    for axis in (0, 1):
        assert [a.algorithm for a in algorithms("all_reduce", links_of((8, 8), (axis,)))] == ["ring"]
    level = [LinkLevel(name=str(n), size=n, alpha=1e-6, bandwidth=1e9) for n in (3, 2)]
    uneven = Cluster(name="3x2", device=load_cluster("8xh100").device, levels=tuple(level))
    assert [a.algorithm for a in algorithms("all_reduce", axis_links(uneven, (2, 3), (1,)))] == ["ring"]


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_wire_bytes_of_the_ring(n: int) -> None:
    """Counted on the algorithm itself: each of n - 1 steps passes one n-th on."""
    nbytes = 1e6 * n
    steps = sum(nbytes / n for _ in range(n - 1))
    assert wire_bytes("all_gather", nbytes, n) == pytest.approx(steps)
    assert wire_bytes("reduce_scatter", nbytes, n) == pytest.approx(steps)
    assert wire_bytes("all_to_all", nbytes, n) == pytest.approx(steps)
    assert wire_bytes("all_reduce", nbytes, n) == pytest.approx(2 * steps)
    assert wire_bytes("broadcast", nbytes, n) == wire_bytes("send_recv", nbytes, n) == nbytes


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_on_one_level_the_bandwidth_term_is_wire_bytes(kind: str) -> None:
    form = algorithms(kind, one_level(8))[0]
    assert form.seconds_per_byte * 1e9 * 1e9 == pytest.approx(wire_bytes(kind, 1e9, 8))


# seconds a byte fitted on 32 MiB to 16 GiB of nccl-tests, github xxrjun/nccl-tests-cluster, H100
@pytest.mark.parametrize(
    ("nodes", "per_node", "kind", "measured"),
    [
        (10, 1, "all_reduce", 3.676e-11),
        (10, 2, "all_reduce", 1.936e-11),
        (10, 4, "all_reduce", 9.893e-12),
        (10, 8, "all_reduce", 5.645e-12),
        (10, 1, "all_gather", 1.893e-11),
        (10, 2, "all_gather", 9.689e-12),
        (10, 4, "all_gather", 4.907e-12),
        (10, 8, "all_gather", 3.106e-12),
        (10, 2, "reduce_scatter", 9.74e-12),
        (10, 8, "reduce_scatter", 3.052e-12),
        (10, 4, "all_to_all", 1.965e-11),
        (10, 8, "all_to_all", 1.94e-11),
        (1, 8, "all_gather", 2.476e-12),
        (1, 4, "all_to_all", 2.173e-12),
    ],
)
def test_large_messages_are_within_a_sixth_of_what_nccl_measured(
    nodes: int, per_node: int, kind: str, measured: float
) -> None:
    cluster = load_cluster(f"{nodes}x{per_node}xh100")
    seconds = collective_seconds(kind, 1e10, axis_links(cluster, (cluster.num_devices,), (0,)))[0]
    assert math.log(seconds / (measured * 1e10)) == pytest.approx(0, abs=1 / 6)


def test_an_unknown_collective_is_refused() -> None:
    for call in (lambda: collective_seconds("gossip", 1.0, one_level(2)), lambda: wire_bytes("gossip", 1.0, 1)):
        with pytest.raises(ArgumentError, match="'gossip' is unknown; choose one of all_reduce"):
            call()
