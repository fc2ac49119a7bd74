"""Which numbers and words does `autopar.plan` take? A table of each, for Python, the decorator and the command line."""

from collections.abc import Mapping
from typing import Any

from autopar.values.choices import check_choice
from autopar.values.domains import COUNT, GAP, MEMORY_GB, POSITIVE, SECONDS, Domain, checked_number
from autopar.values.precision import PRECISIONS
from autopar.values.schedules import SCHEDULES
from autopar.values.train_config import NUM_STATES

NUMBERS: Mapping[str, Domain] = {
    "pipeline": COUNT,
    "global_batch": POSITIVE,
    "microbatches": COUNT,
    "memory_gb": MEMORY_GB,
    "relative_gap": GAP,
    "seconds": SECONDS,
}
"""Keywords of `autopar.plan` that are numbers. None stands for what a keyword's own text says."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "optimizer": tuple(NUM_STATES),
    "precision": tuple(PRECISIONS),
    "schedule": ("auto", *SCHEDULES),
    "solver": ("auto", "ilp", "double-recursive"),
}
"""Keywords of `autopar.plan` that are one of a few words. Of precision None is the model's own."""


def checked_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is `given` of the table, as Python's own numbers.

    Raises:
        ArgumentError: for the first that is outside its domain.
    """
    numbers = {name: given[name] for name in NUMBERS if name in given}
    return {n: value if value is None else checked_number(n, value, NUMBERS[n]) for n, value in numbers.items()}


def check_words(given: Mapping[str, Any]) -> None:
    """Raises ArgumentError for the first that is `given` of the table and is none of its words."""
    for name, words in WORDS.items():
        if name in given and not (name == "precision" and given[name] is None):
            check_choice(name, given[name], words)
