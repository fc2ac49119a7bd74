"""What do reductions change in place? A pairwise graph as a cost array a node and a matrix a pair of neighbours.

`near[u][v]` and `near[v][u]` are two views of one matrix, a row an option of the first. Whoever changes a node or an
edge touches its ends, so that each rule looks only at what has changed since it last looked. An option is gone for good
when its cost is inf; `option` keeps the number it had in the original graph. An edge is brought to its normal form as
soon as it changes: the least cost of a row holds whatever the other end chooses, so it moves to the row's option,
likewise columns, and an edge of zeros says nothing and goes (every edge u(i) + v(j) becomes one).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, joined, starts

Member = tuple[int, int, Floats]
"""Begin, end, bytes an option."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Follows:
    """The option of `node`, which is gone, follows from those of its `parents`: table[option of each]. Options stand
    under their original numbers, so that later removals change nothing."""

    node: int
    parents: tuple[int, ...]
    options: tuple[Ints, ...]
    table: Ints

    def put(self, choice: Ints) -> None:
        """Fill in the node's option, those of its parents known."""
        at = [int((own == choice[p]).argmax()) for p, own in zip(self.parents, self.options, strict=True)]
        choice[self.node] = self.table[tuple(at)]


class Tables:
    """One graph on its way to a smaller one."""

    def __init__(self, problem: Pairwise, rules: Sequence[str]) -> None:
        first, usage = problem.first_option, problem.first_usage
        self.cost = np.split(problem.cost.copy(), first[1:-1])
        self.option = [np.arange(len(own)) for own in self.cost]
        self.members: list[list[Member]] = [[] for _ in self.cost]
        taken = np.split(problem.usage.copy(), usage[1:-1]) if len(problem.member_node) else []
        spans = zip(problem.member_node.tolist(), problem.begin.tolist(), problem.end.tolist(), taken, strict=True)
        for node, begin, end, own in spans:
            self.members[node].append((begin, end, own))
        self.base = np.diff(problem.base, prepend=0.0, append=0.0)
        """Bytes that are certain, as differences: sum them up to a time."""
        self.limit = problem.limit
        self.offset = 0.0
        """What every choice costs."""
        self.log: list[Follows] = []
        self.alive = set(range(problem.num_nodes))
        self.waiting = {rule: set(self.alive) for rule in rules}
        """For each rule the nodes that it is to look at."""
        self.decides: set[tuple[int, int]] = set()
        """(u, v): no option of u allows more than one of v."""
        self.spared = np.inf
        """The least limit under which some option dropped for its size might have stayed."""
        self.changes = 0
        self.near: list[dict[int, Floats]] = [{} for _ in self.cost]
        pairs = problem.pair_cost.copy()
        ends = zip(problem.edge_a.tolist(), problem.edge_b.tolist(), problem.first_pair.tolist(), strict=False)
        for a, b, at in ends:
            rows, columns = len(self.cost[a]), len(self.cost[b])
            self.join(a, b, pairs[at : at + rows * columns].reshape(rows, columns))

    def touch(self, node: int) -> None:
        self.changes += 1
        for nodes in self.waiting.values():
            nodes.add(node)

    def raise_cost(self, node: int, by: Floats | float) -> None:
        self.cost[node] = self.cost[node] + by
        self.touch(node)

    def add_pairs(self, a: int, b: int, pairs: Floats) -> None:
        """To the edge between two nodes, if there is one."""
        self.join(a, b, self.near[a][b] + pairs if b in self.near[a] else pairs)

    def join(self, a: int, b: int, pairs: Floats) -> None:
        """Couple two nodes by a matrix, which is this table's own, in its normal form."""
        for u, by in ((a, pairs), (b, pairs.T)):
            least = by.min(axis=1)
            if least.any():
                self.raise_cost(u, least)
                by -= np.where(least < np.inf, least, 0.0)[:, None]
        if not pairs.any():
            self.cut(a, b)
            return
        allowed = pairs < np.inf
        for u, v, by, own in ((a, b, pairs, allowed), (b, a, pairs.T, allowed.T)):
            self.near[u][v] = by
            (self.decides.add if own.sum(axis=1).max() <= 1 else self.decides.discard)((u, v))
            self.touch(u)

    def cut(self, a: int, b: int) -> None:
        """Take the edge between two nodes out."""
        for u, v in ((a, b), (b, a)):
            self.near[u].pop(v, None)
            self.decides.discard((u, v))
            self.touch(u)

    def keep(self, node: int, kept: Ints) -> None:
        """Only these options of a node."""
        if not len(kept):
            raise self.infeasible()
        self.cost[node], self.option[node] = self.cost[node][kept], self.option[node][kept]
        self.members[node] = [(begin, end, taken[kept]) for begin, end, taken in self.members[node]]
        self.touch(node)
        for other, pairs in list(self.near[node].items()):
            self.join(node, other, pairs[kept])

    def remove(self, node: int, parents: tuple[int, ...], table: Ints) -> None:
        """Take a node out, whose position among its options is `table`, a dim for each parent; its members and costs
        must have gone elsewhere."""
        own = tuple(self.option[p] for p in parents)
        self.log.append(Follows(node=node, parents=parents, options=own, table=self.option[node][table]))
        for other in list(self.near[node]):
            self.cut(node, other)
        self.members[node] = []
        self.alive.discard(node)
        self.changes += 1

    def take(self, begin: int, end: int, nbytes: float) -> None:
        """Bytes that are certain from now on."""
        self.base[begin] += nbytes
        self.base[end] -= nbytes

    def certain(self) -> Floats:
        """Bytes at every time whatever is chosen. Raises InfeasibleError where these exceed the limit."""
        base = np.asarray(np.cumsum(self.base)[:-1])
        if base.max(initial=0.0) > self.limit:
            raise self.infeasible()
        return base

    def infeasible(self) -> InfeasibleError:
        """The proof of it holds for every limit below what dropped options would have needed, and below the base."""
        exceeded = float(np.cumsum(self.base)[:-1].max(initial=0.0))
        if exceeded <= self.limit and self.spared == np.inf:
            return InfeasibleError("no choice is allowed: every choice has an option or a pair of infinite cost")
        least = min(self.spared, exceeded if exceeded > self.limit else np.inf)
        return InfeasibleError(
            f"no choice fits into {self.limit:,.0f} bytes: at least {least:,.0f} are needed; raise the limit",
            least_nbytes=least,
        )

    def to_problem(self) -> tuple[Pairwise, list[int]]:
        """The graph as a value, and which original nodes its nodes are."""
        nodes = sorted(self.alive)
        place = {node: i for i, node in enumerate(nodes)}
        edges = [(place[a], place[b], pairs) for a in nodes for b, pairs in sorted(self.near[a].items()) if a < b]
        members = [(place[n], *m) for n in nodes for m in sorted(self.members[n], key=lambda m: m[:2])]
        problem = Pairwise(
            first_option=starts([len(self.cost[n]) for n in nodes]),
            cost=joined([self.cost[n] for n in nodes]),
            edge_a=np.array([a for a, _, _ in edges], np.int64),
            edge_b=np.array([b for _, b, _ in edges], np.int64),
            first_pair=starts([pairs.size for _, _, pairs in edges]),
            pair_cost=joined([pairs.ravel() for _, _, pairs in edges]),
            member_node=np.array([n for n, _, _, _ in members], np.int64),
            begin=np.array([begin for _, begin, _, _ in members], np.int64),
            end=np.array([end for _, _, end, _ in members], np.int64),
            first_usage=starts([len(taken) for _, _, _, taken in members]),
            usage=joined([taken for _, _, _, taken in members]),
            base=np.asarray(np.cumsum(self.base)[:-1]),
            limit=self.limit,
        )
        return problem, nodes
