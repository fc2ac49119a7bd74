"""The strategy graph of a program on a mesh: one node a cluster, parameter and input, one group a tensor between them.

The space, in one sentence: every cluster of ops takes, on each mesh axis, one joint choice of its members (nothing is
redistributed inside a cluster, equal blocks decide alike), every tensor between clusters travels once for all readers
through any layouts nested in mesh order over the placements that its ends use, and every parameter takes any storage
and lifetime; further restrictions are listed in `options` and `parameters`.

Memory is counted op by op, within 2% of `live`: a cluster keeps and works in its bytes from its first op to its last.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.lower.program import Program, Tensor
from autopar.lower.redistributions import SINK
from autopar.search.costs.folding import Folding, Signature, fold_program
from autopar.search.costs.paid import Everywhere, Times
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.storages import input_layouts
from autopar.search.graph.clusters import OpCluster, make_clusters
from autopar.search.graph.copies_held import copies_held
from autopar.search.graph.lattice import Lattice, Lattices, slices_of
from autopar.search.graph.moments import WHOLE, Counting, Moments
from autopar.search.graph.options import EVERYTHING, NoOptionError, Option, Restriction, options_within
from autopar.search.graph.parameters import ParameterSpace, Used, held, parameter_space
from autopar.search.graph.pinned import apart_ops, homeless, pinned
from autopar.search.graph.positions import leave_as_views, reading_positions
from autopar.search.graph.problem import ArcSteps, Problem, Reader
from autopar.search.graph.reduce_moments import few_moments
from autopar.search.graph.strategy_graph import (
    ArcMemory,
    Consumer,
    Floats,
    Group,
    Ints,
    KeptMemory,
    Memory,
    Node,
    NodeMemory,
    StrategyGraph,
)
from autopar.values.placement import INVARIANT, REPLICATE, Layout
from autopar.values.redistribution import Step


def build(
    program: Program,
    pricer: Pricer,
    *,
    limit: float | None,
    fold: bool = True,
    coarse: bool | None = None,
    restriction: Restriction | None = None,
    builder: "type[Builder] | None" = None,
    counted: Counting = WHOLE,
) -> Problem:
    """The strategy graph for a memory limit of `limit` bytes a device (None: unlimited), made by a `Builder`.

    fold: equal blocks decide alike.
    coarse: decide cheap ops with their readers; by default on three axes and more.
    """
    coarse = pricer.mesh.num_axes > 2 if coarse is None else coarse
    pins, base = pricer.config.pins, restriction or EVERYTHING
    apart = apart_ops(program, pricer)
    apart = apart if base is EVERYTHING else set(apart)  # what a part of the space needs is its own
    while True:
        within = pinned(base, program, pricer, apart)
        key = ("clusters", fold, coarse, within.apart, pins.lines)
        if key not in program.made:
            folding = fold_program(program, fold=fold, pins=pins)
            program.made[key] = folding, make_clusters(program, folding, coarse=coarse, apart=within.apart)
        folding, clusters = program.made[key]
        try:
            return (builder or Builder)(program, pricer, folding, clusters, within, counted).run(limit)
        except NoOptionError as error:
            if not pins or not (more := {op.name for op in error.cluster.members} - apart):
                raise InfeasibleError(str(error)) from error
            apart.update(more)


class Builder:
    def __init__(
        self,
        program: Program,
        pricer: Pricer,
        folding: Folding,
        clusters: tuple[OpCluster, ...],
        restriction: Restriction,
        counted: Counting,
    ) -> None:
        self.program, self.pricer, self.folding, self.restriction = program, pricer, folding, restriction
        self.part = counted.part
        self.problem = Problem(program=program, pricer=pricer, clusters=clusters)
        self.lattices = Lattices(pricer)
        self.times = program.microbatches
        self.paid = counted.paid or Everywhere(microbatches=self.times)
        self.moments = Moments(num_ops=len(program.ops), several=self.times > 1, share=counted.share)
        self.place: dict[int, tuple[int, int]] = {}  # class -> (cluster, member)
        self.node_memory: list[tuple[int, Floats, Floats]] = []
        self.kept_memory: list[tuple[int, Floats, Floats, bool, tuple[int, ...]]] = []
        self.arc_memory: list[tuple[int, Floats, Floats]] = []

    def run(self, limit: float | None) -> Problem:
        problem = self.problem
        self.limited = limit is not None
        for number, cluster in enumerate(problem.clusters):
            for member, position in enumerate(cluster.instances[0]):
                self.place[self.folding.class_of[position]] = (number, member)
            self._cluster(number, cluster)
        self.output = self._node("output", np.zeros(1))
        for names, signature in zip(self.folding.travellers, self.folding.signatures, strict=True):
            self._tensor(names, signature)
        memory = None if limit is None else self._memory(limit)
        problem.graph = StrategyGraph(nodes=tuple(problem.nodes), groups=tuple(problem.groups), memory=memory)
        return problem

    def options(self, cluster: OpCluster) -> list[Option]:
        """The cluster's in the part of the space that is asked for."""
        return options_within(cluster, self.pricer, self.restriction)

    def _node(self, name: str, seconds: Floats) -> int:
        self.problem.nodes.append(Node(name=name, seconds=seconds))
        return len(self.problem.nodes) - 1

    def _cluster(self, number: int, cluster: OpCluster) -> None:
        options = self.options(cluster)
        times = self.paid.of_ops(cluster.positions)
        node = self._node(cluster.root.name, np.array([o.paid(times) for o in options]))
        assert node == number
        self.problem.options[node] = options
        if self.limited:
            self._count_cluster(node, cluster, options)

    def _count_cluster(self, node: int, cluster: OpCluster, options: list[Option]) -> None:
        firsts = cluster.firsts
        keeping, (forward, backward) = self.moments.keeping(firsts, firsts), self.moments.running(cluster.positions)
        self._count(node, [self.part * o.kept for o in options], keeping)
        self._count(node, [self.part * o.working_forward for o in options], forward)
        self._count(node, [self.part * o.working_backward for o in options], backward)

    def _count(self, node: int, nbytes: Iterable[float], coefficient: Floats) -> None:
        table = np.array(list(nbytes), dtype=np.float64)
        if table.any():
            self.node_memory.append((node, table, coefficient))

    def _tensor(self, names: tuple[str, ...], signature: Signature) -> None:
        tensor = self.program.tensors[names[0]]
        if tensor.producer is not None and tensor.name in self._cluster_of(tensor.producer).inner:
            return
        readers = [self._reader(names, c, slot) for c, slot in sorted(signature)]
        if tensor.kind == "parameter":
            self._parameter(names, tensor, readers)
        elif tensor.kind == "op":
            self._travel(names, tensor, readers)
        else:
            self._input(names, tensor, readers)

    def _cluster_of(self, position: int) -> OpCluster:
        return self.problem.clusters[self.place[self.folding.class_of[position]][0]]

    def _reader(self, names: tuple[str, ...], number: int, slot: int) -> Reader:
        if number == SINK:
            whole = INVARIANT if names[0] == self.program.loss else REPLICATE
            layout = Layout((whole,) * self.pricer.mesh.num_axes)
            is_loss, nobody = names[0] == self.program.loss, dict[str, tuple[int, ...]].fromkeys(names, ())
            return Reader(node=self.output, wants=(layout,), savers=0, in_backward=is_loss, positions=nobody)
        node, member = self.place[number]
        cluster = self.problem.clusters[node]
        wants = tuple(o.wants[member][slot] for o in self.problem.options[node])
        positions = reading_positions(self.program, self.folding, names, number, slot)
        return Reader(
            node=node,
            wants=wants,
            savers=cluster.saved_outer.get((member, slot), 0) * len(positions[names[0]]),
            in_backward=cluster.members[member].has_backward,
            positions=positions,
        )

    def _times(self, names: tuple[str, ...]) -> Times:
        """How often tensors of a kind are paid for."""
        return self.paid.of_tensors(names, self.program, self.folding)

    def _travel(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> None:
        assert tensor.producer is not None
        node, member = self.place[self.folding.class_of[tensor.producer]]
        given = [o.gives[tensor.index] for o in self.problem.options[node]]
        seen = [*given, *(w for r in readers for w in r.wants)]
        axes = tuple(frozenset(v.axes[a] for v in seen) for a in range(self.pricer.mesh.num_axes))
        lattice = self.lattices.of(tensor.shape, tensor.element_size, tensor.requires_grad, axes, False)
        ahead, back = self._times_of_steps(names, tensor, readers)
        useful, seconds = lattice.useful(ahead, back), lattice.seconds(ahead, back)
        group = self._group(names, node, given, readers, lattice, useful, seconds)
        root = self.problem.clusters[node].members[member]
        keeps_given = root.has_backward and tensor.index in root.rule.saves_results
        self._kept(group, names, tensor, lattice.layouts, readers, keeps_given)

    def _times_of_steps(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> tuple[float, float]:
        """How often steps of a tensor between ops are paid for forward, and back, where a gradient goes back."""
        times = self._times(names)
        return times.forward, times.backward if tensor.requires_grad and any(r.in_backward for r in readers) else 0.0

    def _group(
        self,
        names: tuple[str, ...],
        producer: int,
        given: list[Layout],
        readers: list[Reader],
        lattice: Lattice,
        arcs: Ints,
        seconds: Floats,
    ) -> int:
        number = lattice.number
        self.problem.groups.append(
            Group(
                name=names[0],
                producer=producer,
                gives=np.array([number[v] for v in given], dtype=np.int64),
                consumers=tuple(
                    Consumer(node=r.node, wants=np.array([number[v] for v in r.wants], dtype=np.int64)) for r in readers
                ),
                num_vertices=len(lattice.layouts),
                arc_source=lattice.source[arcs],
                arc_target=lattice.target[arcs],
                arc_seconds=seconds[arcs],
            )
        )
        self.problem.travels.append((names, lattice.layouts, ArcSteps(steps=lattice.steps, numbers=arcs)))
        return len(self.problem.groups) - 1

    def _kept(
        self,
        group: int,
        names: tuple[str, ...],
        tensor: Tensor,
        layouts: tuple[Layout, ...],
        readers: list[Reader],
        keeps_given: bool,
    ) -> None:
        keepers = tuple(i for i, r in enumerate(readers) if r.savers)
        if not self.limited or not (keepers or keeps_given):
            return
        every = [self._produced(name) for name in names]
        first = [
            min([*(p for i in keepers for p in readers[i].positions[name]), *([made] if keeps_given else [])])
            for name, made in zip(names, every, strict=True)
        ]
        coefficient = self.moments.keeping(every, first)
        nbytes = self.part * np.array([self.pricer.target.local_nbytes(tensor, v) for v in layouts], dtype=np.float64)
        self.kept_memory.append((group, nbytes, coefficient, keeps_given, keepers))

    def _produced(self, name: str) -> int:
        made = self.program.tensors[name].producer
        assert made is not None
        return made

    def _input(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> None:
        """Handed over whole, or as some reader wants it, of which every layout is a free slice; or as pins say."""
        whole = Layout((REPLICATE,) * self.pricer.mesh.num_axes)
        wanted = list(dict.fromkeys(w for r in readers for w in r.wants if w != whole))
        options = [whole]
        if tensor.kind == "input":
            options += [w for w in wanted if w in input_layouts(tensor.shape, self.pricer.mesh)]
        handed = self.restriction.handed.get(tensor.name, ())
        options = list(handed) or options
        node = self._node(names[0], np.zeros(len(options)))
        self.problem.inputs[node] = (names, tuple(options))
        if tensor.kind == "input" and self.times > 1:  # a step holds those of all its micro-batches
            nbytes = [self.pricer.target.local_nbytes(tensor, v) * len(names) for v in options]
            self._count(node, nbytes, self.moments.nothing() + self.times - 1)
        layouts = (whole, *wanted)
        lattice = slices_of(whole, wanted)
        arcs, seconds = lattice.target - 1, lattice.forward
        if handed:
            axes = tuple(frozenset(v.axes[a] for v in (*options, *wanted)) for a in range(self.pricer.mesh.num_axes))
            lattice = self.lattices.of(tensor.shape, tensor.element_size, False, axes, False)
            layouts = lattice.layouts
            ahead = self._times(names).forward
            arcs, seconds = lattice.useful(ahead, 0.0), lattice.seconds(ahead, 0.0)
        group = self._group(names, node, options, readers, lattice, arcs, seconds)
        sizes = self.part * np.array([self.pricer.target.local_nbytes(tensor, v) for v in layouts], dtype=np.float64)
        keepers = tuple(i for i, r in enumerate(readers) if r.savers)
        self.kept_memory.append((group, sizes, self.moments.nothing() + len(names), True, keepers))

    def _parameter(self, names: tuple[str, ...], tensor: Tensor, readers: list[Reader]) -> None:
        uses = tuple(dict.fromkeys(w for r in readers for w in r.wants))
        times = self._times(names)
        block, model = zip(*(self.program.tensors[name].shares for name in names), strict=True)
        used = Used(
            tensor=replace(tensor, shares=(min(block), min(model))),
            uses=uses,
            savers=max((self.pricer.gathers_again(r.savers, len(readers)) for r in readers), default=0),
            in_backward=any(r.in_backward for r in readers),
            shared=len(readers) > 1,
            regatherable=not leave_as_views(self.program, self.problem.clusters, names),
            microbatches=times.both / times.once if times.once else 1.0,
            limited=self.limited,
        )
        space = parameter_space(used, self.lattices, self.restriction)
        if not space.options:
            raise homeless(names[0], self.program, self.pricer)
        node = self._node(names[0], np.array(space.seconds) * times.once)
        self.problem.parameters[node] = (names, space)
        for nbytes, coefficient in held(space, names, self.program, self.moments) if self.limited else ():
            self._count(node, nbytes, coefficient)
        if readers:
            self._parameter_group(names, node, uses, space, readers)

    def _parameter_group(
        self,
        names: tuple[str, ...],
        node: int,
        uses: tuple[Layout, ...],
        space: ParameterSpace,
        readers: list[Reader],
    ) -> None:
        """Vertices: options, then for one reader its uses; for several (use, cost of gathering it again) on the way to
        (use, reader). One option is chosen, so that copies from different ones may share a vertex."""
        num_options = len(space.options)
        arcs: list[tuple[int, int, float]] = []
        steps: list[tuple[Step, ...]] = []
        wants: list[dict[Layout, int]] = []
        if len(readers) == 1:
            wants.append({u: num_options + i for i, u in enumerate(uses)})
            num_vertices = num_options + len(uses)
            for way in space.ways:
                arcs.append(
                    (
                        way.option,
                        wants[0][way.use],
                        way.seconds + way.again * self.pricer.gathers_again(readers[0].savers, 1),
                    )
                )
                steps.append(way.steps)
        else:
            copies = {copy: i for i, copy in enumerate(dict.fromkeys((w.use, w.again) for w in space.ways))}
            numbers = itertools.count(num_options + len(copies))
            wants = [{u: next(numbers) for u in uses} for _ in readers]
            num_vertices = num_options + len(copies) + len(readers) * len(uses)
            for way in space.ways:
                arcs.append((way.option, num_options + copies[way.use, way.again], way.seconds))
                steps.append(way.steps)
            for (use, again), copy in copies.items():
                for reader, want in zip(readers, wants, strict=True):
                    times = self.pricer.gathers_again(reader.savers, len(readers))
                    arcs.append((num_options + copy, want[use], again * times))
                    steps.append(())
        layouts = (*(storage for storage, _ in space.options), *[None] * (num_vertices - num_options))
        self.problem.groups.append(
            Group(
                name=names[0],
                producer=node,
                gives=np.arange(num_options, dtype=np.int64),
                consumers=tuple(
                    Consumer(node=r.node, wants=np.array([want[v] for v in r.wants], dtype=np.int64))
                    for r, want in zip(readers, wants, strict=True)
                ),
                num_vertices=num_vertices,
                arc_source=np.array([a for a, _, _ in arcs], dtype=np.int64),
                arc_target=np.array([b for _, b, _ in arcs], dtype=np.int64),
                arc_seconds=np.array([s for _, _, s in arcs], dtype=np.float64) * self._times(names).once,
            )
        )
        self.problem.travels.append((names, layouts, tuple(steps)))
        if not self.limited:
            return
        group, rest = len(self.problem.groups) - 1, len(arcs) - len(space.ways)
        lifetimes = [*(space.options[way.option][1] for way in space.ways), *[""] * rest]
        held = [*((way.copy, way.gradient) for way in space.ways), *[(0.0, 0.0)] * rest]
        nbytes = np.array(held, dtype=np.float64).reshape(-1, 2).T
        self.arc_memory += [(group, *term) for term in copies_held(names, readers, lifetimes, nbytes, self.moments)]

    def _unread(self) -> int:
        """Bytes of inputs, buffers and constants that nothing reads."""
        tensors = (t for n, t in self.program.tensors.items() if t.producer is None and not self.program.readers[n])
        whole = Layout((REPLICATE,) * self.pricer.mesh.num_axes)
        return sum(self.pricer.target.local_nbytes(t, whole) for t in tensors if t.kind != "parameter")

    def _memory(self, limit: float) -> Memory:
        columns = [c for *_, c in self.node_memory]
        columns += [term[2] for term in self.kept_memory]
        columns += [c for *_, c in self.arc_memory]
        beside = self.moments.beside()
        table = np.array(columns).reshape(len(columns), len(beside))
        instances = [] if self.moments.share is not None else [c.instances for c in self.problem.clusters]
        few = few_moments(np.vstack([table, beside]), self.moments, instances)
        return Memory(
            limit=limit,
            base=self.part * self._unread() + beside[few],
            moments=tuple(int(moment) for moment in self.moments.numbers[few]),
            nodes=tuple(NodeMemory(node=n, nbytes=b, coefficient=c[few]) for n, b, c in self.node_memory),
            kept=tuple(
                KeptMemory(group=g, nbytes=b, coefficient=c[few], keeps_given=given, keepers=keepers)
                for g, b, c, given, keepers in self.kept_memory
            ),
            arcs=tuple(ArcMemory(group=g, nbytes=b, coefficient=c[few]) for g, b, c in self.arc_memory),
        )
