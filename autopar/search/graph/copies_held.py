"""Which bytes do copies of a parameter take, and when? By the lifetime of the option that they are made for."""

from collections.abc import Sequence

import numpy as np

from autopar.search.graph.moments import Moments
from autopar.search.graph.problem import Reader
from autopar.search.graph.strategy_graph import Floats

LIFETIMES = ("step", "keep", "use")


def copies_held(
    names: Sequence[str],
    readers: Sequence[Reader],
    lifetimes: Sequence[str],
    nbytes: Floats,
    moments: Moments,
) -> list[tuple[Floats, Floats]]:
    """`[arc]` bytes, and how often they count at each moment, of a kind of parameters.

    lifetimes, nbytes: of each arc, and of its copy and the gradient that waits in it to be reduced (`[2, arc]`). On a
    pipeline rank those that wait for the step's end are there from its first backward pass on.
    """
    of_arc, out = np.array(lifetimes), list[tuple[Floats, Floats]]()
    copies, gradients = nbytes
    reading = [[p for reader in readers for p in reader.positions[name]] for name in names]
    saving = [[p for reader in readers if reader.savers for p in reader.positions[name]] for name in names]
    for lifetime in LIFETIMES:
        own = of_arc == lifetime
        if not own.any():
            continue
        coefficient = moments.copies(lifetime, reading, saving)
        if lifetime == "step" and moments.share is not None:
            trained = [
                [p for reader in readers if reader.in_backward for p in reader.positions[name]] for name in names
            ]
            waiting = moments.gradients([row for row in trained if row], moments.count - 1)
            terms = [(np.where(own, copies, 0.0), coefficient), (np.where(own, gradients, 0.0), waiting)]
        else:
            terms = [(np.where(own, copies + gradients, 0.0), coefficient)]
        out += [term for term in terms if term[0].any()]
    return out
