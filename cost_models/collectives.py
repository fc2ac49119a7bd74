"""How long does a collective take, and how many bytes does a rank send? The α–β model on link levels.

`nbytes` is the full tensor: the result of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce or
broadcast, the local tensor of an all-to-all, the message of a send/recv (every rank sends to its neighbour). A group of
n ranks has at each level l that it crosses alpha_l, a device's bandwidth b_l, m_l members, k_l lanes and p_l peers:

ring          steps: a chain of n-1 hops round the ring, the cheapest hop left out; lanes are rings side by side:
              pass = sum_l hops_l alpha_l - min_l alpha_l + (n-1)/n nbytes / min_l(k_l b_l)
              all-gather, reduce-scatter: one pass; all-reduce: two; broadcast: one, pipelined, with nbytes whole
hierarchical  level by level (regular groups over several levels):
              pass = sum_l (m_l - 1) alpha_l + (m_l - 1)/m_l nbytes / (k_l b_l)
              broadcast and all-to-all hand the whole tensor on at each level: lanes do not divide it
pairwise      all-to-all: sum_l p_l alpha_l + max_l p_l/n nbytes / b_l
direct        send/recv: alpha + nbytes / b of the slowest level crossed

Ring and hierarchical costs: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
MPICH"; hops by level as NCCL counts them (src/graph/tuning.cc, nInterSteps), lanes as its rings, one a NIC.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost_models.links import Links
from autopar.errors import ArgumentError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


class LinearCost(NamedTuple):
    """`alpha_seconds + nbytes * seconds_per_byte` of one algorithm."""

    algorithm: str
    alpha_seconds: float
    seconds_per_byte: float


@lru_cache(maxsize=65536)
def algorithms(kind: str, links: Links) -> tuple[LinearCost, ...]:
    """The candidate algorithms of a collective over a group; `none`, at no cost, for a group of one.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    _require_kind(kind)
    if links.size == 1:
        return (LinearCost("none", 0.0, 0.0),)
    if kind == "send_recv":
        slowest = links.crossings[0]
        return (LinearCost("direct", slowest.alpha, 1 / slowest.bandwidth),)
    candidates = [_pairwise(links)] if kind == "all_to_all" else [_ring(kind, links)]
    if links.regular and len(links.crossings) > 1:
        candidates.append(_HIERARCHICAL[kind](links))
    return tuple(candidates)


def collective_seconds(kind: str, nbytes: float, links: Links) -> tuple[float, str]:
    """Seconds of the cheapest algorithm, and its name.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    best_seconds, best_name = float("inf"), ""
    for name, alpha, beta in algorithms(kind, links):
        seconds = alpha + nbytes * beta
        if seconds < best_seconds:
            best_seconds, best_name = seconds, name
    return best_seconds, best_name


def collective_seconds_array(kind: str, nbytes: npt.NDArray[np.float64], links: Links) -> npt.NDArray[np.float64]:
    """`collective_seconds` of every entry of `nbytes`, without the names.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    forms = algorithms(kind, links)
    result = forms[0].alpha_seconds + np.asarray(nbytes, dtype=np.float64) * forms[0].seconds_per_byte
    for _, alpha, beta in forms[1:]:
        result = np.minimum(result, alpha + np.asarray(nbytes, dtype=np.float64) * beta)
    return result


def wire_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that each rank of a group of `size` receives by the flat algorithm; `nbytes` as in the module's text.

    Raises:
        ArgumentError: if `kind` is not one of `KINDS`.
    """
    _require_kind(kind)
    if size == 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (size - 1) / size * nbytes
    if kind in ("broadcast", "send_recv"):
        return float(nbytes)
    return (size - 1) / size * nbytes


def _ring(kind: str, links: Links) -> LinearCost:
    alpha = sum(c.hops * c.alpha for c in links.crossings) - min(c.alpha for c in links.crossings)
    beta = 1 / min(c.lanes * c.bandwidth for c in links.crossings)
    if kind == "broadcast":
        return LinearCost("ring", alpha, beta)
    passes = 2 if kind == "all_reduce" else 1
    return LinearCost("ring", passes * alpha, passes * (links.size - 1) / links.size * beta)


def _pairwise(links: Links) -> LinearCost:
    alpha = sum(c.peers * c.alpha for c in links.crossings)
    return LinearCost("pairwise", alpha, max(c.peers / c.bandwidth for c in links.crossings) / links.size)


def _by_levels(links: Links) -> LinearCost:
    alpha = sum((c.members - 1) * c.alpha for c in links.crossings)
    beta = sum((c.members - 1) / c.members / (c.lanes * c.bandwidth) for c in links.crossings)
    return LinearCost("hierarchical", alpha, beta)


def _all_reduce_by_levels(links: Links) -> LinearCost:
    name, alpha, beta = _by_levels(links)
    return LinearCost(name, 2 * alpha, 2 * beta)


def _all_to_all_by_levels(links: Links) -> LinearCost:
    alpha = sum((c.members - 1) * c.alpha for c in links.crossings)
    return LinearCost("hierarchical", alpha, sum((c.members - 1) / c.members / c.bandwidth for c in links.crossings))


def _broadcast_by_levels(links: Links) -> LinearCost:
    alpha = sum((c.members - 1) * c.alpha for c in links.crossings)
    return LinearCost("hierarchical", alpha, sum(1 / c.bandwidth for c in links.crossings))


_HIERARCHICAL: dict[str, Callable[[Links], LinearCost]] = {
    "all_gather": _by_levels,
    "reduce_scatter": _by_levels,
    "all_reduce": _all_reduce_by_levels,
    "all_to_all": _all_to_all_by_levels,
    "broadcast": _broadcast_by_levels,
}


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ArgumentError(f"collective {kind!r} is unknown; choose one of {', '.join(KINDS)}")
