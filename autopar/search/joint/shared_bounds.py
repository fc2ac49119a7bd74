"""Which candidates does one bound within memory hold for? Those of meshes that are alike, and without stages of two
numbers of micro-batches, m and 2 m, of which m is not 1 (then gradients are held in another way).

Meshes alike share a strategy graph with all of their orders (`alike_meshes`). What m micro-batches take, with half of
the bytes of what lies between ops, bounds both numbers: with fewer samples at a time nothing gets faster (`joint`),
and nothing takes less than its part of the bytes; parameters, and what the optimizer keeps, take the same. Clusters of
ops, and what is cheapest inside them, are taken to be those of m.
Where a candidate may be the best its own bound has to be found all the same: on many axes most are not.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.search.alike_meshes import first_alike, loose_orders
from autopar.search.joint.candidates import INTERLEAVED, Candidate

MANY_AXES = 3
"""Axes of a mesh from which on candidates are bounded together: there are few others, each of which may be the best."""
MISSES = 2
"""Bounds in a row that excluded nothing, after which each is bounded by itself."""

Group = tuple[Candidate, int]
"""The candidate of the fewest micro-batches on the first of the meshes, and the largest number."""


def pairs(counts: Sequence[int]) -> dict[int, int]:
    """Numbers that share a bound, the larger of each: one and its double, from 2 on; or itself twice."""
    out, left = dict[int, int](), sorted(counts)
    while left:
        count = left.pop(0)
        out[count] = 2 * count if count > 1 and 2 * count in left else count
        if out[count] != count:
            left.remove(out[count])
    return out


@dataclass(slots=True, kw_only=True)
class SharedBounds:
    """counts: of micro-batches that are searched."""

    counts: tuple[int, ...]
    _asked: set[Group] = field(default_factory=set)
    _missed: Counter[float] = field(default_factory=Counter)

    def of(self, key: Candidate, best: float, is_open: Callable[[Candidate], bool]) -> Group | None:
        """Whom to bound with the candidate, if that was not done yet and may be of use.

        best: seconds of the best plan; what excludes few with one may exclude many with a better. is_open: whether
        another may be better than it, as far as can be seen before memory is looked at.
        """
        arrangement = key.arrangement
        if arrangement.mesh.num_axes < MANY_AXES or key.schedule == INTERLEAVED or self._missed[best] >= MISSES:
            return None
        first = replace(key, arrangement=first_alike(arrangement))
        group = (first, key.microbatches) if loose_orders(arrangement) else None
        if arrangement.pipeline == 1:  # else a step has more rounds than micro-batches
            [(least, most)] = [pair for pair in pairs(self.counts).items() if key.microbatches in pair]
            other = replace(first, microbatches=least + most - key.microbatches)
            if least != most and is_open(other):
                group = replace(first, microbatches=least), most
        return None if group in self._asked else group

    def answered(self, group: Group, best: float, is_of_use: bool) -> list[Candidate]:
        """Whom, on the first of the meshes, its bound holds for."""
        self._asked.add(group)
        self._missed[best] = 0 if is_of_use else self._missed[best] + 1
        first, most = group
        return [replace(first, microbatches=count) for count in sorted({first.microbatches, most})]
