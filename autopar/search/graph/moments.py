"""At which moments of a step is something live? Forward of each op, backward of each in reverse, the optimizer.

With n ops, op i runs forward at moment i and backward at moment 2n - 1 - i; the optimizer's step is moment 2n. With
several micro-batches these are the moments of the last one: gradients of those before are there from its beginning.

On a rank of a pipeline only its ops count. Its moments are those of a few passes of its order: of the micro-batch at
hand, while others that are in flight have been kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.strategy_graph import Floats

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """Passes of pipeline `ranks` in which their memory may be fullest.

    Of [pass, position of an op] ops: whether its rank runs the op; at_hand: 1 for those of the stage that is passed;
    beside: how many other micro-batches have kept what the op keeps; begun: whether it has had a backward pass, so that
    gradients are there. Of each pass last: the block of ops before which most of the micro-batch at hand is kept (at
    other moments memory is not limited); kinds: "F", "B", or "FB" for one in its turn after the other; sent: bytes of
    messages on their way; received: bytes of what messages of a step are received in.
    """

    ranks: tuple[int, ...]
    ops: Mask
    at_hand: Floats
    beside: Floats
    begun: Mask
    last: tuple[slice, ...]
    kinds: tuple[str, ...]
    sent: tuple[float, ...]
    received: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """Intervals as slices over the moments, ends included. `share`: of ranks of a pipeline, None for all ops.

    A coefficient says how often something counts at each moment: [moment], with a share [pass, moment].
    """

    num_ops: int
    several: bool = False
    share: Share | None = None

    def beside(self) -> Floats:
        """Bytes that are there whatever is chosen, at each moment."""
        out = self.nothing()
        if self.share is not None:
            out += np.array(self.share.received)[:, None]
            out[:, self.step()] += np.array(self.share.sent)[:, None]
        return out

    def weight(self, *positions: int) -> Floats:
        """1 in each pass on a rank that holds what these ops read."""
        if self.share is None:
            return np.ones(1)
        return np.where(self.share.ops[:, positions].any(axis=1, keepdims=True), 1.0, 0.0)

    def at_hand(self, *positions: int) -> Floats:
        """1 in each pass in which what these ops make or read of the micro-batch at hand is held here."""
        if self.share is None:
            return np.ones(1)
        return np.asarray(self.share.at_hand[:, positions].max(axis=1, keepdims=True))

    def peaks(self) -> NDArray[np.int64]:
        """Moments that may be the peak, by number in a flat coefficient."""
        every = np.arange(self.nothing().size)
        if self.share is None:
            return every
        found = [every.reshape(-1, self.count)[:, -1]]
        for moments, last, kinds in zip(every.reshape(-1, self.count), self.share.last, self.share.kinds, strict=True):
            if "F" in kinds:
                found.append(moments[: self.num_ops][last])
            if "B" in kinds:
                found.append(moments[self.num_ops : -1][::-1][last])
        return np.sort(np.concatenate(found))

    def keep(self, coefficient: Floats, interval: slice, position: int) -> None:
        """Count what is kept for the op's backward: in its interval, and until the update for other micro-batches."""
        coefficient[..., interval] += self.at_hand(position)
        self._keep_beside(coefficient, [position])

    def _keep_beside(self, coefficient: Floats, positions: list[int]) -> None:
        if self.share is not None:
            coefficient[:, self.step()] += self.share.beside[:, positions].max(axis=1, keepdims=True)

    @property
    def count(self) -> int:
        return 2 * self.num_ops + 1

    def nothing(self) -> Floats:
        return np.zeros(self.count if self.share is None else (len(self.share.begun), self.count))

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

    def count_gradient(self, coefficient: Floats, readers: list[int], end: int) -> None:
        """Count a gradient of a parameter from the backward of its last reader, the first to run, to before `end`."""
        if self.share is None:
            coefficient[0 if self.several else self.backward(max(readers)) : end] += 1.0
            return
        for row, ops, begun in zip(coefficient, self.share.ops, self.share.begun, strict=True):
            if own := [p for p in readers if ops[p]]:
                row[0 if begun[own].any() else self.backward(max(own)) : end] += 1.0

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
        weight = self.at_hand(*readers)
        if lifetime == "step" or not readers:
            weight = self.weight(*readers) if readers else np.ones(1)
        for interval in self.copies(lifetime, readers, savers):
            coefficient[..., interval] += weight
        if lifetime == "keep" and savers:
            self._keep_beside(coefficient, savers)
