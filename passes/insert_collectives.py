"""Captured graph + plan -> the graph that every rank runs: redistributions inserted, calls rewritten to local sizes.

Every operand is brought from its producer's layout to the one that its consumer's choice wants, step by step along the
plan's route. A layout of a tensor is made once and shared by all consumers. Parameters stored unevenly are padded to
equal chunks first. The loss ends Invariant: whole, and with the whole gradient, on every rank; so does what a call
returns, but on axes that split it, which go on doing so. What a pipeline's stage sends ends in the layout in which the
next stage takes it, so that each rank sends to its counterpart.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.ops.collectives import pad_dim
from autopar.passes.collective_call import collective_call
from autopar.passes.recompute import check_recompute, mark_again
from autopar.passes.verify import verify_local
from autopar.passes.weave_copies import check_copies
from autopar.rules.registry import result_index, rule_of
from autopar.rules.rule import Choice, choices, is_splittable, layouts, localized
from autopar.values.graph import CapturedModel, LocalModel, operands, requires_grad
from autopar.values.placement import INVARIANT, REPLICATE, Layout, Shard, is_even, local_shape
from autopar.values.plan import Plan
from autopar.values.redistribution import SUMS, Step, messages


def insert_collectives(
    captured: CapturedModel, plan: Plan, sent: Mapping[str, Layout] | None = None, *, gathers: bool = False
) -> LocalModel:
    """The local graph of `captured` under `plan`.

    sent: in which layout the next stage takes each of `captured.sends`.
    gathers: what a call returns ends whole on every rank.

    Raises:
        PlanMismatchError: if the plan is for another model or names a choice that the rules do not offer.
    """
    plan.check(captured)
    check_recompute(captured, plan)
    check_copies(plan.copies, captured)
    return _Insertion(captured, plan, sent or {}, gathers=gathers).run()


def chosen(node: fx.Node, plan: Plan) -> tuple[Choice, ...]:
    """The rule's choices that the plan names for a node, one a mesh axis."""
    rule = rule_of(node)
    offered = {choice.name: choice for choice in choices(rule)}
    names = plan.choices.get(node.name)
    if names is None or len(names) != plan.mesh.num_axes or not set(names) <= set(offered):
        raise PlanMismatchError(
            f"the plan chooses {names} for {node.name} on mesh {plan.mesh}, its rule offers {sorted(offered)}; "
            "plan again"
        )
    result = tuple(offered[name] for name in names)
    if not is_splittable(rule, result, plan.mesh):
        raise PlanMismatchError(f"the plan splits {node.name} by {names}, which its sizes do not allow; plan again")
    return result


def global_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Shapes of a captured node's results."""
    value = node.meta["val"]
    return tuple(tuple(v.shape) for v in (value if isinstance(value, (tuple, list)) else (value,)))


class _Insertion:
    """One run of the pass. `made[name, layout]` is the local value of a captured node's tensor in that layout."""

    def __init__(self, captured: CapturedModel, plan: Plan, sent: Mapping[str, Layout], *, gathers: bool) -> None:
        self.captured, self.plan, self.mesh, self.sent, self.gathers = captured, plan, plan.mesh, sent, gathers
        self.graph = fx.Graph()
        self.made: dict[tuple[str, Layout], fx.Node] = {}
        self.layout: dict[str, Layout] = {}
        self.regathered = {p.placeholder for p in captured.parameters if plan.lifetimes.get(p.placeholder) == "use"}
        self.stored = {p.placeholder for p in captured.parameters}

    def run(self) -> LocalModel:
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._output(node)
            elif node.target is operator.getitem:
                self._getitem(node)
            elif node.users:  # what is drawn for nobody keeps its number, which is all that others need
                self._call(node)
        self.graph.lint()
        local = LocalModel(captured=self.captured, plan=self.plan, graph=self.graph)
        _drop_unused_backward(local.graph)
        mark_again(local.graph, self.plan)
        verify_local(local)
        return local

    def _placeholder(self, node: fx.Node) -> None:
        layout = self.plan.layouts[node.name]
        shape = tuple(node.meta["val"].shape)
        copy = self.graph.placeholder(node.name)
        self._describe(copy, node, (layout,), (shape,), "")
        if node.name in self.stored and not is_even(shape, layout, self.mesh):
            for dim, size in enumerate(local_shape(shape, layout, self.mesh)):
                if layout.axes_of(dim):
                    copy = self.graph.call_function(pad_dim, (copy, dim, size))
                    self._describe(copy, node, (layout,), (shape,), "")
        self._made(node, layout, copy)

    def _getitem(self, node: fx.Node) -> None:
        producer, index = operands(node)[0], result_index(node)
        source = self.made[producer.name, self.layout[producer.name]]
        layout = source.meta["layouts"][index]
        copy = self.graph.create_node("call_function", operator.getitem, (source, index), {}, node.name)
        self._describe(copy, node, (layout,), global_shapes(node), node.meta.get("module", ""))
        self._made(node, layout, copy)

    def _call(self, node: fx.Node) -> None:
        choice = chosen(node, self.plan)
        sources = operands(node)
        shapes = tuple(tuple(s.meta["val"].shape) for s in sources)
        results = global_shapes(node)
        grads = (requires_grad(node),) * len(results)
        wanted, given = layouts(choice, tuple(requires_grad(s) for s in sources), grads)
        module = node.meta.get("module", "")
        values = iter([self._redistributed(s, w, module) for s, w in zip(sources, wanted, strict=True)])
        rule = rule_of(node)
        target, args, kwargs = node.target, node.args, node.kwargs
        local = localized(node, choice, self.mesh, wanted, given, shapes, results)
        if rule.localize is not None:
            target, args, kwargs = rule.localize(local)
        replaced = fx.node.map_arg((args, dict(kwargs)), lambda _: next(values))
        copy = self.graph.create_node("call_function", target, *replaced, name=node.name)
        self._describe(copy, node, given, results, module)
        if rule.messages is not None:
            copy.meta["messages"] = rule.messages(local)
        self._made(node, given[0], copy)

    def _output(self, node: fx.Node) -> None:
        nodes, whole = self.captured.nodes, Layout((REPLICATE,) * self.mesh.num_axes)
        ends = [(name, self.sent[name]) for name in self.captured.sends]
        ends += [(name, self._returned(nodes[name])) for name in self.captured.ends[len(ends) :]]
        values = [self._redistributed(nodes[name], layout, "") for name, layout in ends]
        values += [self._redistributed(nodes[name], whole, "") for name in self.captured.results]
        self.graph.output(tuple(values)).meta["ends"] = len(ends)

    def _returned(self, node: fx.Node) -> Layout:
        """How a caller has a value: split as it was made, else whole, with the whole gradient on every rank."""
        whole = INVARIANT if requires_grad(node) else REPLICATE
        made = self.layout[node.name]
        kept = () if self.gathers else made.sharded_dims()
        axes = tuple(p if isinstance(p, Shard) and p.dim in kept else whole for p in made.axes)
        return replace(made, axes=axes) if kept else Layout(axes)

    def _redistributed(self, source: fx.Node, wanted: Layout, module: str) -> fx.Node:
        """The value of `source` in layout `wanted`, made on the way there if no consumer asked before."""
        if (source.name, wanted) in self.made:
            return self.made[source.name, wanted]
        shape = tuple(source.meta["val"].shape)
        for step in self._steps(source, shape, wanted):
            if (source.name, step.target) not in self.made:
                self._insert(source, shape, step, module)
        return self.made[source.name, wanted]

    def _steps(self, source: fx.Node, shape: tuple[int, ...], wanted: Layout) -> Iterable[Step]:
        size = source.meta["val"].element_size()
        return self.plan.steps(source.name, self.layout[source.name], wanted, shape, size, requires_grad(source))

    def _insert(self, source: fx.Node, shape: tuple[int, ...], step: Step, module: str) -> None:
        before = self.made[source.name, step.source]
        function, kwargs = collective_call(step, shape, self.mesh)
        if step.forward == "all_gather" and source.name in self.regathered:
            kwargs["regather"] = True
        size = source.meta["val"].element_size()
        sum_size = self.plan.config.reduced_size(size) if source.name in self.stored else size
        if sum_size != size and requires_grad(source) and step.backward in SUMS:
            kwargs["bits"] = 8 * sum_size
        copy = self.graph.call_function(function, (before,), kwargs)
        self._describe(copy, source, (step.target,), (shape,), module)
        copy.meta["messages"] = messages(step, shape, size, self.mesh, sum_size)
        copy.meta["step"] = step.among(self.mesh)
        self.made[source.name, step.target] = copy

    def _describe(
        self,
        copy: fx.Node,
        node: fx.Node,
        given: tuple[Layout, ...],
        shapes: tuple[tuple[int, ...], ...],
        module: str,
    ) -> None:
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else (value,)
        local = tuple(
            torch.empty(local_shape(s, g, self.mesh), dtype=v.dtype, device="meta")
            for s, g, v in zip(shapes, given, values, strict=True)
        )
        copy.meta.update(
            val=local if isinstance(value, (tuple, list)) else local[0],
            layouts=given,
            module=module,
            requires_grad=requires_grad(node),
            origin=node,
        )
        copy.meta["global"] = shapes

    def _made(self, node: fx.Node, layout: Layout, copy: fx.Node) -> None:
        self.layout[node.name] = layout
        self.made[node.name, layout] = copy


def _drop_unused_backward(graph: fx.Graph) -> None:
    """No gradient reaches values that no differentiable path joins to an end: they send nothing in backward."""
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            reached.update(operands(node)[: node.meta["ends"]])
        elif node in reached and requires_grad(node):
            reached.update(s for s in operands(node) if requires_grad(s))
        elif "messages" in node.meta:
            node.meta["messages"] = (node.meta["messages"][0], ())
