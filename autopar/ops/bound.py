"""Which groups and draws is compiled code for? A tracer reads attributes of a module, but no ContextVar.

So `bound` says beforehand what `active_groups` and `active_draws` answer in traced code. Groups get a number, a
constant of the compiled graph; draws are a tensor among its inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from autopar.ops.groups import Groups


@dataclass(slots=True)
class Bound:
    """`draw`: int64 seed and step, then pairs of a call site in the code and its number in the whole graph."""

    groups: "Groups | None" = None
    number: int = -1
    draw: Tensor | None = None
    exact: bool = False


BOUND = Bound()
KNOWN: "list[Groups]" = []


def number_of(groups: "Groups") -> int:
    """The number by which compiled code finds `groups`, which stay known from now on."""
    for number, known in enumerate(KNOWN):
        if known is groups:
            return number
    KNOWN.append(groups)
    return len(KNOWN) - 1


@contextmanager
def bound(groups: "Groups", draw: Tensor, exact: bool) -> Iterator[None]:
    """Compiled calls inside are for these groups and draws."""
    before = BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact
    BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact = groups, number_of(groups), draw, exact
    try:
        yield
    finally:
        BOUND.groups, BOUND.number, BOUND.draw, BOUND.exact = before
