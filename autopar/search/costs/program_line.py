"""What is the program of another batch size? Those of both ends of a line of graphs, every size moved along it.

No graph is made: ops that are alike at both ends are alike between them, so that one of each kind is moved, as
`capture.rebatch` moves a node, and read as `program` reads it; the others take its sizes and keep their names. A graph
is made where it is asked for. Programs on a line whose ops are alike where each other's are share their `form`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.capture.rebatch import Between, Deferred, Line, NotLinearError, check_alike
from autopar.errors import BatchError
from autopar.graph import Accumulation, CapturedModel, operands
from autopar.passes.accumulate_gradients import accumulate_gradients, is_unscaled
from autopar.rules.elementwise import LOOKED_BACK, is_positive
from autopar.search.costs.program import Op, OpMaker, Program, Tensor, make_program, placed


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramLine:
    """Programs of micro-batches on a line. graph: that of one of so many."""

    line: Line
    graph: Callable[[int], CapturedModel]
    _ends: tuple[Program, Program] | None = field(init=False)
    _kinds: list[tuple[Op, Op]] = field(init=False, default_factory=list)
    _kind_of: list[int] = field(init=False, default_factory=list)
    _forms: dict[object, dict[object, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ends = self._found_ends()
        if self._ends is None:
            return
        numbers: dict[tuple[fx.Node, fx.Node], int] = {}
        for a, b in zip(self._ends[0].ops, self._ends[1].ops, strict=True):
            if (a.operands, a.results, a.module) != (b.operands, b.results, b.module):
                raise NotLinearError(f"what {a.name} reads and makes, or its module")
            kind = numbers.setdefault((a.node, b.node), len(numbers))
            if kind == len(self._kinds):
                self._kinds.append((a, b))
            self._kind_of.append(kind)

    def _found_ends(self) -> tuple[Program, Program] | None:
        """As micro-batches. None where a number in the graph may be the size of the batch: what that means for the
        loss has to be seen of each size."""
        small, large = self.line.small, self.line.large
        try:
            if not (is_unscaled(small) and is_unscaled(large)):
                return None
            a, b = (accumulate_gradients(one, 2, lambda: large) for one in (small, large))
        except BatchError:
            return None
        check_alike(a, b)
        return make_program(a), make_program(b)

    def microbatch(self, count: int) -> Program | None:
        """The program of one of `count` micro-batches, None where it has to be made of its graph.

        Raises:
            NotLinearError: if some size is no integer there.
        """
        few, batch = self.line.sizes
        size = batch // count
        if self._ends is None or not few < size < batch:
            return None
        a, b = self._ends
        between = Between(few, batch, size)
        likes = self._likes(between)
        ops = tuple(
            placed(likes[kind], op.position, op.name, op.operands, op.results, op.module)
            for kind, op in zip(self._kind_of, b.ops, strict=True)
        )
        captured = Deferred.like(
            b.captured,
            lambda: self.graph(count),
            accumulation=self._accumulation(a.captured, b.captured, between, count),
            **between.specs(a.captured, b.captured),
        )
        return replace(
            b,
            captured=captured,
            ops=ops,
            tensors={name: _moved(a.tensors[name], tensor, ops, between) for name, tensor in b.tensors.items()},
            form=self._forms.setdefault(tuple((like.signature, like.rule.alias) for like in likes), {}),
        )

    def _accumulation(self, a: CapturedModel, b: CapturedModel, between: Between, count: int) -> Accumulation:
        """Of micro-batches, each end's being of two: rows are those of all."""
        assert a.accumulation is not None and b.accumulation is not None
        weight = 1.0 / count if b.accumulation.weight < 1.0 else 1.0
        rows = between.number(int(a.accumulation.rows) // 2, int(b.accumulation.rows) // 2) * count
        return replace(b.accumulation, microbatches=count, weight=weight, rows=float(rows))

    def _likes(self, between: Between) -> list[Op]:
        """One op of each kind, moved."""
        assert self._ends is not None
        (small, large), graph = (end.captured.nodes for end in self._ends), fx.Graph()
        maker, out = OpMaker({}, set()), []
        for a, b in self._kinds:
            if (a.parameters, a.has_backward) != (b.parameters, b.has_backward):
                raise NotLinearError(f"what {b.name} is given, or whether backward runs through it")
            node = _Copier(graph, between).call(small[b.name], large[b.name])
            unread = tuple(result is None for result in b.results)
            out.append(maker.first(node, b.parameters, unread, has_backward=b.has_backward))
        return out


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
        if depth and a.op == "call_function":
            for one, other in zip(operands(a), operands(b), strict=True):
                self._copied(one, other, depth - 1)
            moved = self.between.between((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)))
            args, kwargs = fx.node.map_arg(moved, self.made.__getitem__)
            made = self.graph.create_node(a.op, a.target, args, kwargs)
        else:
            made = self.graph.placeholder(a.name)
        made.meta = {**a.meta, "val": self.between.value(a.meta["val"], b.meta["val"])}
        self.made[a] = made
        return made


def _moved(a: Tensor, b: Tensor, ops: tuple[Op, ...], between: Between) -> Tensor:
    if a.shape == b.shape:
        return b
    made = None if b.producer is None else ops[b.producer].result_shapes[b.index]
    return Tensor(
        name=b.name,
        kind=b.kind,
        shape=made or between.between(a.shape, b.shape),
        element_size=b.element_size,
        stored_size=b.stored_size,
        dtype=b.dtype,
        requires_grad=b.requires_grad,
        producer=b.producer,
        index=b.index,
        shares=b.shares,
    )
