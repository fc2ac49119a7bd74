"""How does a plan surely fit? Searches count memory op by op in sums, `lower.live` call by call; the latter holds.

The two differ by a percent or so, either way (tests/test_peak_memory.py). Where a plan found holds more than the limit,
the search is given that much less and asked again. Where a search says that nothing fits, the plan of which it says
that it would do is made: it may hold less than was counted, and fit; if not, what it holds is the least that would do.
So who asks again with that least gets this plan, or a faster one.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.values.gigabytes import gigabytes, least_gigabytes

Found = TypeVar("Found")
TRIES = 6
LEAST_TRIES = 3
"""Searches for a plan that holds less than those before, once nothing fits as it is counted."""
STEP = 0.01
"""Of the limit: how much less a try is given at least for every one before it that was no better aimed."""
SLACK = 1e-6
"""Relative, of a least limit that a program was solved for: its solver's own tolerance."""


def fitting(
    search: Callable[[float], Found], peak_nbytes: Callable[[Found], float], limit: float, where: str = ""
) -> Found:
    """What `search` finds under `limit`, or a little less, that holds no more than `limit`.

    where: of which plans it is the best, for messages.

    Raises:
        InfeasibleError: that of `search`, or if none of a few tries fits.
    """
    aim, least = limit, math.inf
    for number in range(TRIES):
        try:
            found = search(aim)
        except InfeasibleError as error:
            if error.least_nbytes is None:
                if number:
                    break  # what it says is of less than was asked for
                raise
            return _at_least(search, peak_nbytes, limit, where, error)
        peak = peak_nbytes(found)
        if peak <= limit:
            return found
        least = min(least, peak)
        aim -= max(peak - limit, STEP * number * limit)
    raise InfeasibleError(
        f"no plan found {where} fits in {gigabytes(limit)} GB a device: the least that was found holds "
        f"{least_gigabytes(least)} GB; use more devices or a smaller (micro-)batch",
        least_nbytes=least,
    )


def _at_least(
    search: Callable[[float], Found],
    peak_nbytes: Callable[[Found], float],
    limit: float,
    where: str,
    error: InfeasibleError,
) -> Found:
    """The plan of which `error` says that it would do, or one that holds less, if it fits. What is tried depends on the
    error alone, so that it is the same under any limit."""
    counted = error.least_nbytes or math.inf
    aim, least = counted * (1 + SLACK), math.inf
    with suppress(InfeasibleError, SearchTimeoutError):
        for _ in range(LEAST_TRIES):
            found = search(aim)
            peak = peak_nbytes(found)
            if peak <= limit:
                return found
            if peak >= least:
                break
            least = peak
            aim = peak * (1 - SLACK)
            if aim <= counted:
                break
    least = counted if least == math.inf else least
    raise InfeasibleError(does_not_fit(where, limit, least), least_nbytes=least) from error


def does_not_fit(where: str, limit: float, least: float) -> str:
    """What is said where nothing fits, both in bytes a device."""
    return (
        f"no plan {where} fits in {gigabytes(limit)} GB a device: the least that would do is {least_gigabytes(least)} "
        "GB; use more devices, a smaller global batch, lower precision or devices with more memory"
    )
