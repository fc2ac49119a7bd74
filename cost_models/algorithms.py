"""What does each collective algorithm cost? Closed forms `alpha + nbytes * beta` over the link levels of a group.

n ranks; on level l a device has latency a_l and bandwidth b_l, and the group m_l members (children it occupies), k_l
lanes (its ranks in one child, sending side by side), h_l ring hops and p_l peers of a rank. N = `nbytes` as
`collectives` counts it. Depth d_l = ceil(log2 m_l), or m_l - 1 inside a node, where NCCL's tree is a chain
(src/graph/trees.cc). Sums and maxima run over levels.

ring                pass: sum h_l a_l - min a_l + (n-1)/n N / min k_l b_l; all-gather, reduce-scatter one, all-reduce
                    two; broadcast, reduce: one chain, pipelined, N whole [1]; hops as nInterSteps of NCCL's tuner [3]
tree                double binary tree, pipelined [2]. all-reduce: 2 sum d_l a_l + N max t_l / (k_l b_l), with
                    t_l = min(m_l, 4)/2, what the busiest member sends over both trees, 2 (m_l-1)/m_l in a chain;
                    broadcast, reduce: half the alpha, t_l = 1
halving_doubling    ring's pass level by level with log2 m_l messages a level, m_l powers of two [1]
recursive_doubling  all-reduce: sum log2 m_l (a_l + N / b_l) [1]
binomial            scatter, gather: sum d_l a_l + N sum (m_l-1)/M_l / b_l, M_l = m_1 ... m_l, slowest level first;
                    broadcast, reduce: sum d_l (a_l + N / b_l) [1]; d_l never a chain's. A group with unequal
                    children counts ceil(log2 n) steps of its slowest level
scatter_gather      broadcast: binomial scatter, ring all-gather; reduce: ring reduce-scatter, binomial gather [1]
pairwise            all-to-all: sum p_l a_l + N max p_l/n / b_l [1]
bruck               all-to-all: ceil(log2 n) (max a_l + N/2 / min b_l) [1]
direct              scatter, gather: as pairwise, all from or to the root; send/recv: max a_l + N / min b_l
hierarchical        level by level: a ring pass on each, with the part of N that is left for a lane; all-to-all and
                    broadcast hand the whole tensor on at each level, lanes do not divide it
in_network          all-reduce in the switches [4]: sum a_l + N max r_l / (k_l b_l), r_l = (m_l+1)/m_l in a node (each
                    rank reads its m-th part reduced and stores it multicast: N + N/m cross its link), 1 in a network
in_network_tree     the same inside nodes, double binary tree between them (NCCL's NVLSTree)

[1] Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH.
[2] Sanders, Speck, Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan.
[3] Hu et al. 2025, Demystifying NCCL; github NVIDIA/nccl src/graph/tuning.cc.
[4] Klenk et al. 2020, An in-network architecture for accelerating shared-memory multiprocessor collectives; Graham et
    al. 2016, Scalable hierarchical aggregation protocol (SHARP).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """One level as an algorithm sees it: constants of a device, counts of the group (see `links.Crossing`)."""

    alpha: float
    bandwidth: float
    members: int
    lanes: int
    hops: int
    peers: int
    in_node: bool

    @property
    def rate(self) -> float:
        """Bytes/s of all lanes of a child together."""
        return self.lanes * self.bandwidth

    @property
    def logarithm(self) -> int:
        return (self.members - 1).bit_length()

    @property
    def depth(self) -> int:
        return self.members - 1 if self.in_node else self.logarithm


class RankGroup(NamedTuple):
    """`hops` slowest level first; `regular` as in `links.Links`."""

    size: int
    hops: tuple[Hop, ...]
    regular: bool


class Cost(NamedTuple):
    alpha_seconds: float
    seconds_per_byte: float

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.alpha_seconds + other.alpha_seconds, self.seconds_per_byte + other.seconds_per_byte)

    def times(self, count: int) -> "Cost":
        return Cost(count * self.alpha_seconds, count * self.seconds_per_byte)


Algorithm = Callable[[RankGroup], Cost | None]
"""None: the algorithm does not serve such a group."""


def ring_pass(group: RankGroup) -> Cost:
    return Cost(_ring_alpha(group.hops), (group.size - 1) / group.size / _ring_rate(group.hops))


def ring_chain(group: RankGroup) -> Cost:
    return Cost(_ring_alpha(group.hops), 1 / _ring_rate(group.hops))


def tree_all_reduce(group: RankGroup) -> Cost | None:
    if not group.regular or all(hop.in_node for hop in group.hops):
        return None
    alpha = 2 * sum(hop.depth * hop.alpha for hop in group.hops)
    return Cost(alpha, max(_tree_traffic(hop) / hop.rate for hop in group.hops))


def tree_broadcast(group: RankGroup) -> Cost | None:
    if not group.regular or all(hop.in_node for hop in group.hops):
        return None
    return Cost(sum(hop.depth * hop.alpha for hop in group.hops), 1 / _ring_rate(group.hops))


def halving_doubling(group: RankGroup) -> Cost | None:
    if not _is_power_of_two(group):
        return None
    alpha = sum(hop.logarithm * hop.alpha for hop in group.hops)
    return Cost(alpha, sum((hop.members - 1) / hop.members / hop.rate for hop in group.hops))


def recursive_doubling(group: RankGroup) -> Cost | None:
    if not _is_power_of_two(group):
        return None
    return _binomial_whole(group)


def binomial_broadcast(group: RankGroup) -> Cost:
    if group.regular:
        return _binomial_whole(group)
    steps, slowest = (group.size - 1).bit_length(), shift(group)
    return slowest.times(steps)


def binomial_scatter(group: RankGroup) -> Cost:
    if group.regular:
        return Cost(sum(hop.logarithm * hop.alpha for hop in group.hops), _scattered(group.hops))
    steps, slowest = (group.size - 1).bit_length(), shift(group)
    return Cost(steps * slowest.alpha_seconds, (group.size - 1) / group.size * slowest.seconds_per_byte)


def scatter_gather(group: RankGroup) -> Cost:
    return binomial_scatter(group).plus(ring_pass(group))


def pairwise(group: RankGroup) -> Cost:
    alpha = sum(hop.peers * hop.alpha for hop in group.hops)
    return Cost(alpha, max(hop.peers / hop.bandwidth for hop in group.hops) / group.size)


def bruck(group: RankGroup) -> Cost:
    steps = (group.size - 1).bit_length()
    alpha, bandwidth = max(hop.alpha for hop in group.hops), min(hop.bandwidth for hop in group.hops)
    return Cost(steps * alpha, steps / 2 / bandwidth)


def shift(group: RankGroup) -> Cost:
    return Cost(max(hop.alpha for hop in group.hops), 1 / min(hop.bandwidth for hop in group.hops))


def hierarchical_pass(group: RankGroup) -> Cost | None:
    return _by_levels(group, [(hop.members - 1) / hop.members / hop.rate for hop in group.hops])


def hierarchical_all_to_all(group: RankGroup) -> Cost | None:
    return _by_levels(group, [(hop.members - 1) / hop.members / hop.bandwidth for hop in group.hops])


def hierarchical_broadcast(group: RankGroup) -> Cost | None:
    return _by_levels(group, [1 / hop.bandwidth for hop in group.hops])


def hierarchical_scatter(group: RankGroup) -> Cost | None:
    return _by_levels(group, [_scattered(group.hops)])


def in_network(group: RankGroup) -> Cost | None:
    """The hops' constants are those of the switches at each level."""
    if not group.regular:
        return None
    return Cost(sum(hop.alpha for hop in group.hops), max(_switch_traffic(hop) / hop.rate for hop in group.hops))


def in_network_tree(group: RankGroup) -> Cost | None:
    """The hops' constants are those of the switches inside nodes, of links between them."""
    if not group.regular or len({hop.in_node for hop in group.hops}) == 1:
        return None
    alpha = sum(hop.alpha if hop.in_node else 2 * hop.depth * hop.alpha for hop in group.hops)
    traffic = [_switch_traffic(hop) if hop.in_node else _tree_traffic(hop) for hop in group.hops]
    return Cost(alpha, max(t / hop.rate for t, hop in zip(traffic, group.hops, strict=True)))


def twice(algorithm: Algorithm) -> Algorithm:
    """All-reduce from the algorithm of its two halves, reduce-scatter and all-gather."""

    def both(group: RankGroup) -> Cost | None:
        half = algorithm(group)
        return None if half is None else half.times(2)

    return both


def _ring_alpha(hops: Sequence[Hop]) -> float:
    return sum(hop.hops * hop.alpha for hop in hops) - min(hop.alpha for hop in hops)


def _ring_rate(hops: Sequence[Hop]) -> float:
    return min(hop.rate for hop in hops)


def _tree_traffic(hop: Hop) -> float:
    return 2 * (hop.members - 1) / hop.members if hop.in_node else min(hop.members, 4) / 2


def _switch_traffic(hop: Hop) -> float:
    return (hop.members + 1) / hop.members if hop.in_node else 1.0


def _binomial_whole(group: RankGroup) -> Cost:
    alpha = sum(hop.logarithm * hop.alpha for hop in group.hops)
    return Cost(alpha, sum(hop.logarithm / hop.bandwidth for hop in group.hops))


def _scattered(hops: Sequence[Hop]) -> float:
    held = [math.prod(hop.members for hop in hops[: k + 1]) for k in range(len(hops))]
    return sum((hop.members - 1) / parts / hop.bandwidth for hop, parts in zip(hops, held, strict=True))


def _by_levels(group: RankGroup, betas: Sequence[float]) -> Cost | None:
    if not group.regular or len(group.hops) == 1:
        return None
    return Cost(sum((hop.members - 1) * hop.alpha for hop in group.hops), sum(betas))


def _is_power_of_two(group: RankGroup) -> bool:
    return group.regular and all(hop.members.bit_count() == 1 for hop in group.hops)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": twice(ring_pass),
        "tree": tree_all_reduce,
        "halving_doubling": twice(halving_doubling),
        "recursive_doubling": recursive_doubling,
        "hierarchical": twice(hierarchical_pass),
        "in_network": in_network,
        "in_network_tree": in_network_tree,
    },
    "all_gather": {"ring": ring_pass, "halving_doubling": halving_doubling, "hierarchical": hierarchical_pass},
    "reduce_scatter": {"ring": ring_pass, "halving_doubling": halving_doubling, "hierarchical": hierarchical_pass},
    "all_to_all": {"pairwise": pairwise, "bruck": bruck, "hierarchical": hierarchical_all_to_all},
    "broadcast": {
        "ring": ring_chain,
        "tree": tree_broadcast,
        "binomial": binomial_broadcast,
        "scatter_gather": scatter_gather,
        "hierarchical": hierarchical_broadcast,
    },
    "reduce": {
        "ring": ring_chain,
        "tree": tree_broadcast,
        "binomial": binomial_broadcast,
        "scatter_gather": scatter_gather,
        "hierarchical": hierarchical_broadcast,
    },
    "scatter": {"direct": pairwise, "binomial": binomial_scatter, "hierarchical": hierarchical_scatter},
    "gather": {"direct": pairwise, "binomial": binomial_scatter, "hierarchical": hierarchical_scatter},
    "send_recv": {"direct": shift},
}
"""Collective -> algorithm -> its closed form."""

_EVERY = {kind: tuple(name for name in forms if not name.startswith("in_net")) for kind, forms in ALGORITHMS.items()}

LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "nccl": {
        **{kind: ("ring",) for kind in ("all_gather", "reduce_scatter", "broadcast", "reduce")},
        "all_reduce": ("ring", "tree", "in_network", "in_network_tree"),
        "all_to_all": ("pairwise",),
        **{kind: ("direct",) for kind in ("scatter", "gather", "send_recv")},
    },
    "gloo": {
        **{kind: ("ring",) for kind in ("all_reduce", "all_gather", "reduce_scatter", "reduce")},
        "broadcast": ("binomial",),
        "all_to_all": ("pairwise",),
        **{kind: ("direct",) for kind in ("scatter", "gather", "send_recv")},
    },
    "mpi": {kind: tuple(name for name in names if name != "hierarchical") for kind, names in _EVERY.items()},
    "any": {kind: tuple(forms) for kind, forms in ALGORITHMS.items()},
}
"""Library -> collective -> the algorithms that it has: a plan is priced with what will run, not with what could."""
