"""How is a strategy graph a mixed-integer program?

- x[node, option] in {0, 1}, one option a node. P[v] = sum of x of the producer's options that give v,
  C_i[v] = sum of x of consumer i's options that want v.
- An edge in transport form: e[a, b] >= 0 with row sums x_a and column sums x_b; options alike in it share a row.
- A group as flows: for each consumer i, out(v) - in(v) = P[v] - C_i[v] - A_i[v]; A_i takes up the unit where consumer i
  does not read the tensor, and sums to the x of those options. An arc costs y >= f_i, once for all consumers.
- Kept memory: K[v] >= P[v] where what is given is kept, K[v] >= C_i[v] for the keepers.
- At every moment: base + terms <= limit, in percent of the limit, so that HiGHS's absolute tolerances are right.

y and K may stay continuous: for given x one consumer's flow is integral. With several consumers, or where arcs take
memory, it need not be; the bound is valid all the same, and `integral_groups` makes the arcs of chosen groups binary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autopar.search.exact.array_model import ArrayModel
from autopar.search.graph.strategy_graph import Edge, Floats, Group, Ints, StrategyGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Formulation:
    """The model, and where its columns are: `options[node]` and `arcs[group]` (empty for a group without arcs)."""

    model: ArrayModel
    options: tuple[Ints, ...]
    arcs: tuple[Ints, ...]
    flows: tuple[tuple[Ints, ...], ...]
    """For each group the columns of every consumer's own flow; empty for one consumer, whose flow is `arcs`."""
    scale: float
    """Seconds times `scale` is the objective (bytes, where the peak is minimised)."""

    def choice(self, values: Floats) -> Ints:
        """The option with the largest x of every node."""
        return np.array([int(values[columns].argmax()) for columns in self.options], np.int64)

    def least_extra(self, reduced_costs: Floats) -> tuple[list[Floats], list[Floats]]:
        """How many seconds, at least, a solution that uses an option (or an arc) costs above the relaxation's optimum.

        Options and arcs are used or not, so that an arc's y and some consumer's f on it are 1 together.
        """
        extra = np.maximum(reduced_costs, 0.0) / self.scale
        arcs = [extra[columns] for columns in self.arcs]
        for i, flows in enumerate(self.flows):
            if flows:
                arcs[i] = arcs[i] + np.stack([extra[columns] for columns in flows]).min(axis=0)
        return [extra[columns] for columns in self.options], arcs


def formulate(
    graph: StrategyGraph,
    *,
    integral_groups: Collection[int] = (),
    minimise_peak: bool = False,
) -> Formulation:
    """Seconds within the memory limit as a program, or with `minimise_peak` the least limit that would do."""
    model = ArrayModel()
    scale = _scale(graph)
    price = 0.0 if minimise_peak else scale
    cost = [np.where(np.isfinite(node.seconds), node.seconds, 0.0) * price for node in graph.nodes]
    edges = [] if minimise_peak else [_separate(edge, cost, price) for edge in _merged_edges(graph)]
    if minimise_peak:
        edges = [(edge, np.where(np.isfinite(edge.seconds), 0.0, np.inf)) for edge in _merged_edges(graph)]
    options = tuple(
        model.add_columns(len(node.seconds), cost=cost[i], upper=np.isfinite(node.seconds).astype(float), integer=True)
        for i, node in enumerate(graph.nodes)
    )
    one = model.add_rows(len(options), lower=1.0, upper=1.0)
    for row, columns in zip(one, options, strict=True):
        model.add_entries(row, columns, 1.0)
    for edge, pairs in edges:
        add_transport(model, options[edge.a], options[edge.b], pairs)
    weighted = {term.group for term in graph.memory.arcs} if graph.memory is not None else set()
    arc_columns = tuple(
        _add_flows(model, group, options, price=price, integral=i in integral_groups)
        if not (minimise_peak and i not in weighted and _always_reached(group))
        else (np.zeros(0, np.int64), ())
        for i, group in enumerate(graph.groups)
    )
    arcs = tuple(part for part, _ in arc_columns)
    if graph.memory is not None:
        _add_memory(model, graph, options, arcs, minimise_peak=minimise_peak)
    flows = tuple(part for _, part in arc_columns)
    return Formulation(model=model, options=options, arcs=arcs, flows=flows, scale=1.0 if minimise_peak else scale)


def _scale(graph: StrategyGraph) -> float:
    """Brings the sum of the cheapest options, or the dearest finite cost when these are free, to 100."""
    finite = [node.seconds[np.isfinite(node.seconds)] for node in graph.nodes]
    total = sum(float(np.abs(part).min()) for part in finite if part.size)
    others = [
        *finite,
        *(e.seconds[np.isfinite(e.seconds)] for e in graph.edges),
        *(g.arc_seconds for g in graph.groups),
    ]
    largest = max((float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) for part in others), default=0.0)
    reference = max(total, largest / 100)
    return 100.0 / reference if reference > 0 else 1.0


def _merged_edges(graph: StrategyGraph) -> list[Edge]:
    """One edge a pair of nodes, a < b; an edge from a node to itself is left to `_separate`."""
    merged: dict[tuple[int, int], Floats] = {}
    for edge in graph.edges:
        key, seconds = ((edge.a, edge.b), edge.seconds) if edge.a <= edge.b else ((edge.b, edge.a), edge.seconds.T)
        merged[key] = merged[key] + seconds if key in merged else seconds
    return [Edge(a=a, b=b, seconds=seconds) for (a, b), seconds in merged.items()]


def _separate(edge: Edge, cost: list[Floats], price: float) -> tuple[Edge, Floats]:
    """Move what depends on one end only into that node's cost; what remains of the matrix, scaled."""
    if edge.a == edge.b:
        diagonal = np.diagonal(edge.seconds)
        cost[edge.a] = cost[edge.a] + np.where(np.isfinite(diagonal), diagonal, 0.0) * price
        return edge, np.where(np.isfinite(diagonal), 0.0, np.inf)
    rows, columns, pairs = separated(edge.seconds * price)
    cost[edge.a] = cost[edge.a] + rows
    cost[edge.b] = cost[edge.b] + columns
    return edge, pairs


def separated(pairs: Floats) -> tuple[Floats, Floats, Floats]:
    """What of a matrix depends on its row alone, on its column alone, and what remains."""
    rows = pairs.min(axis=1)
    rows[~np.isfinite(rows)] = 0.0
    pairs = pairs - rows[:, None]
    columns = pairs.min(axis=0)
    columns[~np.isfinite(columns)] = 0.0
    return rows, columns, pairs - columns[None, :]


def add_transport(model: ArrayModel, a: Ints, b: Ints, pairs: Floats) -> None:
    """e >= 0 over classes of options that are alike in the matrix; nothing where every pair is free."""
    if not pairs.any() or pairs.ndim == 1:
        return
    row_kind, row_of = np.unique(pairs, axis=0, return_inverse=True)
    kinds, column_of = np.unique(row_kind, axis=1, return_inverse=True)
    row_of, column_of = row_of.ravel(), column_of.ravel()
    from_kind, to_kind = np.nonzero(np.isfinite(kinds))
    e = model.add_columns(len(from_kind), cost=kinds[from_kind, to_kind])
    for kind, of, columns, num in ((from_kind, row_of, a, len(kinds)), (to_kind, column_of, b, kinds.shape[1])):
        rows = model.add_rows(num, lower=0.0, upper=0.0)
        model.add_entries(rows[kind], e, 1.0)
        model.add_entries(rows[of], columns, -1.0)


def _always_reached(group: Group) -> bool:
    """Whether every vertex that may be given leads to every vertex that may be wanted."""
    given = np.unique(group.gives)
    wanted = np.unique(np.concatenate([c.wants for c in group.consumers])) if group.consumers else np.zeros(0, np.int64)
    for start in given:
        reached = np.zeros(group.num_vertices, bool)
        reached[start] = True
        count = 0
        while reached.sum() > count:
            count = int(reached.sum())
            reached[group.arc_target[reached[group.arc_source] & np.isfinite(group.arc_seconds)]] = True
        if not reached[wanted[wanted >= 0]].all():
            return False
    return True


def _add_flows(
    model: ArrayModel, group: Group, options: tuple[Ints, ...], *, price: float, integral: bool
) -> tuple[Ints, tuple[Ints, ...]]:
    """Flows for every different consumer; returns every arc's y (the only consumer's f), and the f of several."""
    num_arcs = len(group.arc_source)
    distinct = {(c.node, c.wants.tobytes()): c for c in group.consumers if (c.wants >= 0).any()}
    consumers = list(distinct.values())
    if not consumers:
        return np.zeros(0, np.int64), ()
    wanted = np.concatenate([c.wants for c in consumers])
    vertices = np.unique(np.concatenate([group.arc_source, group.arc_target, group.gives, wanted[wanted >= 0]]))
    local = np.full(group.num_vertices, -1, np.int64)
    local[vertices] = np.arange(len(vertices))
    cost = group.arc_seconds * price
    y = np.zeros(0, np.int64)
    own: list[Ints] = []
    if len(consumers) > 1:
        y = model.add_columns(num_arcs, cost=cost, integer=integral, upper=1.0 if integral else np.inf)
    for consumer in consumers:
        if len(consumers) > 1:
            f = model.add_columns(num_arcs)
            shared = model.add_rows(num_arcs, lower=0.0)
            model.add_entries(shared, y, 1.0)
            model.add_entries(shared, f, -1.0)
        else:
            f = y = model.add_columns(num_arcs, cost=cost, integer=integral, upper=1.0 if integral else np.inf)
        balance = model.add_rows(len(vertices), lower=0.0, upper=0.0)
        model.add_entries(balance[local[group.arc_source]], f, 1.0)
        model.add_entries(balance[local[group.arc_target]], f, -1.0)
        model.add_entries(balance[local[group.gives]], options[group.producer], -1.0)
        reads = consumer.wants >= 0
        columns = options[consumer.node]
        model.add_entries(balance[local[consumer.wants[reads]]], columns[reads], 1.0)
        if not reads.all():
            given = np.unique(group.gives)
            taken = model.add_columns(len(given))
            model.add_entries(balance[local[given]], taken, 1.0)
            idle = model.add_rows(1, lower=0.0, upper=0.0)
            model.add_entries(idle[0], taken, 1.0)
            model.add_entries(idle[0], columns[~reads], -1.0)
        own.append(f)
    return y, tuple(own) if len(consumers) > 1 else ()


def _add_memory(
    model: ArrayModel,
    graph: StrategyGraph,
    options: tuple[Ints, ...],
    arcs: tuple[Ints, ...],
    *,
    minimise_peak: bool,
) -> None:
    """The rows of the moments that can be the peak, each in percent of the limit."""
    memory = graph.memory
    assert memory is not None
    terms: list[tuple[Ints, Floats, Floats]] = []
    for node in memory.nodes:
        terms.append((options[node.node], node.nbytes, node.coefficient))
    shared: dict[tuple[object, ...], Ints] = {}
    for kept in memory.kept:
        group = graph.groups[kept.group]
        ends: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
        if kept.keeps_given:
            ends[("given",)] = (options[group.producer], group.gives)
        for i in kept.keepers:
            consumer = group.consumers[i]
            ends[(str(consumer.node), consumer.wants.tobytes())] = (options[consumer.node], consumer.wants)
        if len(ends) == 1:
            ((columns, vertex),) = ends.values()
            terms.append((columns[vertex >= 0], kept.nbytes[vertex[vertex >= 0]], kept.coefficient))
            continue
        key = (kept.group, *sorted(ends, key=str))
        if key not in shared:
            shared[key] = k = model.add_columns(group.num_vertices)
            for columns, vertex in ends.values():
                rows = model.add_rows(group.num_vertices, lower=0.0)
                model.add_entries(rows, k, 1.0)
                model.add_entries(rows[vertex[vertex >= 0]], columns[vertex >= 0], -1.0)
        terms.append((shared[key], kept.nbytes, kept.coefficient))
    for arc in memory.arcs:
        if arcs[arc.group].size:
            terms.append((arcs[arc.group], arc.nbytes, arc.coefficient))
    for nbytes, coefficient in [
        *((t.nbytes, t.coefficient) for t in memory.kept),
        *((t.nbytes, t.coefficient) for t in memory.arcs),
    ]:
        if nbytes.size and coefficient.size and min(nbytes.min(), coefficient.min()) < 0:
            raise ValueError("kept and copied tensors cannot take a negative number of bytes")
    percent = 100.0 / peak_scale(graph)
    moments = peak_moments(memory.base, [(nbytes, coefficient) for _, nbytes, coefficient in terms])
    z = model.add_columns(1, cost=1.0, lower=-np.inf) if minimise_peak else None
    for moment in moments:
        room = (0.0 if minimise_peak else memory.limit) - memory.base[moment]
        row = model.add_rows(1, upper=room * percent)
        for columns, nbytes, coefficient in terms:
            if coefficient[moment] != 0.0:
                model.add_entries(row[0], columns, nbytes * (coefficient[moment] * percent))
        if z is not None:
            model.add_entries(row[0], z, -1.0)


def peak_scale(graph: StrategyGraph) -> float:
    """Bytes that are 100 in the memory rows."""
    memory = graph.memory
    assert memory is not None
    least = memory.base.astype(np.float64)
    for term in memory.nodes:
        least = least + term.nbytes.min() * term.coefficient
    return max(memory.limit, float(np.abs(least).max(initial=0.0)), 1.0)


def peak_moments(base: Floats, terms: list[tuple[Floats, Floats]]) -> list[int]:
    """Moments whose row no other implies: nowhere more base, nor more of any term (`nbytes`, `coefficient[moment]`)."""
    rows = [base]
    for nbytes, coefficient in terms:
        if nbytes.size and nbytes.max() > 0:
            rows.append(coefficient)
        if nbytes.size and nbytes.min() < 0:
            rows.append(-coefficient)
    profile = np.unique(np.stack(rows), axis=1, return_index=True)
    kept: list[int] = []
    columns = profile[0]
    for i, moment in enumerate(profile[1]):
        if int((columns[:, i, None] <= columns).all(axis=0).sum()) == 1:
            kept.append(int(moment))
    return sorted(kept)
