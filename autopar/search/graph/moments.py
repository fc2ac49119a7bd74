"""At which moments of a step is something live? Forward of each op, backward of each in reverse, the optimizer.

With n ops, op i runs forward at moment i and backward at moment 2n - 1 - i; the optimizer's step is moment 2n. With
several micro-batches these are the moments of the last one: gradients of those before are there from its beginning.

On a rank of a pipeline only its ops count. Its moments are those of a few passes of its order: of the micro-batch at
hand, while others that are in flight have been kept. Of these only those that may be the peak are looked at, the work
of which does not grow with the blocks of other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.search.costs.paid import PaidFor
from autopar.search.graph.strategy_graph import Floats

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
Positions = Sequence[int] | Ints
Rows = Sequence[Sequence[int]]
"""Of each of several tensors positions of ops, in any order."""


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
class Counting:
    """What counts in a strategy graph.

    share: of a pipeline rank, whose memory is limited; None for that of the whole model.
    paid: how often ops and tensors are paid for; None for in every micro-batch.
    part: of their bytes that ops and tensors between them take, for a bound on smaller micro-batches.
    """

    share: Share | None = None
    paid: PaidFor | None = None
    part: float = 1.0


WHOLE = Counting()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """`share`: of ranks of a pipeline, None for all ops.

    A coefficient says how often something counts at each *point*: moment `at[point]`, of a rank's pass `passed[point]`.
    Without a share points are all moments.
    """

    num_ops: int
    several: bool = False
    share: Share | None = None
    at: Ints = field(init=False)
    passed: Ints = field(init=False)

    def __post_init__(self) -> None:
        at, passed = np.arange(self.count), np.zeros(self.count, dtype=np.int64)
        if self.share is not None:
            found = [np.unique(self._may_be_peaks(*one)) for one in zip(self.share.last, self.share.kinds, strict=True)]
            at, passed = np.concatenate(found), np.repeat(np.arange(len(found)), [len(moments) for moments in found])
        object.__setattr__(self, "at", at)
        object.__setattr__(self, "passed", passed)

    def _may_be_peaks(self, last: slice, kinds: str) -> list[int]:
        positions = range(self.num_ops)[last]
        forward = [self.forward(p) for p in positions] if "F" in kinds else []
        return [*forward, *([self.backward(p) for p in positions] if "B" in kinds else []), self.count - 1]

    @property
    def count(self) -> int:
        """Moments of a pass."""
        return 2 * self.num_ops + 1

    @property
    def numbers(self) -> Ints:
        """A number for each point, the same whatever else is a point."""
        return np.asarray(self.passed * self.count + self.at)

    def forward(self, position: int) -> int:
        return position

    def backward(self, position: int) -> int:
        return 2 * self.num_ops - 1 - position

    def nothing(self) -> Floats:
        return np.zeros(len(self.at))

    @property
    def in_step(self) -> Floats:
        """1 in all micro-batches, until gradients are reduced for the optimizer."""
        return np.where(self.at < self.count - 1, 1.0, 0.0)

    @property
    def in_update(self) -> Floats:
        """1 in the optimizer's step."""
        return np.where(self.at == self.count - 1, 1.0, 0.0)

    def beside(self) -> Floats:
        """Bytes that are there whatever is chosen."""
        if self.share is None:
            return self.nothing()
        return (
            self._of_passes(np.array(self.share.received)) + self._of_passes(np.array(self.share.sent)) * self.in_step
        )

    def running(self, instances: Rows | Ints) -> tuple[Floats, Floats]:
        """How often a cluster runs, forward and back, from the positions of each instance's ops."""
        ops = np.asarray(instances)
        instance = np.full(self.num_ops, -1)
        instance[ops] = np.arange(len(ops))[:, None]
        out = []
        for position in (self.at, 2 * self.num_ops - 1 - self.at):
            inside = (position >= 0) & (position < self.num_ops)
            which = np.where(inside, instance[np.where(inside, position, 0)], -1)
            runs = which >= 0
            if self.share is not None:
                runs &= _any(self.share.ops[:, ops])[self.passed, which]
            out.append(np.where(runs, 1.0, 0.0))
        return out[0], out[1]

    def keeping(self, made: Positions, savers: Positions, *, at_hand: bool = False) -> Floats:
        """How often something is kept that these ops make, each until the backward of the first op that saves it, and
        for other micro-batches until the update. at_hand: of the micro-batch at hand alone."""
        out = self._counted(_ints(made), 2 * self.num_ops - _ints(savers), self._at_hand(_ints(savers)))
        if self.share is not None and not at_hand:
            out += self._of_passes(self.share.beside[:, _ints(savers)].sum(axis=1)) * self.in_step
        return out

    def replaying(self, again: Positions, last: Positions) -> Floats:
        """The same of what is there from the backward of one op to that of another."""
        begins, ends = 2 * self.num_ops - 1 - _ints(again), 2 * self.num_ops - _ints(last)
        return self._counted(begins, ends, self._at_hand(_ints(last)))

    def holding(self, readers: Rows) -> Floats:
        """How many tensors are held by a rank that reads them; what nobody reads, everybody holds."""
        read = [row for row in readers if row]
        if self.share is None or not read:
            return self.nothing() + len(readers)
        own = _any(self.share.ops[:, rectangle(read)]).sum(axis=1)
        return self._of_passes(own + (len(readers) - len(read)))

    def gradients(self, readers: Rows, end: int) -> Floats:
        """How many gradients of parameters are there, each from the backward of its last reader, the first to run, or
        from before the last micro-batch, to before the moment `end`."""
        if not readers:
            return self.nothing()
        ops = rectangle(readers)
        if self.share is None:
            last = ops.max(axis=1)
            begins = np.zeros_like(last) if self.several else 2 * self.num_ops - 1 - last
            return self._counted(begins, np.full(len(ops), end), None)
        own = self.share.ops[:, ops]
        first = 2 * self.num_ops - 1 - np.where(own, ops, -1).max(axis=2)
        begins = np.where(_any(own & self.share.begun[:, ops]), 0, first)
        return self._counted(begins, np.full(begins.shape, end), _any(own))

    def copies(self, lifetime: str, readers: Rows, savers: Rows) -> Floats:
        """How many copies of parameters are there: while a reader runs (`use`), the whole `step`, or until the backward
        of the first that saves it, then for other micro-batches too (`keep`)."""
        if lifetime == "step":
            return self.holding(readers) * self.in_step
        owners = [i for i, row in enumerate(readers) if row]
        if not owners:
            return self.nothing()
        at_hand = None if self.share is None else self.share.at_hand[:, rectangle([readers[i] for i in owners])].max(2)
        if lifetime == "use":
            runs = [
                (number, moment)
                for number, i in enumerate(owners)
                for moment in (*map(self.forward, set(readers[i])), *map(self.backward, set(savers[i])))
            ]
            number, begins = np.array(runs, dtype=np.int64).T
            return self._counted(begins, begins + 1, None if at_hand is None else at_hand[:, number])
        begins = np.array([self.forward(min(readers[i])) for i in owners])
        ends = np.array([self.backward(min(savers[i])) if savers[i] else self.forward(max(readers[i])) for i in owners])
        out = self._counted(begins, ends + 1, at_hand)
        if self.share is not None and (saved := [row for row in savers if row]):
            out += self._of_passes(self.share.beside[:, rectangle(saved)].max(axis=2).sum(axis=1)) * self.in_step
        return out

    def _at_hand(self, positions: Ints) -> Floats | None:
        return None if self.share is None else self.share.at_hand[:, positions]

    def _of_passes(self, amounts: NDArray[np.generic]) -> Floats:
        """What each pass has, at its points."""
        return np.asarray(amounts, dtype=np.float64)[self.passed]

    def _counted(self, begins: Ints, ends: Ints, own: NDArray[np.generic] | None) -> Floats:
        """From each begin (of each pass) to before its end, as often as each counts in a pass (None: once)."""
        ends = np.maximum(begins, ends)
        if own is None:
            change = np.zeros(self.count + 1)
            np.add.at(change, begins, 1.0)
            np.subtract.at(change, ends, 1.0)
            return np.asarray(change.cumsum()[:-1][self.at])
        some = own.any(axis=0)
        begins, ends = (part[..., some] for part in (begins, ends))
        if begins.ndim > 1:
            begins, ends = begins[self.passed], ends[self.passed]
        at = self.at[:, None]
        counts = own[:, some].astype(np.float64)[self.passed]
        return np.asarray(np.where((begins <= at) & (at < ends), counts, 0.0).sum(axis=1))


def rectangle(rows: Rows) -> Ints:
    """Rows of positions, none of them empty, as long as the longest: the first of a row again at its end."""
    longest = max(map(len, rows))
    return np.array([[*row, *(row[0],) * (longest - len(row))] for row in rows], dtype=np.int64)


def _any(own: Mask) -> Mask:
    """Whether any op of a row is a pass's own."""
    return np.asarray(own.any(axis=-1))


def _ints(positions: Positions) -> Ints:
    return np.asarray(positions, dtype=np.int64)
