"""Collectives: the theory of the α–β model, and the published measurements that the model must not miss by far."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.algorithms import ALGORITHMS, LIBRARIES
from autopar.cost_models.collectives import (
    KINDS,
    Form,
    algorithms,
    cheapest,
    collective_seconds,
    collective_seconds_array,
    least,
    transfer,
    wire_bytes,
)
from autopar.cost_models.links import Links, axis_links
from autopar.errors import ArgumentError
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.link import Line, LinkLevel
from tests.link_cases import DEVICE, depth_of, fastest, one_level, random_links, scaled, two_levels

SIZES = [0.0, 1.0, 1e3, 1e5, 1e6, 1e7, 1e9, 1e11]
SEEDS = range(60)


def form(kind: str, name: str, links: Links) -> Form:
    (found,) = [one for one in algorithms(kind, links) if one.name == name]
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 16])
def test_closed_forms_on_one_level(n: int) -> None:
    """Each algorithm's textbook form, alpha 1e-5 s, 1e9 bytes/s."""
    links, log, part = one_level(n), depth_of(n), (n - 1) / n
    ring = (n - 1, part)
    expected = {
        "all_reduce": {"ring": (2 * (n - 1), 2 * part), "tree": (2 * log, min(n, 4) / 2)},
        "all_gather": {"ring": ring},
        "reduce_scatter": {"ring": ring},
        "all_to_all": {"pairwise": ring, "bruck": (log, log / 2)},
        "broadcast": {
            "ring": (n - 1, 1), "tree": (log, 1), "binomial": (log, log), "scatter_gather": (log + n - 1, 2 * part)
        },
        "scatter": {"direct": ring, "binomial": (log, part)},
        "send_recv": {"direct": (1, 1)},
    }  # fmt: skip
    expected |= {"gather": expected["scatter"], "reduce": expected["broadcast"]}
    if n == 2**log:
        for kind in ("all_gather", "reduce_scatter"):
            expected[kind] = expected[kind] | {"halving_doubling": (log, part)}
        expected["all_reduce"] |= {"halving_doubling": (2 * log, 2 * part), "recursive_doubling": (log, log)}
    for kind in KINDS:
        found = {one.name: (one.alpha_seconds / 1e-5, one.seconds_per_byte * 1e9) for one in algorithms(kind, links)}
        assert set(found) == set(expected[kind]), kind
        for name, constants in expected[kind].items():
            assert found[name] == pytest.approx(constants), (kind, name)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (4, 8), (3, 2), (8, 4)])
def test_closed_forms_on_two_levels(nodes: int, per_node: int) -> None:
    """2 levels as `two_levels` has them: 1e-5 s and 1e9 bytes/s over 1e-6 s and 1e10 bytes/s."""
    links, n = two_levels(nodes, per_node), nodes * per_node
    a, b, c, d, m, k = 1e-5, 1e-9, 1e-6, 1e-10, nodes, per_node
    rate = max(b / k, d)
    steps = m * a + (n - m) * c - c
    outside, inside = (m - 1) / m * b / k, (k - 1) / k * d
    pass_ = (a * (m - 1) + c * (k - 1), outside + inside)
    tree = min(m, 4) / 2 * b / k
    expected = {
        ("all_gather", "ring"): (steps, (n - 1) / n * rate),
        ("all_gather", "hierarchical"): pass_,
        ("all_reduce", "ring"): (2 * steps, 2 * (n - 1) / n * rate),
        ("all_reduce", "tree"): (2 * (depth_of(m) * a + (k - 1) * c), max(tree, 2 * inside)),
        ("all_reduce", "hierarchical"): (2 * pass_[0], 2 * pass_[1]),
        ("all_reduce", "in_network_tree"): (2 * depth_of(m) * a + 2e-6, max(tree, (k + 1) / k / 8e9)),
        ("all_to_all", "pairwise"): ((n - k) * a + (k - 1) * c, max((n - k) / n * b, (k - 1) / n * d)),
        ("all_to_all", "hierarchical"): (pass_[0], (m - 1) / m * b + inside),
        ("broadcast", "ring"): (steps, rate),
        ("broadcast", "tree"): (depth_of(m) * a + (k - 1) * c, rate),
        ("scatter", "binomial"): (depth_of(m) * a + depth_of(k) * c, (m - 1) / m * b + (k - 1) / n * d),
        ("scatter", "direct"): ((n - k) * a + (k - 1) * c, max((n - k) / n * b, (k - 1) / n * d)),
        ("send_recv", "direct"): (a, b),
    }
    if n == 2 ** depth_of(n):
        expected["all_gather", "halving_doubling"] = (depth_of(m) * a + depth_of(k) * c, pass_[1])
    for (kind, name), constants in expected.items():
        assert form(kind, name, links)[2:4] == pytest.approx(constants), (kind, name)


def test_in_one_node_the_switch_reduces_and_between_nodes_too_where_it_can() -> None:
    level = LinkLevel(
        name="node", size=8, alpha=1e-6, bandwidth=1e10, scope="node", in_network=Line(alpha=3e-6, bandwidth=9e9)
    )
    links = axis_links(Cluster(name="c", device=DEVICE, levels=(level,)), (8,), (0,))
    assert form("all_reduce", "in_network", links)[2:4] == pytest.approx((3e-6, 9 / 8 / 9e9))
    network = LinkLevel(name="ib", size=4, alpha=1e-5, bandwidth=1e9, in_network=Line(alpha=2e-5, bandwidth=9e8))
    links = axis_links(Cluster(name="c", device=DEVICE, levels=(network, level)), (32,), (0,))
    assert form("all_reduce", "in_network", links)[2:4] == pytest.approx((2.3e-5, max(1 / 8 / 9e8, 9 / 8 / 9e9)))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cheapest_of_all_forms_is_taken_and_named_and_the_array_form_agrees(seed: int) -> None:
    links = random_links(random.Random(seed))
    for kind in KINDS:
        every = algorithms(kind, links)
        assert set(cheapest(kind, links)) <= set(every)
        for nbytes in SIZES:
            seconds, name = collective_seconds(kind, nbytes, links)
            holding = [one for one in every if one.above <= nbytes <= one.up_to]
            assert seconds == min(one.seconds(nbytes) for one in holding)
            assert seconds in [one.seconds(nbytes) for one in holding if one.name == name]
        expected = [collective_seconds(kind, nbytes, links)[0] for nbytes in SIZES]
        np.testing.assert_allclose(collective_seconds_array(kind, np.array(SIZES), links), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_time_never_falls_when_a_message_grows_a_link_slows_or_a_latency_rises(seed: int) -> None:
    rng = random.Random(1000 + seed)
    links = random_links(rng)
    for kind in KINDS:
        before = [collective_seconds(kind, nbytes, links)[0] for nbytes in SIZES]
        assert all(a <= b for a, b in itertools.pairwise(before)), "more bytes, no fewer seconds"
        for depth in range(len(links.crossings)):
            slower = scaled(links, bandwidth=rng.uniform(0.1, 0.99), depth=depth)
            later = scaled(links, alpha=rng.uniform(1.01, 10), depth=depth)
            for other in (slower, later):
                after = [collective_seconds(kind, nbytes, other)[0] for nbytes in SIZES]
                assert all(a <= b * (1 + 1e-12) for a, b in zip(before, after, strict=True))
        half = scaled(links, bandwidth=0.5, alpha=2.0)
        for nbytes, seconds in zip(SIZES, before, strict=True):
            assert collective_seconds(kind, nbytes, half)[0] <= 2 * seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_traffic_of_others_slows_bytes_and_not_latencies(seed: int) -> None:
    """At a part of the bandwidth the cheapest form is taken anew, so that time never falls when a link slows."""
    rng = random.Random(seed)
    links, part = random_links(rng), rng.uniform(0.2, 1.0)
    for kind in KINDS:
        for nbytes in SIZES:
            forms = [one for one in algorithms(kind, links) if one.above <= nbytes <= one.up_to]
            costs = [max(one.floor, one.alpha_seconds + nbytes * one.seconds_per_byte / part) for one in forms]
            sent = transfer(kind, nbytes, links, part)
            assert sent.seconds(part) == pytest.approx(min(costs), rel=1e-9)
            assert sent.latency_seconds >= -1e-12
            assert least(cheapest(kind, links), nbytes, part)[0] == pytest.approx(min(costs), rel=1e-9)
            whole = collective_seconds(kind, nbytes, links)[0]
            assert transfer(kind, nbytes, links, 1.0).seconds(1.0) == pytest.approx(whole)
            assert whole <= min(costs) * (1 + 1e-9) <= whole / part * (1 + 2e-9)
    with pytest.raises(ArgumentError, match="a message has 0 bytes or more"):
        transfer("all_reduce", -1.0, links, part)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_collective_beats_the_bytes_that_must_enter_a_rank_or_a_group_of_neighbours(seed: int) -> None:
    """By the fastest line of each link: what the rest of the group must send into one child of the slowest level, over
    the links of the child's own ranks; and what a rank must receive, over all its links at once."""
    links = random_links(random.Random(2000 + seed))
    if links.size == 1:
        return
    rates, lanes = fastest(links), links.crossings[0].lanes
    outside = 1 - lanes / links.size
    for kind in KINDS:
        entering = {
            "all_gather": outside, "reduce_scatter": outside, "gather": outside, "scatter": outside,
            "all_reduce": 1.0 if _may_reduce_in_network(links) else 2 * outside,
            "all_to_all": outside * lanes,
        }.get(kind, 1.0)  # fmt: skip
        least = wire_bytes(kind, 1.0, links.size)
        if kind == "all_reduce" and _may_reduce_in_network(links):
            least = 1.0
        for nbytes in SIZES:
            seconds = collective_seconds(kind, nbytes, links)[0]
            if links.regular:
                assert seconds >= entering * nbytes / lanes / rates[0] * (1 - 1e-12), kind
            assert seconds >= least * nbytes / sum(r * c.lanes for r, c in zip(rates, links.crossings, strict=True))


def _may_reduce_in_network(links: Links) -> bool:
    return any(name.startswith("in_network") for name in LIBRARIES[links.library]["all_reduce"]) and any(
        c.level.in_network is not None for c in links.crossings
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_free(kind: str) -> None:
    links = one_level(1)
    assert collective_seconds(kind, 1e9, links) == (0.0, "none")
    assert wire_bytes(kind, 1e9, 1) == 0.0
    assert not collective_seconds_array(kind, np.array(SIZES), links).any()


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "hierarchical"])
def test_all_reduce_is_reduce_scatter_then_all_gather(name: str) -> None:
    links = two_levels(4, 8)
    whole, scatter, gather = (form(kind, name, links) for kind in ("all_reduce", "reduce_scatter", "all_gather"))
    assert whole.alpha_seconds == pytest.approx(scatter.alpha_seconds + gather.alpha_seconds)
    assert whole.seconds_per_byte == pytest.approx(scatter.seconds_per_byte + gather.seconds_per_byte)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_on_one_level_and_more_nodes_never_cost_less(kind: str) -> None:
    for nbytes in SIZES:
        flat = [collective_seconds(kind, nbytes, one_level(n, library="nccl"))[0] for n in range(1, 20)]
        nodes = [load_cluster(f"{n}x8xh100") for n in range(2, 20)]
        across = [collective_seconds(kind, nbytes, axis_links(c, (c.num_devices,), (0,)))[0] for c in nodes]
        for series in (flat, across):
            assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(series))


def test_hierarchical_is_the_sum_of_its_steps_level_by_level() -> None:
    sizes = (3, 2, 4)
    levels = [LinkLevel(name=str(n), size=n, alpha=10.0**-n, bandwidth=10.0 ** (8 + k)) for k, n in enumerate(sizes)]
    cluster = Cluster(name="3x2x4", device=DEVICE, levels=tuple(levels), library="any")
    links, nbytes = axis_links(cluster, (24,), (0,)), 2.4e9
    expected = dict.fromkeys(("all_gather", "all_to_all", "broadcast", "scatter"), 0.0)
    piece, held = nbytes / math.prod(sizes), nbytes
    for level in levels:
        for _ in range(level.size - 1):
            expected["all_gather"] += level.alpha + piece / level.bandwidth
            expected["all_to_all"] += level.alpha + nbytes / level.size / level.bandwidth
            expected["broadcast"] += level.alpha
            expected["scatter"] += level.alpha + held / level.size / level.bandwidth
        expected["broadcast"] += nbytes / level.bandwidth  # pipelined: the chain's length costs alpha only
        piece *= level.size
        held /= level.size
    assert piece == pytest.approx(nbytes), "every rank holds the whole"
    expected |= {"reduce_scatter": expected["all_gather"], "all_reduce": 2 * expected["all_gather"]}
    expected |= {"reduce": expected["broadcast"], "gather": expected["scatter"]}
    for kind, seconds in expected.items():
        assert form(kind, "hierarchical", links).seconds(nbytes) == pytest.approx(seconds), kind


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_runs_its_own_algorithms_of_every_collective(library: str) -> None:
    links = replace(two_levels(4, 8), library=library)
    for kind in KINDS:
        offered = LIBRARIES[library][kind]
        assert set(offered) <= set(ALGORITHMS[kind])
        assert {one.algorithm for one in algorithms(kind, links)} <= set(offered)
    names = {one.algorithm for one in algorithms("all_reduce", links)}
    assert ("hierarchical" in names) == (library == "any")
    assert ("in_network_tree" in names) == (library in ("nccl", "any"))
    assert "in_network" not in names, "the network between nodes does not reduce"


def test_in_a_node_the_tree_is_a_chain_and_not_offered() -> None:
    inside = one_level(8, library="nccl", scope="node")
    assert [one.name for one in algorithms("all_reduce", inside)] == ["ring"]
    assert "tree" in [one.name for one in algorithms("all_reduce", one_level(8, library="nccl"))]


def test_irregular_groups_are_served_by_what_needs_no_order() -> None:
    level = [LinkLevel(name=str(n), size=n, alpha=1e-6, bandwidth=10.0 ** (8 + n)) for n in (3, 2)]
    uneven = axis_links(
        Cluster(name="3x2", device=DEVICE, levels=tuple(level), library="any"), (2, 3), (1,)
    )  # {0, 1, 2} on nodes {0, 1}, {2, 3}, ...
    assert [one.algorithm for one in algorithms("all_reduce", uneven)] == ["ring"]
    assert form("broadcast", "binomial", uneven)[2:4] == pytest.approx((2e-6, 2 / 1e10))
    assert form("scatter", "binomial", uneven)[2:4] == pytest.approx((2e-6, 2 / 3 / 1e10))
    for library in LIBRARIES:
        assert all(algorithms(kind, replace(uneven, library=library)) for kind in KINDS)


def test_small_messages_take_the_protocol_of_little_latency_and_large_ones_that_of_most_bandwidth() -> None:
    links = axis_links(load_cluster("8xh100"), (8,), (0,))
    names = [collective_seconds("all_gather", nbytes, links)[1] for nbytes in SIZES]
    assert names[0] == "ring ll"
    assert names[-1] == "ring"
    assert [name for name, _ in itertools.groupby(names)] == ["ring ll", "ring"] or "ring ll128" in names
    both = axis_links(load_cluster("8x8xh100"), (64,), (0,))
    assert collective_seconds("all_reduce", 1e10, both)[1] == "ring"
    assert collective_seconds("all_reduce", 1e5, both)[1] == "tree ll"
    assert collective_seconds("all_reduce", 1e10, links)[1] == "in_network"


def test_a_line_for_a_collective_changes_that_collective_only() -> None:
    plain = one_level(4, library="gloo")
    crossing = plain.crossings[0]
    measured = Line(alpha=1e-3, bandwidth=5e8, launch=2e-3, kind="all_gather")
    links = replace(plain, crossings=(replace(crossing, level=replace(crossing.level, lines=(measured,))),))
    assert collective_seconds("all_gather", 1e6, links)[0] == pytest.approx(2e-3 + 3e-3 + 0.75 * 1e6 / 5e8)
    for kind in set(KINDS) - {"all_gather"}:
        assert collective_seconds(kind, 1e6, links) == collective_seconds(kind, 1e6, plain)


def test_levels_measured_with_other_bounds_between_small_and_large_serve_every_size() -> None:
    links = two_levels(2, 4, library="gloo")
    bounds = (1e4, 1e6)
    crossings = []
    for crossing, bound in zip(links.crossings, bounds, strict=True):
        small = Line(alpha=1e-6, bandwidth=1e8, kind="all_gather", protocol="small", up_to=bound)
        large = Line(alpha=1e-4, bandwidth=1e9, kind="all_gather", protocol="large", above=bound)
        crossings.append(replace(crossing, level=replace(crossing.level, lines=(small, large))))
    links = replace(links, crossings=tuple(crossings))
    names = [collective_seconds("all_gather", nbytes, links)[1] for nbytes in (1e3, 1e5, 1e7)]
    assert names == ["ring small", "ring large, small", "ring large"]


def test_devices_that_share_a_link_share_its_bandwidth_whatever_the_mesh() -> None:
    v100 = load_cluster("2x8xv100")
    nic = v100.levels[0].bandwidth
    across = axis_links(v100, (2, 8), (0,))  # 8 groups, each with one rank a node, on 4 NICs
    assert form("all_gather", "ring", across).seconds_per_byte == pytest.approx(0.5 / (nic / 2))
    alone = axis_links(v100, (2, 8), (0,), is_alone=True)
    assert form("all_gather", "ring", alone).seconds_per_byte == pytest.approx(0.5 / nic)
    whole = axis_links(v100, (16,), (0,))  # one group has all 4 NICs of a node
    assert form("all_gather", "ring", whole).seconds_per_byte == pytest.approx(15 / 16 / (4 * nic))


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
        (1, 8, "all_reduce", 3.688e-12),
        (1, 8, "all_gather", 2.476e-12),
        (1, 4, "all_to_all", 2.173e-12),
    ],
)
def test_large_messages_are_within_an_eighth_of_what_nccl_measured(
    nodes: int, per_node: int, kind: str, measured: float
) -> None:
    cluster = load_cluster(f"{nodes}x{per_node}xh100" if nodes > 1 else f"{per_node}xh100")
    seconds = collective_seconds(kind, 1e10, axis_links(cluster, (cluster.num_devices,), (0,)))[0]
    assert math.log(seconds / (measured * 1e10)) == pytest.approx(0, abs=1 / 8)


def test_what_cannot_be_is_refused() -> None:
    links = one_level(2)
    for call in (lambda: collective_seconds("gossip", 1.0, links), lambda: wire_bytes("gossip", 1.0, 1)):
        with pytest.raises(ArgumentError, match="'gossip' is unknown; choose one of all_reduce"):
            call()
    for nbytes in (-1.0, math.nan):
        with pytest.raises(ArgumentError, match=f"all_gather of {nbytes} bytes: a message has 0 bytes or more"):
            collective_seconds("all_gather", nbytes, links)
    with pytest.raises(ArgumentError, match=r"all_gather of -2.0 bytes"):
        collective_seconds_array("all_gather", np.array([1.0, -2.0]), links)
