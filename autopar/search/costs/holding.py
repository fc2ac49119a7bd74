"""What does an op or a tensor hold, and from when to when? What `search.costs.live` finds of a step, piece by piece."""

from dataclasses import dataclass

from autopar.placement import Layout

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "working", "inputs")


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that an op or a tensor holds from moment `first` to moment `last`.

    role: `fixed`: there through all micro-batches; `once`: before the first of several or after the last; `gradient`:
    of a value, `leaf`: of a parameter, which is then added to what is there, `given`: of what a stage received.
    layout: of a value that is kept, or replayed, for backward.
    """

    kind: str
    name: str
    nbytes: float
    first: int
    last: int
    role: str = ""
    layout: Layout | None = None
