"""How many bytes are live at every moment under a folded decision, and what is a byte of each kind worth?

One row a kind of bytes (what a cluster keeps, what a tensor's layouts keep, a parameter's storage, ...), one column a
moment: how often it is live then, over all instances. Bytes times rows are the usage; rows times a price on moments are
the price of a byte of each kind. As in the strategy graph, op by op.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.search.graph.moments import Moments
from autopar.search.graph.strategy_graph import Floats
from autopar.search.recursion.neighbours import Neighbours, Travel
from autopar.values.placement import REPLICATE, Layout

Key = tuple[str, int]
"""(kind, number of the cluster or tensor). Kinds: kept, forward, backward of clusters; saved, stored, gradient,
reduced, step, keep, use of tensors (reduced: gradients that are as stored for the optimizer's step only; the last
three: copies of a parameter by their lifetime, those of a step with gradients)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionLedger:
    """`number[key]` is a row of `rows`; `base`: bytes that nothing decides."""

    number: Mapping[Key, int]
    rows: Floats
    base: float

    def usage(self, nbytes: Mapping[Key, float]) -> Floats:
        """Bytes at every moment."""
        vector = np.zeros(len(self.rows))
        for key, value in nbytes.items():
            if key in self.number:
                vector[self.number[key]] += value
        return np.asarray(self.base + vector @ self.rows)

    def worth(self, price: Floats) -> dict[Key, float]:
        """Seconds a byte of each kind, for prices in seconds a byte at every moment."""
        values = self.rows @ price
        return {key: float(values[i]) for key, i in self.number.items()}


def make_ledger(neighbours: Neighbours) -> DecisionLedger:
    """The rows of a program."""
    program = neighbours.program
    moments = Moments(num_ops=len(program.ops), several=program.microbatches > 1)
    rows: dict[Key, Floats] = {}

    for number, cluster in enumerate(neighbours.clusters):
        firsts = cluster.firsts
        rows["kept", number] = moments.keeping(firsts, firsts)
        rows["forward", number], rows["backward", number] = moments.running(cluster.positions)
    for travel in neighbours.travels:
        if travel.tensor.kind == "op":
            rows["saved", travel.number] = _saved(travel, neighbours, moments)
        else:
            rows["stored", travel.number] = moments.nothing() + len(travel.names)
        if travel.is_parameter:
            _parameter(rows, travel, neighbours, moments)
    whole = Layout((REPLICATE,) * neighbours.pricer.mesh.num_axes)
    unread = (
        t
        for name, t in neighbours.program.tensors.items()
        if t.producer is None and t.kind != "parameter" and not neighbours.program.readers[name]
    )
    return DecisionLedger(
        number={key: i for i, key in enumerate(rows)},
        rows=np.array(list(rows.values())).reshape(len(rows), moments.count),
        base=float(sum(neighbours.pricer.target.local_nbytes(t, whole) for t in unread)),
    )


def _saved(travel: Travel, neighbours: Neighbours, moments: Moments) -> Floats:
    every: list[int] = []
    first: list[int] = []
    for i, name in enumerate(travel.names):
        made = neighbours.program.tensors[name].producer
        assert made is not None
        savers = [p for use in travel.uses if use.savers for p in use.positions[i]]
        savers += [made] if travel.keeps_given else []
        if savers:
            every.append(made)
            first.append(min(savers))
    return moments.keeping(every, first)


def _parameter(rows: dict[Key, Floats], travel: Travel, neighbours: Neighbours, moments: Moments) -> None:
    ops = neighbours.program.ops
    number, names = travel.number, range(len(travel.names))
    reading = [[p for use in travel.uses for p in use.positions[i]] for i in names]
    saving = [[p for use in travel.uses if use.savers for p in use.positions[i]] for i in names]
    last = [row for every in reading if (row := [p for p in every if ops[p].has_backward])]
    last = last if travel.tensor.requires_grad else []
    rows["gradient", number] = moments.gradients(last, moments.count)
    rows["reduced", number] = len(last) * moments.in_update
    for lifetime in ("step", "keep", "use"):
        read = [i for i in names if reading[i]]
        rows[lifetime, number] = moments.copies(lifetime, [reading[i] for i in read], [saving[i] for i in read])
