"""At which moments of a step is something live? Forward of each op, backward of each in reverse, the optimizer.

With n ops, op i runs forward at moment i and backward at moment 2n - 1 - i; the optimizer's step is moment 2n. With
several micro-batches these are the moments of the last one: gradients of those before are there from its beginning.

On a rank of a pipeline only its ops count. Its moments are those of a few passes of its order: of the micro-batch at
hand, while others that are in flight have been kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.graph.strategy_graph import Floats

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


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

    def running(self, instances: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """How often a cluster runs at each moment, forward and back, from the positions of each instance's ops."""
        ops = np.array(instances)
        forward, backward = self.nothing(), self.nothing()
        own = 1.0 if self.share is None else self.share.ops[:, ops].any(axis=2).repeat(ops.shape[1], axis=1)
        forward[..., ops.ravel()] = own
        backward[..., 2 * self.num_ops - 1 - ops.ravel()] = own
        return forward, backward

    def keeping(self, made: Sequence[int], savers: Sequence[int], *, at_hand: bool = False) -> Floats:
        """How often something is kept at each moment that these ops make, each until the backward of the first op that
        saves it, and for other micro-batches until the update. at_hand: of the micro-batch at hand alone."""
        out = self._counted(_ints(made), 2 * self.num_ops - _ints(savers), savers)
        if self.share is not None and not at_hand:
            out[:, self.step()] += self.share.beside[:, _ints(savers)].sum(axis=1, keepdims=True)
        return out

    def replaying(self, again: Sequence[int], last: Sequence[int]) -> Floats:
        """The same of what is there from the backward of one op to that of another."""
        return self._counted(2 * self.num_ops - 1 - _ints(again), 2 * self.num_ops - _ints(last), last)

    def _counted(self, begins: Ints, ends: Ints, positions: Sequence[int]) -> Floats:
        """From each begin to before its end, where what the op makes or reads is at hand."""
        change = np.zeros((*self.nothing().shape[:-1], self.count + 1))
        own = np.ones(len(begins)) if self.share is None else self.share.at_hand[:, _ints(positions)]
        np.add.at(change.T, begins, own.T)
        np.subtract.at(change.T, np.maximum(begins, ends), own.T)
        return np.asarray(change.cumsum(axis=-1)[..., :-1])

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


def _ints(positions: Sequence[int]) -> Ints:
    return np.array(positions, dtype=np.int64)
