"""Where does a parameter live? On the part of the mesh at hand whole or sharded; gathered for each use, or kept.

seconds   of a micro-batch: an equal part of what is paid once a step, which is the optimizer's step
          over the shard and (lifetime `step`) the way to every layout in use; else that way, and (`use`) gathering
          again for each op that saves the copy
bytes     shard, its cast to what is computed on and optimizer state always, the gradient from its making on, copies as
          long as they live; each worth what the ledger says (nothing where memory does not bind)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.search.costs.pricing import Pricer
from autopar.search.costs.storages import is_storable, storages
from autopar.search.graph.options import EVERYTHING, Restriction
from autopar.search.graph.parameters import lives
from autopar.search.recursion.ledger import Key
from autopar.search.recursion.neighbours import Travel
from autopar.search.recursion.ways import Ways
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Placement, Shard

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Home:
    """Storage and lifetime of a kind of parameter; `seconds` of all its instances, `cost` with what its bytes are
    worth, `nbytes` of one instance by kind."""

    storage: Layout
    lifetime: str
    seconds: float
    cost: float
    nbytes: Mapping[str, float]


Priced = tuple[float, dict[str, int]]
"""Seconds and bytes by kind of one home."""


@dataclass(slots=True, kw_only=True)
class Homes:
    """The best homes under one price of memory; `priced`: what homes cost, whatever memory is worth."""

    pricer: Pricer
    ways: Ways
    worth: Mapping[Key, float]
    priced: dict[object, Priced]
    microbatches: int
    restriction: Restriction = EVERYTHING
    _made: dict[object, Home] = field(default_factory=dict)
    _best: dict[object, Home] = field(default_factory=dict)

    def whole(self, travel: Travel) -> Layout:
        """Whole on every rank, or where pins forbid that as they have it."""
        tensor, mesh = travel.tensor, self.pricer.mesh
        whole = Layout((INVARIANT if tensor.requires_grad else REPLICATE,) * mesh.num_axes)
        if self.restriction.storage(tensor, whole):
            return whole
        every = (v for v in storages(tensor.shape, mesh, tensor.requires_grad, True))
        return next((v for v in every if self.restriction.storage(tensor, v)), whole)

    def best(self, travel: Travel, base: Layout, axes: Axes, wanted: tuple[Layout | None, ...]) -> Home:
        """The best that differs from `base` on `axes` only; `wanted[i]` by use i, None where that is not decided."""
        key = (travel.number, base, axes, wanted)
        found = self._best.get(key)
        if found is None:
            homes = [self.home(travel, s, wanted) for s in self._storages(travel, base, axes, wanted)]
            found = self._best[key] = min(homes, key=lambda h: h.cost)
        return found

    def home(self, travel: Travel, storage: Layout, wanted: tuple[Layout | None, ...]) -> Home:
        """The best of all lifetimes of one storage."""
        key = (travel.number, storage, wanted)
        found = self._made.get(key)
        if found is None:
            lifetimes = ["step" if self.microbatches > 1 else "keep"]
            lived = self.restriction.lived.get(travel.tensor.name)
            if (self.worth or lived) and self.microbatches > 1:
                lifetimes.append("keep")
            if (self.worth or lived) and travel.regatherable:
                lifetimes.append("use")
            homes = [self._with(travel, storage, wanted, lifetime) for lifetime in lifetimes]
            if lived is not None:
                uses = [w for w in wanted if w is not None]
                gathered = any(self.ways.fare(storage, w, travel.tensor).gathers > 0 for w in uses)
                several = self.microbatches > 1
                kept = [h for h in homes if lives(h.lifetime, gathered, several, lived)]
                homes = kept or [replace(h, cost=math.inf) for h in homes]
            found = self._made[key] = min(homes, key=lambda h: h.cost)
        return found

    def _with(self, travel: Travel, storage: Layout, wanted: tuple[Layout | None, ...], lifetime: str) -> Home:
        key = (travel.number, storage, wanted, lifetime)
        if key not in self.priced:
            self.priced[key] = self._price(travel, storage, wanted, lifetime)
        seconds, nbytes = self.priced[key]
        cost = seconds + sum(n * self.worth.get((kind, travel.number), 0.0) for kind, n in nbytes.items())
        return Home(storage=storage, lifetime=lifetime, seconds=seconds, cost=cost, nbytes=nbytes)

    def _price(self, travel: Travel, storage: Layout, wanted: tuple[Layout | None, ...], lifetime: str) -> Priced:
        pricer, tensor = self.pricer, travel.tensor
        trained = travel.backward
        uses = dict.fromkeys(w for w in wanted if w is not None)
        seconds = self.ways.seconds(storage, uses, tensor, travel.backward)
        seconds = seconds / self.microbatches if lifetime == "step" else seconds
        if trained:
            seconds += pricer.optimizer_seconds(tensor, storage) / self.microbatches
        if lifetime == "use":
            for use, layout in zip(travel.uses, wanted, strict=True):
                if layout is not None and use.savers:
                    seconds += use.savers * self.ways.fare(storage, layout, tensor).gathers
        stored = pricer.target.stored_nbytes(tensor, storage)
        copies = sum(pricer.target.local_nbytes(tensor, w) for w in uses if _is_copy(storage, w))
        if lifetime == "step" and trained:
            copies += sum(pricer.target.stored_nbytes(tensor, w) for w in uses)
        return seconds * len(travel.names), {
            "stored": stored
            + pricer.target.cast_nbytes(tensor, storage)
            + (pricer.target.state_nbytes(tensor, storage) if trained else 0),
            "reduced" if lifetime == "step" else "gradient": stored,
            lifetime: copies,
        }

    def _storages(
        self, travel: Travel, base: Layout, axes: Axes, wanted: tuple[Layout | None, ...]
    ) -> tuple[Layout, ...]:
        """Whole, or a shard of one dim, on `axes`; nested as the mesh is, and so that gathering it leads to a use."""
        tensor, mesh = travel.tensor, self.pricer.mesh

        def placed(placement: Placement) -> tuple[Placement, ...]:
            return tuple(placement if a in axes else p for a, p in enumerate(base.axes))

        plain = [Layout(placed(Shard(d))) for d, size in enumerate(tensor.shape) if size > 1]
        whole = Layout(placed(INVARIANT if tensor.requires_grad else REPLICATE))
        uses = [w for w in dict.fromkeys(wanted) if w is not None]
        found = dict.fromkeys(v for start in (whole, *plain) for v in (start, *(_nested(start, w) for w in uses)))
        every = (base, *(v for v in found if v != base and is_storable(tensor.shape, v, mesh)))
        return tuple(v for v in every if self.restriction.storage(tensor, v)) or every[:1]


def _is_copy(storage: Layout, use: Layout) -> bool:
    """Whether the way computes anything in the forward pass: between Invariant and Replicate nothing is."""
    pairs = zip(storage.axes, use.axes, strict=True)
    return storage.order != use.order or any(p != q and not {p, q} <= {INVARIANT, REPLICATE} for p, q in pairs)


def _nested(storage: Layout, use: Layout) -> Layout:
    """The same shards, those that the use has too outermost: gathering the others leads to the use."""
    shared = [a for dim in use.sharded_dims() for a in use.axes_of(dim) if storage.axes[a] == Shard(dim)]
    others = [a for a, p in enumerate(storage.axes) if isinstance(p, Shard) and a not in shared]
    return Layout(storage.axes, (*shared, *others))
