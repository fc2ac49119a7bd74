"""What does each cluster do on each axis? The two recursions, and passes of refinement, under one price of memory.

Over parts of the mesh, the slowest link first; on each part over clusters, the heaviest first (seconds of all
instances, as split so far): a cluster takes the joint choice that is cheapest, counting

    its own seconds (and bytes, where they are worth something)
    the homes of its parameters, chosen along with it
    every tensor that it makes or reads, on its way between the ends that are decided. An end that is not is met
    halfway: an undecided maker gives whatever whole or sharded placement suits best; undecided readers take what is
    given, but summands have to be summed by someone, so that this counts at once

In refinement nothing is undecided: part by part, cluster by cluster, as long as a pass still pays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.graph.options import Option
from autopar.search.recursion.candidates import Candidates, Joint
from autopar.search.recursion.homes import Home, Homes
from autopar.search.recursion.neighbours import Neighbours, Travel
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Shard, is_even

Axes = tuple[int, ...]
"""Axes that are decided together: a cluster does the same on all of them."""

PASSES = 4
"""Most passes of refinement."""
WORTHWHILE = 1e-9
"""What a change must save, as a part of the cost of what it touches: less is rounding."""


@dataclass(slots=True, kw_only=True)
class Decision:
    """`joints[cluster][axis]`, the option that they make, and the storage of every parameter."""

    joints: list[tuple[Joint, ...]]
    options: list[Option]
    storages: dict[int, Layout]
    homes: dict[int, Home] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Decider:
    """One run. `sent`: seconds and kept bytes of travels, which runs under other prices share. `undecided` clusters
    have no choice yet on the part of the mesh at hand."""

    neighbours: Neighbours
    candidates: Candidates
    homes: Homes
    decision: Decision
    undecided: set[int] = field(default_factory=set)
    sent: dict[object, tuple[float, float]] = field(default_factory=dict)

    def recurse(self, parts: Sequence[Axes]) -> None:
        """Both recursions: over the parts of the mesh, in each over the clusters."""
        for axes in parts:
            order = self.by_weight()
            self.undecided = set(order)
            for cluster in order:
                self.undecided.discard(cluster)
                self._choose(cluster, axes)
            self.settle(axes)

    def refine(self, parts: Sequence[Axes]) -> None:
        """A pass over all parts and clusters, then over those that a change has touched, until none pays."""
        stale = set(range(len(self.neighbours.clusters)))
        for _ in range(PASSES):
            touched: set[int] = set()
            for axes in parts:
                for cluster in self.by_weight():
                    if cluster in stale and self._choose(cluster, axes):
                        touched |= self.neighbours.adjacent[cluster]
                        stale |= touched
                self.settle(axes)
            if not touched:
                return
            stale = touched

    def by_weight(self) -> list[int]:
        """Clusters, the heaviest first."""
        weights = [
            o.seconds * c.multiplicity for o, c in zip(self.decision.options, self.neighbours.clusters, strict=True)
        ]
        return sorted(range(len(weights)), key=lambda i: -weights[i])

    def _choose(self, cluster: int, axes: Axes) -> bool:
        """The cheapest choice of one cluster on one part; whether it is another than before."""
        before = self.decision.joints[cluster], self.decision.options[cluster]
        offered = self.candidates.on_axis(cluster, axes[0])
        stays = all(before[0][a] in offered for a in axes)
        best, best_cost = before, self.cost(cluster, axes) if stays else np.inf
        for joint in offered:
            joints = tuple(joint if a in axes else other for a, other in enumerate(before[0]))
            option = self.candidates.option(cluster, joints)
            if option is None or joints == before[0]:
                continue
            self.decision.joints[cluster], self.decision.options[cluster] = joints, option
            cost = self.cost(cluster, axes)
            if cost < best_cost * (1 - WORTHWHILE):
                best, best_cost = (joints, option), cost
        self.decision.joints[cluster], self.decision.options[cluster] = best
        return best[0] != before[0]

    def settle(self, axes: Axes) -> None:
        """Fix the storages on a part."""
        for travel in self.neighbours.travels:
            if travel.is_parameter:
                home = self.homes.best(travel, self.decision.storages[travel.number], axes, self.wants(travel))
                self.decision.storages[travel.number] = home.storage
                self.decision.homes[travel.number] = home

    def cost(self, cluster: int, axes: Axes) -> float:
        """What depends on one cluster's choice, as far as its neighbours are decided."""
        return self.own_cost(cluster) + sum(self.travel_cost(t, axes) for t in self.neighbours.touching[cluster])

    def own_cost(self, cluster: int) -> float:
        option, worth = self.decision.options[cluster], self.homes.worth
        cost = option.seconds * self.neighbours.clusters[cluster].multiplicity
        if worth:
            cost += option.kept * worth["kept", cluster]
            cost += option.working_forward * worth["forward", cluster]
            cost += option.working_backward * worth["backward", cluster]
        return cost

    def wants(self, travel: Travel) -> tuple[Layout | None, ...]:
        """What each use wants, None where it is not decided."""
        options = self.decision.options
        return tuple(
            self.neighbours.output_wants(travel)
            if use.cluster is None
            else None
            if use.cluster in self.undecided
            else options[use.cluster].wants[use.member][use.slot]
            for use in travel.uses
        )

    def travel_cost(self, travel: Travel, axes: Axes) -> float:
        """Seconds of a tensor on its way, over all instances, and what its kept bytes are worth."""
        wanted = self.wants(travel)
        if travel.is_parameter:
            if all(w is None for w in wanted):
                return 0.0
            return self.homes.best(travel, self.decision.storages[travel.number], axes, wanted).cost
        if travel.maker is None:
            return 0.0
        given = self.decision.options[travel.maker].gives[travel.tensor.index]
        open_end = travel.maker in self.undecided
        key = (travel.number, given, wanted, axes if self.undecided else (), open_end)
        found = self.sent.get(key)
        if found is None:
            seconds = self._sending(travel, given, wanted, axes, open_end) * len(travel.names)
            found = self.sent[key] = seconds, self._kept(travel, given, wanted)
        return found[0] + found[1] * self.homes.worth.get(("saved", travel.number), 0.0)

    def _sending(
        self, travel: Travel, given: Layout, wanted: tuple[Layout | None, ...], axes: Axes, open_end: bool
    ) -> float:
        uses = [w for w in wanted if w is not None]
        tensor = travel.tensor
        if open_end:
            if not uses:
                return 0.0
            starts = self._clean(travel, given, axes)
            return min(self.homes.ways.seconds(start, uses, tensor, travel.backward) for start in starts)
        if uses:
            return self.homes.ways.seconds(given, uses, tensor, travel.backward)
        if PARTIAL in (given.axes[a] for a in axes):
            ends = self._clean(travel, given, axes)
            return min(self.homes.ways.between(given, end, tensor, travel.backward) for end in ends)
        return 0.0

    def _clean(self, travel: Travel, layout: Layout, axes: Axes) -> list[Layout]:
        """The layout with one whole or sharded placement on the axes."""
        whole = INVARIANT if travel.tensor.requires_grad else REPLICATE
        n = math.prod(self.neighbours.pricer.mesh.shape[a] for a in axes)
        shards = [Shard(d) for d, size in enumerate(travel.tensor.shape) if size >= n]
        return [Layout(tuple(p if a in axes else q for a, q in enumerate(layout.axes))) for p in (whole, *shards)]

    def _kept(self, travel: Travel, given: Layout, wanted: tuple[Layout | None, ...]) -> float:
        """Bytes of one instance that are kept for backward."""
        kept = {w for use, w in zip(travel.uses, wanted, strict=True) if use.savers and w is not None}
        if travel.keeps_given:
            kept.add(given)
        return float(sum(self.neighbours.pricer.target.local_nbytes(travel.tensor, v) for v in kept))

    def nbytes(self) -> dict[tuple[str, int], float]:
        """Bytes of every kind, for the ledger."""
        out: dict[tuple[str, int], float] = {}
        for number, option in enumerate(self.decision.options):
            out["kept", number] = option.kept
            out["forward", number] = option.working_forward
            out["backward", number] = option.working_backward
        for travel in self.neighbours.travels:
            wanted = self.wants(travel)
            if travel.is_parameter:
                home = self.decision.homes[travel.number]
                out.update({(kind, travel.number): n for kind, n in home.nbytes.items()})
            elif travel.maker is None:
                out["stored", travel.number] = self._kept_of_input(travel, wanted)
            else:
                given = self.decision.options[travel.maker].gives[travel.tensor.index]
                out["saved", travel.number] = self._kept(travel, given, wanted)
        return out

    def _kept_of_input(self, travel: Travel, wanted: tuple[Layout | None, ...]) -> float:
        kept = {w for use, w in zip(travel.uses, wanted, strict=True) if use.savers and w is not None}
        kept.add(self.handed(travel))
        return float(sum(self.neighbours.pricer.target.local_nbytes(travel.tensor, v) for v in kept))

    def given(self, travel: Travel) -> Layout:
        """What a tensor's op gives, a parameter's storage, or how an input is handed over."""
        if travel.maker is not None:
            return self.decision.options[travel.maker].gives[travel.tensor.index]
        return self.decision.storages[travel.number] if travel.is_parameter else self.handed(travel)

    def handed(self, travel: Travel) -> Layout:
        """How an input is handed over: as all its readers want it where it divides evenly, else whole."""
        mesh, tensor = self.neighbours.pricer.mesh, travel.tensor
        if pinned := self.candidates.restriction.handed.get(tensor.name):
            return pinned[0]
        wanted = set(self.wants(travel))
        only = next(iter(wanted)) if len(wanted) == 1 else None
        if only is None or tensor.kind != "input" or PARTIAL in only.axes or not is_even(tensor.shape, only, mesh):
            return Layout((REPLICATE,) * mesh.num_axes)
        return only

    def seconds(self) -> float:
        """One step, as the strategy graph counts it."""
        clusters = zip(self.decision.options, self.neighbours.clusters, strict=True)
        total = sum(option.seconds * cluster.multiplicity for option, cluster in clusters)
        total += sum(home.seconds for home in self.decision.homes.values())
        for travel in self.neighbours.travels:
            if travel.maker is not None:
                given = self.decision.options[travel.maker].gives[travel.tensor.index]
                wanted = self.wants(travel)
                total += self._sending(travel, given, wanted, (), False) * len(travel.names)
        return total
