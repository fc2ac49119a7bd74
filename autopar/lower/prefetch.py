"""Which gathers are on their way before they are read? Those of buckets, begun when the bucket before is there.

A transformation of when messages run and what they hold, not of which there are: in forward a bucket's message begins
after that of the bucket before, in backward, where it is gathered again, after that of the bucket that forward gathered
next. What of it is hidden is `search.costs.overlapped_seconds`'s, what it holds `lower.live`'s.
"""

import itertools
from collections.abc import Mapping

from autopar.lower.buckets import Bucket
from autopar.lower.lowered_step import LoweredStep


def prefetched_buckets(step: LoweredStep) -> list[Bucket]:
    """The buckets whose gathers begin early, in the order of forward; none where the plan waits for each."""
    groups = [group for group in step.first if step.plan.prefetch and group.direct and _gathers(step, group)]
    return sorted(groups, key=step.first.__getitem__)


def _gathers(step: LoweredStep, group: Bucket) -> bool:
    name, layout = group.values[0]
    return step.redistributed[name].made[layout].forward == "all_gather" and not step.is_once_a_step(name)


def begun_forward(step: LoweredStep) -> dict[Bucket, int]:
    """The first call beside which a bucket's gather runs, of those that have a bucket before them."""
    groups = prefetched_buckets(step)
    return {after: step.first[before] + 1 for before, after in itertools.pairwise(groups)}


def begun_backward(step: LoweredStep, again: Mapping[Bucket, int]) -> dict[Bucket, Bucket]:
    """The bucket that is gathered again before each, when its own gather begins.

    again: when each is gathered again, of those that are.
    """
    groups = [group for group in prefetched_buckets(step) if group in again and _is_regathered(step, group)]
    return {before: after for before, after in itertools.pairwise(groups) if again[after] < again[before]}


def _is_regathered(step: LoweredStep, group: Bucket) -> bool:
    return step.plan.lifetimes.get(group.values[0][0]) == "use"
