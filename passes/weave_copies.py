"""Two micro-batches in one graph: while one waits for a collective, the other computes (multi-copy parallelism).

The local graph of a micro-batch is there twice. Parameters, what is made of them alone, and so their gathers and
reductions, are shared. The calls of a micro-batch fall into segments: a new one begins where a call reads what a
collective brings that was not there when the segment before ended. Segments of the two follow each other in turn,

    A1 B1 A2 B2 ...

so between a collective of A and the call that reads it stands a segment of B. Backward runs all in reverse, and the
same holds there: a call that only sends in backward ends a segment too.

Losses are added before they are summed over ranks. Where these two are the whole step, the loss is that of the global
batch, scaled by its labels that count, and the graph is that of one batch; else it is a micro-batch of twice the size.
Dropout draws in each what it would draw alone; statistics of a buffer go from the first to the second.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autopar.errors import BatchError
from autopar.ops import collectives
from autopar.ops.copies import added, site_of, step_loss
from autopar.passes.graph_tools import copied_name, output_node
from autopar.values.graph import Accumulation, CapturedModel, InputSpec, is_random, operands
from autopar.values.local_model import LocalModel

COPIES = 2
_ALWAYS = (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce, collectives.all_to_all,
           collectives.all_reduce_gradient)  # fmt: skip

Item = TypeVar("Item", bound=Hashable)


def segments(
    items: Iterable[Item], reads: Callable[[Item], Iterable[Item]], is_sent: Callable[[Item], bool]
) -> list[list[Item]]:
    """The calls of a micro-batch, in order, cut before each that waits for what was sent since the last cut."""
    out: list[list[Item]] = [[]]
    sent: set[Item] = set()
    for item in items:
        if any(source in sent for source in reads(item)):
            sent.clear()
            out.append([])
        if is_sent(item):
            sent.add(item)
        out[-1].append(item)
    return out


def sends(node: fx.Node) -> bool:
    """Whether a call is a collective, on the way there or on that of its gradient; made again, it is one in each."""
    if node.meta.get("again"):
        return False
    return node.target in _ALWAYS or (
        node.target is collectives.local_slice and node.kwargs.get("backward") == "all_gather"
    )


def of_batch(graph: fx.Graph, names: Container[str]) -> set[fx.Node]:
    """Placeholders of these names, what is drawn at random, and all that is computed from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        begins = node.name in names if node.op == "placeholder" else is_random(node)
        if begins or any(s in found for s in node.all_input_nodes):
            found.add(node)
    return found


def weave_copies(local: LocalModel) -> LocalModel:
    """The local model of a step that runs `copies` micro-batches at once; its inputs are those of each in turn.

    Raises:
        BatchError: if the plan's micro-batches do not come in pairs.
    """
    captured, plan = local.captured, local.plan
    check_copies(plan.copies, captured)
    assert captured.accumulation is not None
    inputs = [replace(s, placeholder=copied_name(s.placeholder, c)) for c in range(COPIES) for s in captured.inputs]
    rounds = captured.microbatches // COPIES
    accumulation = replace(captured.accumulation, microbatches=rounds) if rounds > 1 else None
    layouts = {
        copied_name(s.placeholder, c): plan.layouts[s.placeholder] for c in range(COPIES) for s in captured.inputs
    }
    return LocalModel(
        captured=replace(captured, inputs=tuple(inputs), accumulation=accumulation, copies=COPIES),
        plan=replace(plan, microbatches=rounds, copies=1, layouts={**plan.layouts, **layouts}),
        graph=weave_graph(local.graph, captured),
    )


def check_copies(copies: int, captured: CapturedModel) -> None:
    """Raises BatchError if the plan of a graph cannot run so many micro-batches at once."""
    if copies == 1:
        return
    if captured.is_stage:
        raise BatchError(
            f"{copies} micro-batches at once were asked of a pipeline's stage, whose schedule runs one at a time; plan "
            "without pipeline ranks, or without weaving"
        )
    if copies != COPIES or captured.microbatches % COPIES:
        raise BatchError(
            f"{copies} micro-batches at once were asked, the step has {captured.microbatches}; a step is woven of "
            "pairs: give an even number of micro-batches, or plan without weaving"
        )


def weave_graph(graph: fx.Graph, captured: CapturedModel) -> fx.Graph:
    """`graph`, which runs one of the micro-batches of `captured`, twice in one."""
    assert captured.accumulation is not None
    return _Weaver(graph, captured, captured.accumulation).run()


class _Weaver:
    """`made[copy]`: the calls of a copy; what is shared is in the first."""

    def __init__(self, graph: fx.Graph, captured: CapturedModel, accumulation: Accumulation) -> None:
        self.graph, self.captured, self.accumulation = graph, captured, accumulation
        self.loss, *results = _results(graph)
        self.mutated = dict(zip((b.placeholder for b in captured.buffers if b.mutated_by), results, strict=False))
        self.count = results[-1] if accumulation.count is not None else None
        self.batch = of_batch(graph, {*(spec.placeholder for spec in captured.inputs), *self.mutated})
        self.woven = fx.Graph()
        self.made: list[dict[fx.Node, fx.Node]] = [{} for _ in range(COPIES)]

    def run(self) -> fx.Graph:
        self._placeholders()
        if self.count is not None:
            for copy in range(COPIES):
                self._emit(self.count, copy)  # reads labels alone: it is on its way while all else runs
        items = [n for n in self.graph.nodes if n.op == "call_function" and n in self.batch and n is not self._told()]
        for segment in segments(items, lambda node: node.all_input_nodes, sends):
            for copy in range(COPIES):
                for node in segment:
                    self._emit(node, copy)
        self._output()
        self.woven.lint()
        return self.woven

    def _placeholders(self) -> None:
        specs: Sequence[InputSpec] = self.captured.inputs
        inputs = {spec.placeholder for spec in specs}
        nodes = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        for name, node in nodes.items():
            if name not in inputs:
                self._emit(node, 0)
        for copy in range(COPIES):
            for name in (spec.placeholder for spec in specs):
                made = self.woven.placeholder(copied_name(name, copy))
                assert made.name == copied_name(name, copy), f"the model has a tensor called {made.name}"
                made.meta = dict(nodes[name].meta)
                self.made[copy][nodes[name]] = made

    def _emit(self, node: fx.Node, copy: int) -> fx.Node:
        own = copy if node in self.batch else 0
        if node not in self.made[own]:
            if node.op == "placeholder" and own:
                self.made[own][node] = self._emit(self.mutated[node.name], own - 1)
            else:
                values = {source: self._emit(source, own) for source in node.all_input_nodes}
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                if own and isinstance(site := kwargs.get("site"), int):
                    kwargs = {**kwargs, "site": site_of(site, own)}
                new = self.woven.create_node(node.op, node.target, args, kwargs, copied_name(node.name, own))
                assert new.name == copied_name(node.name, own), f"the model has a tensor called {new.name}"
                new.meta = {**node.meta, "copy": own}
                self.made[own][node] = new
        return self.made[own][node]

    def _told(self) -> fx.Node | None:
        """The sum of the loss over ranks, which nothing waits for, if it is the last of the loss's calls."""
        is_sum = self.loss.target is collectives.all_reduce and len(self.loss.users) == 1
        return self.loss if is_sum and self.loss.kwargs.get("backward", "none") == "none" else None

    def _output(self) -> None:
        told = self._told()
        end = self.loss if told is None else operands(told)[0]
        losses = [self._emit(end, copy) for copy in range(COPIES)]
        counts = [] if self.count is None else [self._emit(self.count, copy) for copy in range(COPIES)]
        is_step = self.accumulation.microbatches == COPIES
        if is_step:
            weight, rows = self.accumulation.weight, self.accumulation.rows
            loss = self.woven.call_function(step_loss, (losses, counts), {"weight": weight, "rows": rows})
        else:
            loss = self.woven.call_function(added, (losses,))
        loss.meta = {key: end.meta[key] for key in ("val", "requires_grad", "layouts", "global") if key in end.meta}
        if told is not None:
            loss = self.woven.node_copy(told, lambda _: loss)
        results = [self._emit(node, COPIES - 1) for node in self.mutated.values()]
        if counts and not is_step:
            results.append(self.woven.call_function(added, (counts,)))
        self.woven.output((loss, *results)).meta = dict(output_node(self.graph).meta)


def _results(graph: fx.Graph) -> Sequence[fx.Node]:
    found = output_node(graph).args[0]
    assert isinstance(found, tuple | list)
    return found  # type: ignore[return-value]
