"""What is the program of another batch size? Those of both ends of a line of graphs, every size moved along it.

No graph is made: ops that are alike at both ends are alike between them, so that one of each kind is moved, as
`passes.batch_line` moves a node, and read as `program` reads it; the others take its sizes and keep their names. A
graph is made where it is asked for. Programs on a line whose ops are alike where each other's are share their `form`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.errors import BatchError
from autopar.lower.factor_words import WORDS_OF
from autopar.lower.program import Op, OpMaker, Program, Tensor, make_program
from autopar.ops.cross_entropy import count_labels
from autopar.passes.accumulate_gradients import Parts, count_call, parts_of
from autopar.passes.batch_line import BatchLine, Between, DeferredGraph, NotLinearError
from autopar.rules.elementwise import LOOKED_BACK, is_positive
from autopar.values.graph import Accumulation, CapturedModel, operands

COUNT = count_labels.__name__
"""Name of the call that counts labels, in graphs that have no other of this name."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramLine:
    """Programs of micro-batches on a line whose ends are alike. whole: of all samples at once. graph: that of one of so
    many micro-batches."""

    line: BatchLine
    whole: Program
    graph: Callable[[int], CapturedModel]
    _small: Program = field(init=False)
    _parts: Parts | None = field(init=False)
    _kinds: list[Op] = field(init=False, default_factory=list)
    _kind_of: list[int] = field(init=False, default_factory=list)
    _forms: dict[object, dict[object, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = self._found_parts()
        if self._parts is None:
            return
        self._small = make_program(self.line.small)
        numbers: dict[object, int] = {}
        for a, b in zip(self._small.ops, self.whole.ops, strict=True):
            if (a.operands, a.results, a.module) != (b.operands, b.results, b.module):
                raise NotLinearError(f"what {a.name} reads and makes, or its module")
            if (a.parameters, a.has_backward) != (b.parameters, b.has_backward):
                raise NotLinearError(f"what {a.name} is given, or whether backward runs through it")
            kind = numbers.setdefault((a.node, b.node, b.name in self._parts.losses), len(numbers))
            if kind == len(self._kinds):
                self._kinds.append(b)
            self._kind_of.append(kind)

    def _found_parts(self) -> Parts | None:
        """How any micro-batches of more than one sample make a step. None where they do not."""
        small, large = self.line.small, self.line.large
        try:
            if COUNT not in large.nodes:
                return parts_of(small, 2, large)
        except BatchError:  # which says so in words when the graph is made
            pass
        return None

    def microbatch(self, count: int) -> Program | None:
        """The program of one of `count` micro-batches, None where it has to be made of its graph.

        Raises:
            NotLinearError: if some size is no integer there.
        """
        few, batch = self.line.sizes
        size = batch // count
        if self._parts is None or not few < size < batch:
            return None
        whole, between = self.whole, Between(few, batch, size)
        likes, counting = self._likes(between)
        ops = tuple(
            replace(
                likes[kind],
                position=op.position,
                name=op.name,
                operands=op.operands,
                results=op.results,
                module=op.module,
            )
            for kind, op in zip(self._kind_of, whole.ops, strict=True)
        )
        tensors = {n: _moved(self._small.tensors[n], tensor, ops, between) for n, tensor in whole.tensors.items()}
        specs = between.specs(self.line.small, self.line.large)
        program = replace(
            whole,
            captured=DeferredGraph.like(self.line.large, lambda: self.graph(count), **specs),
            ops=ops,
            tensors=tensors,
            form=self._forms.setdefault(tuple((like.signature, like.rule.alias) for like in likes), {WORDS_OF: whole}),
        )
        made = Accumulation(microbatches=count, weight=1.0 / count if self._parts.weight < 1.0 else 1.0)
        if counting is not None:
            program = self._counted(program, counting)
            rows = program.tensors[self._parts.target].shape
            made = replace(made, count=COUNT, rows=float(math.prod(rows) * count))
        return replace(program, captured=program.captured.accumulated(made))

    def _counted(self, program: Program, like: Op) -> Program:
        """With an op at the end that counts labels."""
        assert self._parts is not None
        target, position = self._parts.target, len(program.ops)
        module = self.line.large.nodes[self._parts.losses[0]].meta["module"]
        op = replace(like, position=position, name=COUNT, operands=(target,), results=(COUNT,), module=module)
        value = Tensor(
            name=COUNT,
            kind="op",
            shape=op.result_shapes[0],
            element_size=op.result_sizes[0],
            stored_size=op.result_sizes[0],
            dtype=op.dtype,
            requires_grad=False,
            producer=position,
        )
        return replace(
            program,
            ops=(*program.ops, op),
            tensors={**program.tensors, COUNT: value},
            readers={**program.readers, target: (*program.readers[target], (position, 0)), COUNT: ()},
            mutated=(*program.mutated, COUNT),
        )

    def _likes(self, between: Between) -> tuple[list[Op], Op | None]:
        """One op of each kind, moved, and one that counts labels if there is any."""
        assert self._parts is not None
        (small, large), graph = (end.nodes for end in (self.line.small, self.line.large)), fx.Graph()
        maker, out = OpMaker({}, set()), []
        for op in self._kinds:
            node = _Copier(graph, between).call(small[op.name], large[op.name])
            if op.name in self._parts.losses:
                rows = _Copier(graph, between).place(small[self._parts.target], large[self._parts.target])
                node.kwargs = {**node.kwargs, "count": rows.meta["val"].numel()}
            unread = tuple(result is None for result in op.results)
            out.append(maker.first(node, op.parameters, unread, has_backward=op.has_backward))
        if not self._parts.losses:
            return out, None
        target = _Copier(graph, between).place(small[self._parts.target], large[self._parts.target])
        count = count_call(graph, target, self._parts.ignored, "")
        return out, maker.first(count, frozenset(), (False,), has_backward=False)


@dataclass(slots=True)
class _Copier:
    """A node moved along a line, with as much of what is before it as a rule may look at."""

    graph: fx.Graph
    between: Between
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def call(self, a: fx.Node, b: fx.Node) -> fx.Node:
        sources = list(zip(operands(a), operands(b), strict=True))
        for one, other in sources:
            if is_positive(one):
                self._copied(one, other, LOOKED_BACK + 1)
        found = self._copied(a, b, 1)
        for one, other in sources:
            if len({is_positive(node) for node in (one, other, self.made[one])}) > 1:
                raise NotLinearError(f"whether {one.name} is above zero")
        return found

    def _copied(self, a: fx.Node, b: fx.Node, depth: int) -> fx.Node:
        """The node after `depth` nodes before it on each way, of which placeholders stand for the first."""
        if a in self.made:
            return self.made[a]
        if not depth or a.op != "call_function":
            return self.place(a, b)
        for one, other in zip(operands(a), operands(b), strict=True):
            self._copied(one, other, depth - 1)
        moved = self.between.between((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)))
        args, kwargs = fx.node.map_arg(moved, self.made.__getitem__)
        return self._moved(self.graph.create_node(a.op, a.target, args, kwargs), a, b)

    def place(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """A placeholder for the node."""
        return self._moved(self.graph.placeholder(a.name), a, b)

    def _moved(self, made: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        made.meta = {**a.meta, "val": self.between.value(a.meta["val"], b.meta["val"])}
        self.made[a] = made
        return made


def _moved(a: Tensor, b: Tensor, ops: tuple[Op, ...], between: Between) -> Tensor:
    if a.shape == b.shape:
        return b
    made = None if b.producer is None else ops[b.producer].result_shapes[b.index]
    return replace(b, shape=made or between.between(a.shape, b.shape))
