"""What does a byte cost while memory is short? Prices p[t] >= 0 a byte and time, and how they move.

For every choice that fits, cost >= cost + sum over t of p[t] * (usage[t] - limit): a member that lives in [begin, end)
adds usage * (P[end] - P[begin]) to its option, P the sums of p before each time, and the rest is a number. Prices stay
multiples of one power of two so coarse that P and its differences are exact in floating point.

They climb along what the wanted options use above the limit, averaged over sweeps. The step is what would close the gap
if the bound were linear (Polyak), but moves no more than a few percent of the cost.
"""

from math import fsum

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints, Pairwise

_MEMORY = 0.8  # of the direction, carried from sweep to sweep


def priced(problem: Pairwise, cost: Floats, prices: Floats) -> Floats:
    """`cost` of every option and what its memory costs."""
    unary = cost.copy()
    _price(problem.member_node, problem.begin, problem.end, problem.first_option, problem.usage, sums(prices), unary)
    return unary


def granted(problem: Pairwise, prices: Floats) -> tuple[float, float]:
    """Sum of prices * (base - limit), and its rounding error at most."""
    used = np.flatnonzero(prices)
    if not len(used):
        return 0.0, 0.0
    terms = prices[used] * (problem.base[used] - problem.limit)
    scale = float((prices[used] * (problem.base[used] + problem.limit)).sum())
    return fsum(terms.tolist()), 4.0 * float(np.finfo(np.float64).eps) * scale


def mean_usage(problem: Pairwise, weight: Floats) -> Floats:
    """Bytes at every time, where each member takes the mean of its options by `weight`."""
    change = np.zeros(problem.num_times + 1)
    _take(problem.member_node, problem.begin, problem.end, problem.first_option, problem.usage, weight, change)
    return np.asarray(problem.base + np.cumsum(change[:-1]), np.float64)


def sums(prices: Floats) -> Floats:
    """Of the prices before each time, exact where they come from `step`."""
    return np.concatenate([[0.0], np.cumsum(prices)])


def step(prices: Floats, direction: Floats, *, gap: float, most: float, limit: float) -> Floats:
    """Prices moved along `direction` by gap / |direction|^2, their change times the limit at most `most` in sum."""
    moved = np.where((prices <= 0.0) & (direction < 0.0), 0.0, direction)
    square = float((moved * moved).sum())  # not @: BLAS threads cost more than they save
    if square <= 0.0:
        return prices
    length = min(gap / square, most / (float(np.abs(moved).sum()) * max(limit, 1.0)))
    after = np.maximum(prices + length * moved, 0.0)
    total = float(after.sum())
    if total <= 0.0:
        return after
    unit = 2.0 ** (np.ceil(np.log2(total)) - 48)
    return np.asarray(np.round(after / unit) * unit, np.float64)


def blend(direction: Floats | None, latest: Floats) -> Floats:
    """The running mean of directions."""
    return latest if direction is None else _MEMORY * direction + (1.0 - _MEMORY) * latest


@compiled
def _price(
    member_node: Ints, begin: Ints, end: Ints, first_option: Ints, usage: Floats, before: Floats, unary: Floats
) -> None:
    at = 0
    for m in range(len(member_node)):
        first, last = first_option[member_node[m]], first_option[member_node[m] + 1]
        price = before[end[m]] - before[begin[m]]
        if price != 0.0:
            for i in range(first, last):
                unary[i] += price * usage[at + i - first]
        at += last - first


@compiled
def _take(
    member_node: Ints, begin: Ints, end: Ints, first_option: Ints, usage: Floats, weight: Floats, change: Floats
) -> None:
    at = 0
    for m in range(len(member_node)):
        first, last = first_option[member_node[m]], first_option[member_node[m] + 1]
        mean = 0.0
        for i in range(first, last):
            mean += weight[i] * usage[at + i - first]
        change[begin[m]] += mean
        change[end[m]] -= mean
        at += last - first
