"""Which ops are decided together? Cheap ones join the ops that read them; nothing is redistributed inside a cluster.

A seed is an op (no view) that reads a trainable parameter, has a body or choices of its own, no rule, or far more work
than elements. Walking backwards, any other op joins the cluster of its readers if all of them, in every instance, are
in one cluster, one instance of it for each instance of the op. What several clusters read stays a cluster of its own,
and so does an op that is no view and through which alone some tensor with a gradient enters (of `coarse` clusters:
through which alone several enter, more bytes than it hands on): its result may want to travel. So mostly views and ops
without gradient join, in coarse clusters also chains and diamonds of cheap ops. Only the last op's results leave.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.lower.program import Op, Program
from autopar.search.costs.folding import Folding
from autopar.search.graph.strategy_graph import Ints

HEAVY_FLOPS = 8
"""Operations an element of its largest tensor above which an op is a seed (matmuls, convolutions, attention)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grown:
    """What is in which cluster: `instances[cluster][k][i]`, position of member i, the root last. One for all programs
    of a form whose seeds are the same."""

    instances: tuple[tuple[tuple[int, ...], ...], ...]

    @cached_property
    def positions(self) -> tuple[Ints, ...]:
        """As arrays, [instance, member]."""
        return tuple(np.array(rows, dtype=np.int64) for rows in self.instances)

    @cached_property
    def firsts(self) -> tuple[Ints, ...]:
        """The position of each instance's first op."""
        return tuple(np.asarray(rows.min(axis=1)) for rows in self.positions)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpCluster:
    """`members`: ops of the first instance in graph order, the root last; `instances[k][i]`: position of member i.

    grown, number: the clusters that it is one of, and which. inner: tensors (of the first instance) that stay inside.
    saved_inner: of them, those whose storage autograd keeps, as (member, result).
    saved_outer: (member, operand) -> ops an instance that keep the tensor read there, directly or through views inside.
    """

    members: tuple[Op, ...]
    grown: Grown
    number: int
    inner: frozenset[str]
    saved_inner: tuple[tuple[int, int], ...]
    saved_outer: Mapping[tuple[int, int], int]

    @property
    def root(self) -> Op:
        return self.members[-1]

    @property
    def instances(self) -> tuple[tuple[int, ...], ...]:
        return self.grown.instances[self.number]

    @property
    def multiplicity(self) -> int:
        return len(self.instances)

    @property
    def positions(self) -> Ints:
        """`instances` as an array, [instance, member]."""
        return self.grown.positions[self.number]

    @property
    def firsts(self) -> Ints:
        """The position of each instance's first op."""
        return self.grown.firsts[self.number]


def is_seed(op: Op, program: Program) -> bool:
    rule = op.rule
    if rule.alias is not None:
        return False
    if any(program.tensors[op.operands[i]].requires_grad for i in op.parameters):
        return True
    elements = max(math.prod(shape) for shape in (*op.result_shapes, *op.operand_shapes))
    return bool(rule.messages or rule.extra or not rule.known) or rule.flops > HEAVY_FLOPS * max(elements, 1)


def make_clusters(
    program: Program, folding: Folding, *, coarse: bool = False, apart: frozenset[str] = frozenset()
) -> tuple[OpCluster, ...]:
    """All clusters, in graph order of their first ops. apart: names of ops that are seeds too."""
    seeds = {
        n
        for n, positions in enumerate(folding.instances)
        if is_seed(program.ops[positions[0]], program) or any(program.ops[p].name in apart for p in positions)
    }
    while True:
        key = ("grown", folding, frozenset(seeds))
        if key not in program.form:
            program.form[key] = _grow(program, folding, seeds)
        grown: Grown = program.form[key]
        clusters = tuple(_cluster(program, grown, number) for number in range(len(grown.instances)))
        found = {folding.class_of[p] for cluster in clusters if (p := _boundary(program, cluster, coarse)) is not None}
        if not found:
            return clusters
        seeds |= found


def _boundary(program: Program, cluster: OpCluster, coarse: bool) -> int | None:
    """Position of the last member, no view and not the root, whose result may want to travel by itself."""
    entries: list[set[str]] = []
    made = {r: i for i, op in enumerate(cluster.members) for r in op.results if r is not None}
    upstream: list[set[int]] = []
    for i, op in enumerate(cluster.members):
        tensors = [program.tensors[name] for name in op.operands]
        entries.append({t.name for t in tensors if t.kind == "op" and t.requires_grad and t.name not in made})
        upstream.append({i}.union(*(upstream[made[t.name]] for t in tensors if t.name in made)))
    for i in reversed(range(len(cluster.members) - 1)):
        op = cluster.members[i]
        if op.rule.alias is None:
            inside = set().union(*(entries[j] for j in upstream[i]))
            outside = set().union(*(entries[j] for j in range(len(entries)) if j not in upstream[i]))
            entering = [program.tensors[name] for name in inside - outside]
            if not entering:
                continue
            nbytes = sum(math.prod(t.shape) * t.element_size for t in entering)
            given = sum(math.prod(s) * n for s, n in zip(op.result_shapes, op.result_sizes, strict=True))
            if not coarse or (len(entering) > 1 and nbytes > given):
                return op.position
    return None


def _grow(program: Program, folding: Folding, seeds: set[int]) -> Grown:
    outputs = {program.loss, *program.mutated}
    place: dict[int, tuple[int, int]] = {}  # position -> (root class, instance)
    members: dict[int, list[int]] = {}
    order = sorted(range(len(folding.instances)), key=lambda c: folding.instances[c][-1], reverse=True)
    for number in order:
        positions = folding.instances[number]
        target = None
        if number not in seeds:
            target = _common(program, positions, place, outputs)
        if target is None or len(positions) != len(folding.instances[target[0][0]]):
            target = [(number, k) for k in range(len(positions))]
        members.setdefault(target[0][0], []).append(number)
        place.update(zip(positions, target, strict=True))
    out: list[tuple[tuple[int, ...], ...]] = []
    for root in sorted(members, key=lambda c: folding.instances[c][0]):
        rows: list[dict[int, int]] = [{} for _ in folding.instances[root]]
        for number in members[root]:
            for position in folding.instances[number]:
                rows[place[position][1]][number] = position
        numbers = sorted(members[root], key=lambda c: rows[0][c])
        out.append(tuple(tuple(row[c] for c in numbers) for row in rows))
    return Grown(instances=tuple(out))


def _common(
    program: Program, positions: tuple[int, ...], place: dict[int, tuple[int, int]], outputs: set[str]
) -> list[tuple[int, int]] | None:
    """For each instance the one cluster instance that all its readers are in, None where there is none."""
    out = []
    for position in positions:
        results = [r for r in program.ops[position].results if r is not None]
        readers = {place.get(p) for r in results for p, _ in program.readers[r]}
        if len(readers) != 1 or None in readers or outputs & set(results):
            return None
        out.append(readers.pop())
    same = len({target for target, _ in out if target is not None}) == 1 if None not in out else False  # type: ignore[misc]
    return out if same and len(set(out)) == len(out) else None  # type: ignore[return-value]


def _cluster(program: Program, grown: Grown, number: int) -> OpCluster:
    members = tuple(program.ops[p] for p in grown.instances[number][0])
    made = {r: (i, j) for i, op in enumerate(members[:-1]) for j, r in enumerate(op.results) if r is not None}
    inner: set[tuple[int, int]] = set()
    outer: dict[tuple[int, int], int] = {}
    for i, op in enumerate(members):
        if not op.has_backward:
            continue
        for slot in op.rule.saves:
            member, operand = i, slot
            while (source := made.get(members[member].operands[operand])) is not None:
                alias = members[source[0]].rule.alias
                if alias is None:
                    inner.add(source)
                    break
                member, operand = source[0], alias
            else:
                outer[member, operand] = outer.get((member, operand), 0) + 1
        if i < len(members) - 1:
            inner.update((i, j) for j in op.rule.saves_results)
    return OpCluster(
        members=members,
        grown=grown,
        number=number,
        inner=frozenset(made),
        saved_inner=tuple(sorted(inner)),
        saved_outer=outer,
    )
