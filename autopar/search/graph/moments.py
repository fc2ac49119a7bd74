"""At which moments of a step is something live? Forward of each op, backward of each in reverse, the optimizer.

With n ops, op i runs forward at moment i and backward at moment 2n - 1 - i; the optimizer's step is moment 2n. With
several micro-batches these are the moments of the last one: gradients of those before are there from its beginning.

On one rank of a pipeline only its ops count, and at every moment what the other micro-batches in flight have kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.strategy_graph import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """A pipeline rank's: `ops[position]`, whether it runs the op; `in_flight`: how many micro-batches it has kept for
    backward at most, the one at hand included, in what it keeps of one. last: the block of ops before which it has kept
    most of the one at hand; at other moments its memory is not limited."""

    ops: NDArray[np.bool_]
    in_flight: float
    last: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """Intervals as slices over the moments, ends included. `share`: of one rank of a pipeline, None for all ops."""

    num_ops: int
    several: bool = False
    share: Share | None = None

    def weight(self, *positions: int) -> float:
        """1 if what these ops make, read or hold is held here."""
        return 1.0 if self.share is None else float(self.share.ops[list(positions)].any())

    def beside(self) -> float:
        """How often what one micro-batch keeps is kept for others."""
        return 0.0 if self.share is None else self.share.in_flight - 1.0

    def peaks(self) -> NDArray[np.int64]:
        """Moments that may be the peak."""
        every = np.arange(self.count)
        if self.share is None:
            return every
        last = every[: self.num_ops][self.share.last]
        return np.concatenate([last, 2 * self.num_ops - 1 - last[::-1], every[-1:]])

    def keep(self, coefficient: Floats, interval: slice, position: int) -> None:
        """Count what is kept for the op's backward: in its interval, and always for other micro-batches."""
        weight = self.weight(position)
        coefficient[interval] += weight
        coefficient += self.beside() * weight

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

    def count_copies(self, coefficient: Floats, lifetime: str, readers: list[int], savers: list[int]) -> None:
        """Count copies of a parameter; those that live until a backward are kept for other micro-batches too."""
        weight = self.weight(*readers) if readers else 1.0
        for interval in self.copies(lifetime, readers, savers):
            coefficient[interval] += weight
        if lifetime == "keep" and savers:
            coefficient += self.beside() * weight
