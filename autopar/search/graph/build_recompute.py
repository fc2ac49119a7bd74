"""The strategy graph in which every cluster of a block may also be run again in backward instead of being kept.

Each option is there twice, kept and recomputed; the latter pays its forward seconds again and wants all that it reads
in backward. A tensor's vertices are layers, one vertex a layout:

    F  it exists in forward        F -> F   a step, forward and backward             R -> F   free
    K  it is kept                  F -> K   its bytes, from forward to backward      K -> R   free
    R  it is made again            R -> R   a step, forward twice and backward
    B  wanted in backward          K -> B   free        R -> B   its bytes, while the block runs backward

A kept producer gives F (and K, where its op saves its own result), a recomputed one gives R. A reader wants B if it
saves the tensor or is recomputed, else F. So a copy can be kept though its source is not, and made again though its
source is kept.

What leaves a block is kept: else each block could lean on the one before. Replayed bytes count from the moment the
block's backward begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.lower.program import Op, Program, Tensor
from autopar.search.costs.pricing import total
from autopar.search.graph.build import Builder
from autopar.search.graph.clusters import OpCluster
from autopar.search.graph.copies_held import copies_held
from autopar.search.graph.lattice import Lattice
from autopar.search.graph.parameters import ParameterSpace
from autopar.search.graph.pinned import check_run_again
from autopar.search.graph.problem import ArcSteps, Problem, Reader
from autopar.search.graph.strategy_graph import Consumer, Floats, Group, Ints
from autopar.values.blocks import block_of
from autopar.values.placement import Layout
from autopar.values.redistribution import Step

FORWARD, KEPT, AGAIN, BACKWARD, SAVED = range(5)
"""Layers F, K, R, B; what a producer gives that saves it is in forward, and kept for no more."""


def _ends(program: Program) -> list[int]:
    """Where the backward of each op's block begins; of an op in no block, its own."""
    blocks = [block_of(op.module) for op in program.ops]
    last = {block: position for position, block in enumerate(blocks)}
    return [last[block] if block else position for position, block in enumerate(blocks)]


class RecomputeBuilder(Builder):
    """For `build.build(..., builder=RecomputeBuilder)`: clusters inside blocks may be recomputed."""

    def run(self, limit: float | None) -> Problem:
        if "ends of blocks" not in self.program.form:
            self.program.form["ends of blocks"] = _ends(self.program)
        self.ends: list[int] = self.program.form["ends of blocks"]
        self.plain: dict[int, int] = {}  # node -> number of options that keep
        problem = super().run(limit)
        check_run_again(problem)
        return problem

    def _can_be_made_again(self, cluster: OpCluster) -> bool:
        key = ("can be made again", cluster)
        if key not in self.program.made:
            form, alike = self.program.form, (*key[:1], cluster.grown, cluster.number)
            if alike not in form:
                form[alike] = self._is_recomputable(cluster)
            self.program.made[key] = form[alike]
        return bool(self.program.made[key])

    def _is_recomputable(self, cluster: OpCluster) -> bool:
        root = cluster.root
        if not root.has_backward or all(op.rule.alias is not None for op in cluster.members):
            return False
        for positions in cluster.instances:
            blocks = {block_of(self.program.ops[p].module) for p in positions}
            results = list(self._views_of(positions[-1]))
            blocks |= {block_of(self.program.ops[p].module) for r in results for p, _ in self.program.readers[r]}
            if len(blocks) != 1 or "" in blocks or {self.program.loss, *self.program.mutated} & set(results):
                return False
        return True

    def _views_of(self, position: int) -> Iterator[str]:
        """The op's results and all views of them."""
        for result in self.program.ops[position].results:
            if result is not None:
                yield result
                for reader, slot in self.program.readers[result]:
                    if self.program.ops[reader].rule.alias == slot:
                        yield from self._views_of(reader)

    def _cluster(self, number: int, cluster: OpCluster) -> None:
        options = self.options(cluster)
        again = np.array([sum(map(self._again, cluster.members, option.names)) for option in options])
        times = self.paid.of_ops(cluster.positions)
        seconds = np.array([o.paid(times) for o in options])
        recomputable = self._can_be_made_again(cluster)
        if recomputable:
            kept, replayed = seconds, seconds + again * times[1]
            members = {op.name for op in cluster.members}
            if members & self.restriction.again:
                kept = kept + np.inf
            elif members & self.restriction.keeps:
                replayed = replayed + np.inf
            elif self.restriction.recompute is not None:
                chosen = any(self.restriction.recompute(op) for op in cluster.members)
                kept, replayed = (kept + np.inf, replayed) if chosen else (kept, replayed + np.inf)
            seconds = np.concatenate([kept, replayed])
        node = self._node(cluster.root.name, seconds)
        assert node == number
        self.plain[node] = len(options)
        self.problem.num_kept[node] = len(options)
        self.problem.options[node] = [*options, *options] if recomputable else options
        firsts = cluster.firsts
        keeping, (forward, backward) = self.moments.keeping(firsts, firsts), self.moments.running(cluster.positions)
        replaying = self.moments.replaying(np.array(self.ends)[firsts], firsts)
        inside = self.part * np.array([o.kept for o in options], dtype=np.float64)
        self._count(node, self._either(node, inside, np.zeros(len(options))), keeping)
        if recomputable:
            made = inside + self.part * np.array([self._passing(cluster, option.names) for option in options])
            self._count(node, self._either(node, np.zeros(len(options)), made), replaying)
        self._count(node, [self.part * o.working_forward for o in self.problem.options[node]], forward)
        self._count(node, [self.part * o.working_backward for o in self.problem.options[node]], backward)

    def _again(self, op: Op, names: tuple[str, ...]) -> float:
        price = self.pricer.op(op, names)
        return self.pricer.again(op, price) + total(price.forward_sent) if any(op.result_grads) else 0.0

    def _passing(self, cluster: OpCluster, names: tuple[tuple[str, ...], ...]) -> int:
        """Bytes of what members hand to each other and nothing saves: they exist during a replay alone."""
        nbytes = 0
        for i, (op, name) in enumerate(zip(cluster.members[:-1], names, strict=False)):
            if op.rule.alias is None:
                given = zip(op.result_shapes, op.result_sizes, self.pricer.op(op, name).results, strict=True)
                nbytes += sum(
                    self.pricer.target.nbytes(*g) for j, g in enumerate(given) if (i, j) not in cluster.saved_inner
                )
        return nbytes

    def _either(self, node: int, kept: Floats, replayed: Floats) -> Floats:
        """A table over options: those that keep, then, where there are any, those that recompute."""
        again = len(self.problem.options[node]) > self.plain[node]
        return np.concatenate([kept, replayed]) if again else kept

    def _is_again(self, node: int) -> np.ndarray:
        """Which options recompute."""
        options = self.problem.options.get(node)
        return np.zeros(1, bool) if options is None else np.arange(len(options)) >= self.plain[node]

    def _travel(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> None:
        assert tensor.producer is not None
        node, member = self.place[self.folding.class_of[tensor.producer]]
        given = [o.gives[tensor.index] for o in self.problem.options[node]]
        seen = [*given, *(w for r in readers for w in r.wants)]
        axes = tuple(frozenset(v.axes[a] for v in seen) for a in range(self.pricer.mesh.num_axes))
        lattice = self.lattices.of(tensor.shape, tensor.element_size, tensor.requires_grad, axes, False)
        root = self.problem.clusters[node].members[member]
        saves = root.has_backward and tensor.index in root.rule.saves_results
        _Layers(self, names, tensor, readers, lattice, node, given, saves).add()

    def _input(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> None:
        kept = [Reader(node=r.node, wants=r.wants, savers=1, in_backward=r.in_backward, positions=r.positions)
                if self._is_again(r.node).any() else r for r in readers]  # fmt: skip
        super()._input(names, tensor, kept)

    def _parameter_group(
        self,
        names: tuple[str, ...],
        node: int,
        uses: tuple[Layout, ...],
        space: ParameterSpace,
        readers: list[Reader],
    ) -> None:
        _ParameterLayers(self, names, node, space, readers).add()


class _Layers:
    """One tensor's group."""

    def __init__(
        self,
        builder: RecomputeBuilder,
        names: tuple[str, ...],
        tensor: Tensor,
        readers: list[Reader],
        lattice: Lattice,
        node: int,
        given: list[Layout],
        saves_given: bool,
    ) -> None:
        self.builder, self.names, self.tensor, self.readers = builder, names, tensor, readers
        self.lattice, self.node, self.given, self.saves_given = lattice, node, given, saves_given

    def add(self) -> None:
        builder, lattice, count = self.builder, self.lattice, len(self.lattice.layouts)
        own = [i for i, r in enumerate(self.readers) if r.positions]
        again = {i: builder._is_again(self.readers[i].node) for i in own}
        wanted = {
            lattice.number[w]
            for i in own
            for w, a in zip(self.readers[i].wants, again[i], strict=True)
            if self.readers[i].savers or a
        }
        producer = builder._is_again(self.node)
        start = SAVED if self.saves_given else FORWARD
        number = np.array([lattice.number[g] for g in self.given], dtype=np.int64)
        gives = number + np.where(producer, AGAIN, start) * count
        consumers = []
        for i, reader in enumerate(self.readers):
            wants = np.array([lattice.number[w] for w in reader.wants], dtype=np.int64)
            if i in again:
                wants += np.where((reader.savers > 0) | again[i], BACKWARD, FORWARD) * count
            consumers.append(Consumer(node=reader.node, wants=wants))
        layouts = [*lattice.layouts, *lattice.layouts, *lattice.layouts, *([None] * count), *lattice.layouts]
        self._finish(consumers, gives, layouts, self._arcs(np.array(sorted(wanted), dtype=np.int64)))

    def _arcs(self, wanted: Ints) -> "_Arcs":
        """wanted: layouts in backward."""
        builder, lattice = self.builder, self.lattice
        sizes = builder.part * np.array(
            [float(builder.pricer.target.local_nbytes(self.tensor, v)) for v in lattice.layouts]
        )
        ahead, back = builder._times_of_steps(self.names, self.tensor, self.readers)
        maker = builder.program.ops[builder._produced(self.names[0])].name
        layered = self.tensor.requires_grad and wanted.size > 0 and maker not in builder.restriction.keeps
        arcs = _Arcs(count=len(sizes), sizes=sizes)
        arcs.steps(lattice, FORWARD, lattice.seconds(ahead, back), lattice.useful(ahead, back))
        if layered:
            recomputation = builder._times(self.names).backward
            arcs.steps(lattice, AGAIN, lattice.seconds(ahead + recomputation, back), replayed=True)
        layouts = np.arange(len(sizes))
        if wanted.size or self._gives_again():
            arcs.layers(FORWARD, KEPT, layouts, kept=True)
        if layered or self._gives_again():
            arcs.layers(KEPT, AGAIN, layouts)
            arcs.layers(AGAIN, FORWARD, layouts)
        arcs.layers(KEPT, BACKWARD, wanted)
        arcs.layers(AGAIN, BACKWARD, wanted, replayed=True)
        if self.saves_given:
            given = np.unique(np.array([lattice.number[g] for g in self.given]))
            arcs.layers(SAVED, FORWARD, given)
            arcs.layers(SAVED, KEPT, given)
        return arcs

    def _gives_again(self) -> bool:
        return bool(self.builder._is_again(self.node).any())

    def _finish(self, consumers: list[Consumer], gives: Ints, layouts: list[Layout | None], arcs: "_Arcs") -> None:
        builder, problem = self.builder, self.builder.problem
        source, target, seconds, kept, replayed, numbers = arcs.joined()
        problem.groups.append(
            Group(
                name=self.names[0],
                producer=self.node,
                gives=gives,
                consumers=tuple(consumers),
                num_vertices=len(layouts),
                arc_source=source,
                arc_target=target,
                arc_seconds=seconds,
            )
        )
        steps = ArcSteps(steps=self.lattice.steps, numbers=numbers)
        problem.travels.append((self.names, tuple(layouts), steps))
        group = len(problem.groups) - 1
        problem.replayed_arcs[group] = (numbers >= 0) & (replayed > 0)
        made = [builder._produced(name) for name in self.names]
        reading = [[p for r in self.readers if r.positions for p in r.positions[name]] for name in self.names]
        last = [min(ops, default=maker) for ops, maker in zip(reading, made, strict=True)]
        start = [max((builder.ends[p] for p in ops), default=maker) for ops, maker in zip(reading, made, strict=True)]
        keeping, replaying = builder.moments.keeping(made, last), builder.moments.replaying(start, last)
        for nbytes, coefficient in ((kept, keeping), (replayed, replaying)):
            if nbytes.any():
                builder.arc_memory.append((group, nbytes, coefficient))
        if self.saves_given:
            again = builder._is_again(self.node)
            given = np.array([arcs.sizes[self.lattice.number[g]] for g in self.given])
            builder._count(self.node, np.where(again, 0.0, given), builder.moments.keeping(made, made))
            own_again = builder.moments.replaying([builder.ends[p] for p in made], made)
            builder._count(self.node, np.where(again, given, 0.0), own_again)


@dataclass(slots=True, kw_only=True)
class _Arcs:
    """Arcs between the layers of a tensor of `count` layouts, `sizes[layout]` in bytes; blocks of source, target,
    seconds, bytes kept, bytes replayed, and the step's number in the lattice or -1."""

    count: int
    sizes: Floats
    blocks: list[tuple[Ints, Ints, Floats, Floats, Floats, Ints]] = field(default_factory=list)

    def steps(
        self, lattice: Lattice, layer: int, seconds: Floats, chosen: Ints | None = None, *, replayed: bool = False
    ) -> None:
        """Steps within a layer, the `chosen` ones alone."""
        numbers = np.arange(len(lattice.steps)) if chosen is None else chosen
        source, target = lattice.source[numbers], lattice.target[numbers]
        none, first = np.zeros(len(numbers)), layer * self.count
        held = self.sizes[source] if replayed else none
        self.blocks.append((first + source, first + target, seconds[numbers], none, held, numbers))

    def layers(self, a: int, b: int, layouts: Ints, *, kept: bool = False, replayed: bool = False) -> None:
        """From one layer to the other, free, in these layouts."""
        none, own = np.zeros(len(layouts)), self.sizes[layouts]
        ends = a * self.count + layouts, b * self.count + layouts
        numbers = np.full(len(layouts), -1)
        self.blocks.append((*ends, none, own if kept else none, own if replayed else none, numbers))

    def joined(self) -> tuple[Ints, Ints, Floats, Floats, Floats, Ints]:
        source, target, seconds, kept, replayed, numbers = (
            np.concatenate(part) for part in zip(*self.blocks, strict=True)
        )
        return source, target, seconds, kept, replayed, numbers


class _ParameterLayers:
    """A parameter's group: as in `build`, with a want of their own for options that read it again in a replay."""

    def __init__(
        self,
        builder: RecomputeBuilder,
        names: tuple[str, ...],
        node: int,
        space: ParameterSpace,
        readers: list[Reader],
    ) -> None:
        self.builder, self.names, self.node = builder, names, node
        self.space, self.readers = space, readers

    def add(self) -> None:
        builder, space = self.builder, self.space
        num_options = len(space.options)
        copies = {c: num_options + i for i, c in enumerate(dict.fromkeys((w.use, w.again, space.options[w.option][1])
                                                                        for w in space.ways))}  # fmt: skip
        arcs: list[tuple[int, int, float]] = []
        steps: list[tuple[Step, ...]] = []
        held: list[tuple[str, float, float, int]] = []  # lifetime, bytes, of gradients, reader that replays or -1
        for way in space.ways:
            lifetime = space.options[way.option][1]
            arcs.append((way.option, copies[way.use, way.again, lifetime], way.seconds))
            steps.append(way.steps)
            held.append((lifetime, float(way.copy), float(way.gradient), -1))
        bytes_of = {(w.use, w.again, space.options[w.option][1]): float(w.copy) for w in space.ways}
        number = num_options + len(copies)
        consumers = []
        for i, reader in enumerate(self.readers):
            again = builder._is_again(reader.node)
            reads = len(reader.positions[self.names[0]])
            wants: dict[tuple[Layout, bool], int] = {}
            for use, recomputation in sorted({(w, bool(a)) for w, a in zip(reader.wants, again, strict=True)}, key=str):
                wants[use, recomputation] = number
                number += 1
                for copy, vertex in copies.items():
                    if copy[0] == use:
                        often = reader.savers + (reads if recomputation else 0)
                        times = builder.pricer.gathers_again(often, len(self.readers))
                        arcs.append((vertex, wants[use, recomputation], copy[1] * times))
                        steps.append(())
                        own = (f"{copy[2]} again", bytes_of[copy], 0.0, i) if recomputation else (copy[2], 0.0, 0.0, -1)
                        held.append(own)
            consumers.append(
                Consumer(
                    node=reader.node,
                    wants=np.array([wants[w, bool(a)] for w, a in zip(reader.wants, again, strict=True)], np.int64),
                )
            )
        layouts: list[Layout | None] = [storage for storage, _ in space.options]
        layouts += [None] * (number - num_options)
        builder.problem.groups.append(
            Group(
                name=self.names[0],
                producer=self.node,
                gives=np.arange(num_options, dtype=np.int64),
                consumers=tuple(consumers),
                num_vertices=number,
                arc_source=np.array([a for a, _, _ in arcs], dtype=np.int64),
                arc_target=np.array([b for _, b, _ in arcs], dtype=np.int64),
                arc_seconds=np.array([s for _, _, s in arcs], dtype=np.float64) * builder._times(self.names).once,
            )
        )
        builder.problem.travels.append((self.names, tuple(layouts), tuple(steps)))
        self._memory(held)

    def _memory(self, held: list[tuple[str, float, float, int]]) -> None:
        builder, moments = self.builder, self.builder.moments
        group = len(builder.problem.groups) - 1
        nbytes = np.array([(copy, gradient) for _, copy, gradient, _ in held]).T
        terms = copies_held(self.names, self.readers, [kind for kind, *_ in held], nbytes, moments)
        builder.arc_memory += [(group, *term) for term in terms]
        for i, reader in enumerate(self.readers):
            for lifetime in ("keep", "use"):
                again_here = [n if (kind, j) == (f"{lifetime} again", i) else 0.0 for kind, n, _, j in held]
                if not any(again_here) or (lifetime == "keep" and reader.savers):
                    continue
                ops = [p for name in self.names for p in reader.positions[name]]
                if lifetime == "keep":
                    coefficient = moments.keeping(ops, ops, at_hand=True)
                else:
                    coefficient = moments.replaying([builder.ends[p] for p in ops], ops)
                builder.arc_memory.append((group, np.array(again_here), coefficient))
