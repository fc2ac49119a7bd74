"""Which plan is good, at once? The double recursion: the mesh split part by part, operators decided by weight.

The published idea is that of MindSpore's recursive programming: Wang, Li, Tachon, Wang, Yang, Limet, Robert 2021,
"Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization", Euro-Par 2021.
Here with alpha-beta costs on every link level, memory, any number of devices, any rank of tensor, no names of
parameters, and refinement. It proves nothing: its answer is good, not best.

Two ways to split the mesh are tried, axis by axis from the slowest link on, and all axes at once; the cheaper answer is
kept, and the whole model on every rank if that is cheaper still. Where memory binds, bytes at the moments that were the
peak get a price, which is raised until the answer fits and lowered as long as it does.
"""

from dataclasses import dataclass, field

import numpy as np

from autopar.errors import InfeasibleError
from autopar.lower.pinned import find_pinned, violations
from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.graph.options import EVERYTHING
from autopar.search.graph.pinned import apart_ops, pinned
from autopar.search.graph.strategy_graph import Floats
from autopar.search.recursion.candidates import Candidates
from autopar.search.recursion.decide import Axes, Decider, Decision
from autopar.search.recursion.homes import Homes, Priced
from autopar.search.recursion.ledger import DecisionLedger, Key, make_ledger
from autopar.search.recursion.neighbours import Neighbours, find_neighbours
from autopar.search.recursion.to_plan import plan_of
from autopar.search.recursion.ways import SEARCHED_AXES, Ways
from autopar.values.cluster import Cluster
from autopar.values.gigabytes import gigabytes, least_gigabytes
from autopar.values.mesh import Mesh

PRICE_ROUNDS = 6
"""How many prices of memory are tried from the first on under which the answer fits."""
MOST_ROUNDS = 14
"""How many are tried at all: the last ones let little but bytes count."""
PRICE_STEP = 8.0


@dataclass(slots=True, kw_only=True)
class Search:
    """What runs under several prices share; the cheapest answer that fits `limit`, and the least peak of any."""

    neighbours: Neighbours
    candidates: Candidates
    ways: Ways
    ledger: DecisionLedger
    limit: float | None
    best: Decider | None = None
    best_seconds: float = np.inf
    least: float = np.inf
    parts: tuple[Axes, ...] = ()
    _homes: dict[object, Priced] = field(default_factory=dict)
    _sent: dict[object, tuple[float, float]] = field(default_factory=dict)

    def run(self, parts: tuple[Axes, ...], worth: dict[Key, float]) -> tuple[float, Floats]:
        """One answer: its seconds and its bytes at every moment."""
        decider = self.whole(worth)
        decider.recurse(parts)
        decider.refine(_all_parts(parts, self.neighbours.pricer))
        return self._consider(decider)

    def whole(self, worth: dict[Key, float]) -> Decider:
        """Every op and parameter whole on every rank."""
        pricer = self.neighbours.pricer
        times = self.neighbours.program.microbatches
        homes = Homes(
            pricer=pricer,
            ways=self.ways,
            worth=worth,
            priced=self._homes,
            microbatches=times,
            restriction=self.candidates.restriction,
        )
        clusters = range(len(self.neighbours.clusters))
        joints = [(self.candidates.undivided(i),) * pricer.mesh.num_axes for i in clusters]
        options = [option for i in clusters if (option := self.candidates.option(i, joints[i])) is not None]
        parameters = [t for t in self.neighbours.travels if t.is_parameter]
        decision = Decision(joints=joints, options=options, storages={t.number: homes.whole(t) for t in parameters})
        decider = Decider(
            neighbours=self.neighbours, candidates=self.candidates, homes=homes, decision=decision, sent=self._sent
        )
        decider.settle(())
        return decider

    def _consider(self, decider: Decider) -> tuple[float, Floats]:
        seconds, usage = decider.seconds(), self.ledger.usage(decider.nbytes())
        if not self._honours_pins(decider):
            return seconds, usage
        self.least = min(self.least, float(usage.max()))
        if seconds < self.best_seconds and (self.limit is None or usage.max() <= self.limit):
            self.best, self.best_seconds = decider, seconds
        return seconds, usage

    def _honours_pins(self, decider: Decider) -> bool:
        program, pins = self.neighbours.program, self.neighbours.pricer.config.pins
        if not pins:
            return True
        return next(violations(find_pinned(program, pins), [plan_of(decider, program)]), None) is None

    def solve(self) -> None:
        """Without a price on memory; then, if the cheapest answer does not fit, under prices."""
        self._consider(self.whole({}))
        starts = _starts(self.neighbours.pricer)
        answers = [(*self.run(parts, {}), parts) for parts in starts]
        seconds, usage, self.parts = min(answers, key=lambda answer: answer[0])
        if self.limit is not None and usage.max() > self.limit:
            self._price_memory(seconds, usage)

    def _price_memory(self, seconds: float, usage: Floats) -> None:
        assert self.limit is not None
        peaks = np.zeros_like(usage)
        peaks[int(usage.argmax())] = 1.0
        low, high, price = 0.0, np.inf, seconds / self.limit
        fitted = 0
        for _ in range(MOST_ROUNDS):
            _, usage = self.run(self.parts, self.ledger.worth(price * peaks / peaks.sum()))
            if usage.max() <= self.limit:
                high = price
            else:
                low = price
                peaks[int(usage.argmax())] += 1.0
            fitted += np.isfinite(high)
            if fitted >= PRICE_ROUNDS:
                return
            if low and np.isfinite(high):
                price = float(np.sqrt(low * high))
            else:
                price = price * PRICE_STEP if low else price / PRICE_STEP


def double_recursion(
    program: Program, pricer: Pricer, *, limit: float | None, coarse: bool | None = None, fold: bool = True
) -> Decider:
    """The cheapest decision found within `limit` bytes a device (None: any).

    coarse: as in `search.build`; by default both kinds of clusters are tried, on more than three axes coarse ones only.

    Raises:
        InfeasibleError: if no answer fits. That is no proof that none does, so that it names no least limit.
    """
    kinds = [coarse] if coarse is not None else [True] if pricer.mesh.num_axes > SEARCHED_AXES else [False, True]
    ways = Ways(pricer=pricer)
    searches = []
    for kind in kinds:
        candidates = _candidates(program, pricer, coarse=kind, fold=fold)
        neighbours = candidates.neighbours
        search = Search(
            neighbours=neighbours,
            candidates=candidates,
            ways=ways,
            ledger=make_ledger(neighbours),
            limit=limit,
        )
        search.solve()
        searches.append(search)
    found = min(searches, key=lambda s: s.best_seconds)
    if found.best is None and (limit is None or all(s.least == np.inf for s in searches)):
        raise InfeasibleError(
            f"the double recursion found no plan on mesh {pricer.mesh} that honours all pins; let the solver ilp look"
        )
    if found.best is None:
        assert limit is not None
        least = min(s.least for s in searches)
        raise InfeasibleError(
            f"the double recursion found no plan on mesh {pricer.mesh} within {gigabytes(limit)} GB a device, the "
            f"least that it found takes {least_gigabytes(least)} GB; allow as much, use more devices, or let "
            "the solver ilp look for plans that take less"
        )
    return found.best


def _candidates(program: Program, pricer: Pricer, *, coarse: bool, fold: bool) -> Candidates:
    """Options of clusters, some of each on every axis: where pins leave none of several ops together, they are
    decided one by one."""
    apart = apart_ops(program, pricer)
    while True:
        within = pinned(EVERYTHING, program, pricer, apart)
        neighbours = find_neighbours(program, pricer, coarse=coarse, fold=fold, apart=within.apart)
        found = Candidates(neighbours=neighbours, restriction=within)
        axes = range(pricer.mesh.num_axes) if pricer.config.pins else ()
        empty = [c for i, c in enumerate(neighbours.clusters) if not all(found.on_axis(i, axis) for axis in axes)]
        more = {op.name for cluster in empty for op in cluster.members} - apart
        if not more:
            return found
        apart.update(more)


def prime_mesh(cluster: Cluster) -> Mesh:
    """One axis a prime factor of the cluster's levels, the slowest level first and its large factors first."""
    shape = tuple(p for level in cluster.levels for p in sorted(_prime_factors(level.size), reverse=True)) or (1,)
    return Mesh(shape=shape, names=tuple(f"axis{i}" for i in range(len(shape))))


def _prime_factors(n: int) -> list[int]:
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def _starts(pricer: Pricer) -> list[tuple[Axes, ...]]:
    """Ways to split the mesh: axis by axis, and all axes at once."""
    axes = tuple(a for a, n in enumerate(pricer.mesh.shape) if n > 1)
    single = tuple((a,) for a in axes)
    return [single, (axes,)] if len(axes) > 1 else [single]


def _all_parts(parts: tuple[Axes, ...], pricer: Pricer) -> tuple[Axes, ...]:
    """What refinement goes through: the parts, and the axes one by one."""
    return tuple(dict.fromkeys(part for start in (parts, *_starts(pricer)) for part in start))
