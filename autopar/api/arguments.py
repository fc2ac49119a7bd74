"""Which numbers does `autopar.plan` take? One table, for Python, the decorator and the command line alike."""

from collections.abc import Mapping
from typing import Any

from autopar.values.domains import COUNT, GAP, MEMORY_GB, POSITIVE, SECONDS, Domain, checked_number

NUMBERS: Mapping[str, Domain] = {
    "pipeline": COUNT,
    "global_batch": POSITIVE,
    "microbatches": COUNT,
    "memory_gb": MEMORY_GB,
    "relative_gap": GAP,
    "seconds": SECONDS,
}
"""Keywords of `autopar.plan` that are numbers. None stands for what a keyword's own text says."""


def checked_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is `given` of the table, as Python's own numbers.

    Raises:
        ArgumentError: for the first that is outside its domain.
    """
    numbers = {name: given[name] for name in NUMBERS if name in given}
    return {n: value if value is None else checked_number(n, value, NUMBERS[n]) for n, value in numbers.items()}
