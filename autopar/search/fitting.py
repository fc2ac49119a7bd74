"""How does a plan surely fit? Searches count memory op by op in sums, `lower.live` call by call; the latter holds.

The two differ by a percent or so, either way (tests/test_peak_memory.py). Where a plan found holds more than the limit,
the search is given that much less and asked again.
"""

from collections.abc import Callable
from typing import TypeVar

from autopar.errors import InfeasibleError

Found = TypeVar("Found")
TRIES = 6
STEP = 0.01
"""Of the limit: how much less a try is given at least for every one before it that was no better aimed."""


def fitting(search: Callable[[float], Found], peak_nbytes: Callable[[Found], float], limit: float) -> Found:
    """What `search` finds under `limit`, or a little less, that holds no more than `limit`.

    Raises:
        InfeasibleError: that of `search`, or if none of a few tries fits.
    """
    aim, least = limit, float("inf")
    for number in range(TRIES):
        found = search(aim)
        peak = peak_nbytes(found)
        if peak <= limit:
            return found
        least = min(least, peak)
        aim -= max(peak - limit, STEP * number * limit)
    raise InfeasibleError(
        f"no plan found fits in {limit / 1e9:.3g} GB a device: the least of {TRIES} holds {least / 1e9:.3g} GB; use "
        "more devices or a smaller (micro-)batch",
        least_nbytes=least,
    )
