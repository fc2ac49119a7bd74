"""What counts at a moment of a step, and how often: counted one by one, of random ops, stages and passes."""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from autopar.search.graph.moments import Moments, Share, rectangle

SEEDS = range(60)


class Case:
    """Random ops, perhaps of one rank of a pipeline, and tensors that some of them read and some of these save."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.n = n = rng.randint(1, 12)
        self.passes = rng.randint(1, 3)
        self.has_share = rng.random() < 0.8
        self.several = rng.random() < 0.5
        self.ops = np.array([[rng.random() < 0.6 for _ in range(n)] for _ in range(self.passes)])
        self.at_hand = np.where(self.ops & self._some(0.7), 1.0, 0.0)
        self.beside = np.where(self.ops, [[rng.randint(0, 3) for _ in range(n)] for _ in range(self.passes)], 0).astype(
            float
        )
        self.begun = self.ops & self._some(0.5)
        begins = [rng.randrange(n) for _ in range(self.passes)]
        self.share = Share(
            ranks=(0,),
            ops=self.ops,
            at_hand=self.at_hand,
            beside=self.beside,
            begun=self.begun,
            last=tuple(slice(begin, rng.randint(begin, n - 1) + 1) for begin in begins),
            kinds=tuple(rng.choice(["F", "B", "FB"]) for _ in begins),
            sent=tuple(rng.random() for _ in begins),
            received=tuple(rng.random() for _ in begins),
        )
        self.moments = Moments(num_ops=n, several=self.several, share=self.share if self.has_share else None)
        self.readers = [[rng.randrange(n) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 4))]
        self.savers = [[p for p in row if rng.random() < 0.6] for row in self.readers]

    def _some(self, share: float) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
        return np.array([[self.rng.random() < share for _ in range(self.n)] for _ in range(self.passes)])

    def positions(self) -> list[int]:
        return [self.rng.randrange(self.n) for _ in range(4)]

    def points(self) -> Iterator[tuple[int, int]]:
        """(pass, moment) of all that is looked at."""
        if not self.has_share:
            yield from ((0, moment) for moment in range(2 * self.n + 1))
            return
        for number, (last, kinds) in enumerate(zip(self.share.last, self.share.kinds, strict=True)):
            own = range(self.n)[last]
            forward = {p for p in own if "F" in kinds}
            backward = {2 * self.n - 1 - p for p in own if "B" in kinds}
            yield from ((number, moment) for moment in sorted(forward | backward | {2 * self.n}))

    def runs(self, number: int, *ops: int) -> bool:
        """Whether the rank of the pass has one of the ops."""
        return not self.has_share or any(bool(self.ops[number, p]) for p in ops)

    def hand(self, number: int, *ops: int) -> float:
        return max(float(self.at_hand[number, p]) for p in ops) if self.has_share else 1.0

    def others(self, number: int, moment: int, *ops: int) -> float:
        """How many other micro-batches are kept before the update."""
        is_step = self.has_share and moment < 2 * self.n
        return max(float(self.beside[number, p]) for p in ops) if is_step else 0.0

    def back(self, position: int) -> int:
        return 2 * self.n - 1 - position

    def check(self, found: Sequence[float], count: Callable[[int, int], float]) -> None:
        assert list(found) == [count(*point) for point in self.points()]


@pytest.mark.parametrize("seed", SEEDS)
def test_points_are_all_moments_or_those_of_passes_that_may_be_the_peak(seed: int) -> None:
    case = Case(seed)
    found = list(zip(case.moments.passed.tolist(), case.moments.at.tolist(), strict=True))
    assert found == list(case.points())
    assert case.moments.numbers.tolist() == [number * (2 * case.n + 1) + moment for number, moment in found]
    if case.has_share:
        received, sent = case.share.received, case.share.sent
        case.check(case.moments.beside().tolist(), lambda r, t: received[r] + (sent[r] if t < 2 * case.n else 0.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_kept_or_replayed(seed: int) -> None:
    case = Case(seed)
    made, savers = case.positions(), case.positions()
    pairs = list(zip(made, savers, strict=True))

    def kept(number: int, moment: int) -> float:
        return sum(case.hand(number, b) for a, b in pairs if a <= moment <= case.back(b))

    def kept_beside(number: int, moment: int) -> float:
        return kept(number, moment) + sum(case.others(number, moment, b) for b in savers)

    def replayed(number: int, moment: int) -> float:
        return sum(case.hand(number, b) for a, b in pairs if case.back(a) <= moment <= case.back(b))

    case.check(case.moments.keeping(made, savers, at_hand=True).tolist(), kept)
    case.check(case.moments.keeping(made, savers).tolist(), kept_beside)
    case.check(case.moments.replaying(made, savers).tolist(), replayed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_runs_where_its_instance_has_an_op(seed: int) -> None:
    case = Case(seed)
    members = case.rng.randint(1, min(2, case.n))
    order = case.rng.sample(range(case.n), case.n // members * members)
    instances = [order[i : i + members] for i in range(0, len(order), members)]
    forward, backward = case.moments.running(instances)

    def runs(number: int, position: int) -> float:
        return float(sum(case.runs(number, *ops) for ops in instances if position in ops))

    case.check(forward.tolist(), lambda number, moment: runs(number, moment))
    case.check(backward.tolist(), lambda number, moment: runs(number, case.back(moment)))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_parameter_holds(seed: int) -> None:
    """Its parts, the gradient from its last reader's backward on, and copies by their lifetime."""
    case, update = Case(seed), 2 * Case(seed).n
    rows = list(zip(case.readers, case.savers, strict=True))

    def gradient(end: int) -> Callable[[int, int], float]:
        def count(number: int, moment: int) -> float:
            total = 0
            for row in case.readers:
                own = [p for p in row if case.runs(number, p)]
                is_there = any(case.begun[number, p] for p in own) if case.has_share else case.several
                total += bool(own) and (is_there or moment >= case.back(max(own))) and moment < end
            return float(total)

        return count

    def used(number: int, moment: int) -> float:
        ran = [(r, {*r} | {case.back(p) for p in s}) for r, s in rows]
        return sum(case.hand(number, *r) for r, moments in ran if moment in moments)

    def kept(number: int, moment: int) -> float:
        total = 0.0
        for r, s in rows:
            if min(r) <= moment <= (case.back(min(s)) if s else max(r)):
                total += case.hand(number, *r)
            total += case.others(number, moment, *s) if s else 0.0
        return total

    def held(number: int, moment: int) -> float:
        return float(sum(case.runs(number, *row) for row in case.readers))

    for end in (update, update + 1):
        case.check(case.moments.gradients(case.readers, end).tolist(), gradient(end))
    case.check(case.moments.copies("use", case.readers, case.savers).tolist(), used)
    case.check(case.moments.copies("keep", case.readers, case.savers).tolist(), kept)
    step = case.moments.copies("step", case.readers, case.savers).tolist()
    case.check(step, lambda number, moment: held(number, moment) * (moment < update))
    unread = case.moments.holding([*case.readers, []]).tolist()
    case.check(unread, lambda number, moment: held(number, moment) + 1)


def test_nothing_counts_where_there_is_nothing() -> None:
    moments = Moments(num_ops=3)
    for found in (moments.keeping([], []), moments.gradients([], 6), moments.copies("use", [], [])):
        assert found.tolist() == [0.0] * 7
    assert rectangle([[3], [1, 2]]).tolist() == [[3, 3], [1, 2]]
