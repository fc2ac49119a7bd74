"""At which moments of a step is something live? Forward of each op, backward of each in reverse, the optimizer.

With n ops, op i runs forward at moment i and backward at moment 2n - 1 - i; the optimizer's step is moment 2n. With
several micro-batches these are the moments of the last one: gradients of those before are there from its beginning.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.search.strategy_graph import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Intervals as slices over the moments, ends included."""

    num_ops: int
    several: bool = False

    @property
    def count(self) -> int:
        return 2 * self.num_ops + 1

    def nothing(self) -> Floats:
        return np.zeros(self.count)

    def forward(self, position: int) -> int:
        return position

    def backward(self, position: int) -> int:
        return 2 * self.num_ops - 1 - position

    def always(self) -> slice:
        return slice(0, self.count)

    def kept(self, made: int, first_saver: int) -> slice:
        """From the forward of the op that makes it to the backward of the first op that saves it."""
        return slice(made, self.backward(first_saver) + 1)

    def held(self, made: int, again: int | None, last_use: int) -> slice:
        """From its making, or where it is made again, to the backward of its last use there."""
        return slice(made if again is None else self.backward(again), self.backward(last_use) + 1)

    def gradient(self, last_reader: int) -> slice:
        """From the backward of a parameter's last reader, the first to run, to the end."""
        if self.several:
            return self.always()
        return slice(self.backward(last_reader), self.count)

    def step(self) -> slice:
        """All micro-batches, until gradients are reduced for the optimizer."""
        return slice(0, self.count - 1)

    def update(self) -> slice:
        """The optimizer's step."""
        return slice(self.count - 1, self.count)

    def copies(self, lifetime: str, readers: Iterable[int], savers: Iterable[int]) -> list[slice]:
        """When a copy of a parameter is live: while a reader runs (`use`), the whole `step`, or until its backward."""
        if lifetime == "step":
            return [self.step()]
        readers, savers = sorted(set(readers)), sorted(set(savers))
        if lifetime == "use":
            moments = [self.forward(p) for p in readers] + [self.backward(p) for p in savers]
            return [slice(m, m + 1) for m in moments]
        if savers:
            return [slice(self.forward(readers[0]), self.backward(savers[0]) + 1)]
        return [slice(self.forward(readers[0]), self.forward(readers[-1]) + 1)]
