"""How much memory is taken at the worst of the times an interval covers, while choices come and go?

A segment tree with range add and range maximum, both O(log times), without propagation: `peak[p]` is the maximum below
node p including `added[p]`, what was added to the whole of p (the bottom-up tree of Zhang Kunwei). Leaves stand one to
the right, between two guards, so that the open interval that both loops climb exists for every (begin, end).
"""

from dataclasses import dataclass

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The tree's two arrays, 2 * width long; changed in place by the kernels below."""

    peak: Floats
    added: Floats


def levels(usage: Floats) -> Levels:
    """The tree over bytes at every time."""
    width = 4
    while width < len(usage) + 2:
        width *= 2
    tree = Levels(peak=np.empty(2 * width), added=np.empty(2 * width))
    fill(tree.peak, tree.added, usage)
    return tree


@compiled
def fill(peak: Floats, added: Floats, usage: Floats) -> None:
    """Start over from bytes at every time."""
    width = len(peak) // 2
    added[:] = 0.0
    peak[:] = -np.inf
    peak[width + 1 : width + 1 + len(usage)] = usage
    for p in range(width - 1, 0, -1):
        peak[p] = max(peak[2 * p], peak[2 * p + 1])


@compiled
def add(peak: Floats, added: Floats, begin: int, end: int, nbytes: float) -> None:
    """Take `nbytes` at times begin <= t < end."""
    width = len(peak) // 2
    left, right = begin + width, end + 1 + width
    while left ^ right != 1:
        if left & 1 == 0:
            peak[left ^ 1] += nbytes
            added[left ^ 1] += nbytes
        if right & 1 == 1:
            peak[right ^ 1] += nbytes
            added[right ^ 1] += nbytes
        left >>= 1
        right >>= 1
        peak[left] = max(peak[2 * left], peak[2 * left + 1]) + added[left]
        peak[right] = max(peak[2 * right], peak[2 * right + 1]) + added[right]
    left >>= 1
    while left >= 1:
        peak[left] = max(peak[2 * left], peak[2 * left + 1]) + added[left]
        left >>= 1


@compiled
def highest(peak: Floats, added: Floats, begin: int, end: int) -> float:
    """The most bytes at times begin <= t < end."""
    width = len(peak) // 2
    left, right = begin + width, end + 1 + width
    of_left = of_right = -np.inf
    while left ^ right != 1:
        if left & 1 == 0:
            of_left = max(of_left, peak[left ^ 1])
        if right & 1 == 1:
            of_right = max(of_right, peak[right ^ 1])
        left >>= 1
        right >>= 1
        of_left += added[left]
        of_right += added[right]
    most = max(of_left, of_right)
    left >>= 1
    while left >= 1:
        most += added[left]
        left >>= 1
    return float(most)
