"""What does an op or a tensor hold, and from when to when? What `lower.live` finds of a step, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.values.placement import Layout

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "inputs")
LEAVES = ("leaf", "copy")
"""Roles of gradients of parameters."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that an op or a tensor holds from moment `first` to moment `last`.

    role: `fixed`: there through all micro-batches; `once`: before the first of several or after the last; `gradient`:
    of a value, `leaf`: of a parameter, which is then added to what is there, `copy`: the same where nothing is there,
    for it is a copy of what would be added; `given`: of what a stage received; `sent`: what a stage sends; `end`: of
    what a copy is sent, let go when its gradient has come.
    layout: of a value that is kept, or replayed, for backward.
    """

    kind: str
    name: str
    nbytes: float
    first: int
    last: int
    role: str = ""
    layout: Layout | None = None


def bytes_at(holdings: Iterable[Holding], end: int) -> dict[str, NDArray[np.float64]]:
    """By kind, the bytes held at each of the moments 0 to `end`; of several micro-batches in the last."""
    changes = {kind: [0.0] * (end + 2) for kind in MEMORY_KINDS}
    for holding in holdings:
        if holding.first <= holding.last and holding.role != "copy":
            own = changes[holding.kind]
            own[holding.first] += holding.nbytes
            own[holding.last + 1] -= holding.nbytes
    return {kind: np.cumsum(own[:-1]) for kind, own in changes.items()}
