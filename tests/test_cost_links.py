"""Which links a group crosses: against an enumeration of its ranks, on every mesh of small clusters."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from autopar.cost_models.links import axis_links
from autopar.errors import MeshError
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.link import LinkLevel
from autopar.values.mesh import make_mesh

DEVICE = load_cluster("8xh100").device


def cluster_of(*sizes: int) -> Cluster:
    levels = tuple(
        LinkLevel(name=f"level{k}", size=n, alpha=10.0 ** (-k), bandwidth=10.0**k) for k, n in enumerate(sizes)
    )
    return Cluster(name="x".join(map(str, sizes)), device=DEVICE, levels=levels)


def factorisations(n: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of n into factors above 1."""
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorisations(n // first))


def groups_along(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[list[int]]:
    """Ranks that agree in every coordinate but those of `axes`."""
    mesh = make_mesh(shape)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        groups.setdefault(tuple(c for k, c in enumerate(coordinate) if k not in axes), []).append(rank)
    return list(groups.values())


def place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return make_mesh(sizes).coordinate(rank)


def meeting_level(a: int, b: int, sizes: tuple[int, ...]) -> int:
    return next(k for k, (x, y) in enumerate(zip(place(a, sizes), place(b, sizes), strict=True)) if x != y)


def described(group: list[int], sizes: tuple[int, ...]) -> list[tuple[int, int, int, int, int]]:
    """(level, members, lanes, hops, peers) of one group, by enumeration of its ranks and pairs."""
    out = []
    ring = Counter(meeting_level(a, b, sizes) for a, b in zip(group, group[1:] + group[:1], strict=True))
    for level in range(len(sizes)):
        if not ring[level]:
            continue
        children = Counter(place(rank, sizes)[: level + 1] for rank in group)
        members = Counter(child[:-1] for child in children)
        peers = [sum(b != a and meeting_level(a, b, sizes) == level for b in group) for a in group]
        out.append((level, max(members.values()), min(children.values()), ring[level], max(peers)))
    return out


def is_regular(group: list[int], sizes: tuple[int, ...]) -> bool:
    """Whether at every level the occupied children hold equally many ranks of the group."""
    counts = [Counter(place(rank, sizes)[: level + 1] for rank in group) for level in range(len(sizes))]
    return all(len(set(count.values())) == 1 for count in counts)


CASES = [
    (sizes, shape, axes)
    for sizes in [(2, 8), (4, 8), (2, 3, 4), (3, 4), (8,), (1, 8)]
    for shape in factorisations(math.prod(sizes))
    for count in range(1, len(shape) + 1)
    for axes in combinations(range(len(shape)), count)
]


@pytest.mark.parametrize("sizes", sorted({case[0] for case in CASES}), ids=str)
def test_links_are_those_of_the_enumerated_groups(sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(*sizes)
    for shape, axes in [(shape, axes) for case, shape, axes in CASES if case == sizes]:
        links = axis_links(cluster, shape, axes)
        groups = groups_along(shape, axes)
        found = [(int(c.name[-1]), c.members, c.lanes, c.hops, c.peers) for c in links.crossings]
        all_described = [described(group, sizes) for group in groups]
        assert links.size == len(groups[0])
        assert found in all_described, (shape, axes)
        # the slowest level that any group crosses is in the answer
        assert found[0][0] == min(one[0][0] for one in all_described), (shape, axes)
        for c in links.crossings:
            level = cluster.levels[int(c.name[-1])]
            assert (c.alpha, c.bandwidth) == (level.alpha, level.bandwidth_per_device)
        assert links.regular == all(is_regular(group, sizes) for group in groups), (shape, axes)
        if links.regular:
            assert math.prod(c.members for c in links.crossings) == links.size
        assert sum(c.hops for c in links.crossings) == links.size
        assert sum(c.peers for c in links.crossings) >= links.size - 1


@pytest.mark.parametrize("sizes", [(2, 8), (8, 8), (4, 2, 8)], ids=str)
def test_on_powers_of_two_every_group_of_an_axis_is_alike_and_regular(sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(*sizes)
    for shape in factorisations(math.prod(sizes)):
        for axis in range(len(shape)):
            links = axis_links(cluster, shape, (axis,))
            descriptions = [described(group, sizes) for group in groups_along(shape, (axis,))]
            assert links.regular
            assert all(one == descriptions[0] for one in descriptions)


def test_an_axis_may_straddle_levels() -> None:
    crossings = axis_links(cluster_of(8, 8), (4, 4, 4), (1,)).crossings
    assert [(c.name, c.members, c.lanes) for c in crossings] == [("level0", 2, 2), ("level1", 2, 1)]


def test_an_axis_that_does_not_fit_the_nodes_is_irregular_and_costed_by_its_slowest_group() -> None:
    links = axis_links(cluster_of(2, 3), (3, 2), (1,))  # {0,1}, {2,3}, {4,5} on nodes {0,1,2}, {3,4,5}
    assert [c.name for c in links.crossings] == ["level0"]
    three = axis_links(cluster_of(3, 2), (2, 3), (1,))  # {0,1,2} on nodes {0,1}, {2,3}
    assert not three.regular
    assert [(c.name, c.lanes, c.hops) for c in three.crossings] == [("level0", 1, 2), ("level1", 1, 1)]


def test_a_group_of_one_crosses_nothing() -> None:
    assert axis_links(cluster_of(2, 8), (16, 1), (1,)).crossings == ()
    assert axis_links(cluster_of(2, 8), (16,), ()).size == 1


def test_the_order_of_axes_does_not_matter() -> None:
    cluster = cluster_of(2, 8)
    for a, b in product(range(3), repeat=2):
        if a != b:
            assert axis_links(cluster, (2, 4, 2), (a, b)) == axis_links(cluster, (2, 4, 2), (b, a))


def test_a_mesh_of_another_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(MeshError, match=r"mesh 4x2 has 8 ranks but cluster 2x8 has 16 devices; choose a mesh of 16"):
        axis_links(cluster_of(2, 8), (4, 2), (0,))


@pytest.mark.parametrize(
    ("devices_per_link", "axis", "together", "alone"),
    [
        (1, 0, 1, 1.0),  # a link of its own for each device
        (4, 0, 4, 1.0),  # two links a node: the one lane of a group that is alone has one of them
        (8, 0, 8, 1.0),
        (64, 0, 8, 1.0),  # no more than the node's devices can share
    ],
)
def test_groups_share_links_and_a_group_that_is_alone_shares_with_its_own_lanes(
    devices_per_link: int, axis: int, together: int, alone: float
) -> None:
    cluster = cluster_of(2, 8)
    shared = replace(cluster.levels[0], devices_per_link=devices_per_link)
    cluster = replace(cluster, levels=(shared, cluster.levels[1]))
    assert axis_links(cluster, (2, 8), (axis,)).crossings[0].share == together
    assert axis_links(cluster, (2, 8), (axis,), is_alone=True).crossings[0].share == alone
    whole = axis_links(cluster, (16,), (0,), is_alone=True).crossings[0]
    assert whole.lanes == 8
    assert whole.share == together, "a group of all devices has no other to share with"


@pytest.mark.parametrize("axes", [(0, 0), (2,), (-1,)])
def test_axes_that_the_mesh_lacks_are_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="give each axis once"):
        axis_links(cluster_of(2, 8), (2, 8), axes)
