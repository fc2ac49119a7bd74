"""A lowered step's forward pass -> the graph that every rank runs: calls on local sizes, redistributions between them.

What travels where, and what runs again in backward, is the lowered step's; here it becomes calls. Parameters stored
unevenly are padded to equal chunks first. Backward is made by autograd from what these calls are.

Buckets, what runs once a step and two micro-batches at once are passes over the graph (`passes.fuse_collectives`,
`hoist_parameters`, `weave_copies`): an exported graph is a person's to edit, and is rewritten as it then is.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.lower.calls import LoweredCall
from autopar.lower.legality import check_legal, check_sent, check_shared
from autopar.lower.lowered_step import LoweredStep, lower
from autopar.lower.program import make_program
from autopar.lower.redistributions import wanted_by_output
from autopar.lower.target import Target
from autopar.ops.collectives import pad_dim
from autopar.passes.collective_call import collective_call
from autopar.passes.recompute import is_pure_view
from autopar.passes.verify import verify_local
from autopar.rules.registry import rule_of
from autopar.values.graph import CapturedModel, operands, requires_grad
from autopar.values.local_model import LocalModel
from autopar.values.placement import Layout, is_even, local_shape
from autopar.values.redistribution import SUMS, Step, messages, step_between
from autopar.values.stage_plan import StagePlan


def emit(
    captured: CapturedModel,
    plan: StagePlan,
    sent: Mapping[str, Layout] = MappingProxyType({}),
    *,
    gathers: bool = False,
    on_host: bool | None = None,
    exact_random: bool = False,
) -> LocalModel:
    """The local graph of `captured` under `plan`.

    sent: in which layout the next stage takes each of `captured.sends`.
    gathers: what a call returns ends whole on every rank.
    on_host: whether it runs on CPUs; None for what this process computes on.
    exact_random: as of `Target`.

    Raises:
        PlanMismatchError: if the plan is for another model or names a choice that the rules do not offer.
    """
    plan.check(captured)
    program = make_program(captured)
    check_legal(program, plan)
    host = not torch.cuda.is_available() if on_host is None else on_host
    target = Target(mesh=plan.mesh, config=plan.config, on_host=host, exact_random=exact_random)
    step = lower(replace(plan, copies=1), program, target, sent, gathers=gathers)
    local = LocalModel(captured=captured, plan=plan, graph=_Emission(step, captured).run(sent, gathers=gathers))
    local.graph.lint()
    verify_local(local)
    return local


def emit_stage(
    stages: Sequence[CapturedModel],
    plans: Sequence[StagePlan],
    number: int,
    *,
    gathers: bool = False,
    on_host: bool | None = None,
    exact_random: bool = False,
) -> LocalModel:
    """The graph that the ranks of a stage run: what it sends is in the layout in which the next stage takes it.

    Raises:
        PlanMismatchError: if a stage's plan is not for it or does not say how it takes what it receives.
    """
    check_shared(stages, plans)
    stage = stages[number]
    wanted = plans[number + 1].layouts if number + 1 < len(stages) else {}
    if missing := [name for name in stage.sends if name not in wanted]:
        raise PlanMismatchError(
            f"the plan of stage {number + 1} has no layout for {', '.join(missing[:3])}, which it receives; plan again"
        )
    sent = {name: wanted[name] for name in stage.sends}
    check_sent(stage, sent, plans[number].mesh)
    return emit(stage, plans[number], sent, gathers=gathers, on_host=on_host, exact_random=exact_random)


class _Emission:
    """One graph. `made[name, layout]` is the local value of a captured node's tensor in that layout."""

    def __init__(self, step: LoweredStep, captured: CapturedModel) -> None:
        self.step, self.captured, self.plan, self.mesh = step, captured, step.plan, step.plan.mesh
        self.graph = fx.Graph()
        self.made: dict[tuple[str, Layout], fx.Node] = {}
        self.stored = {p.placeholder for p in captured.parameters}

    def run(self, sent: Mapping[str, Layout], *, gathers: bool) -> fx.Graph:
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        module = self._modules()
        for call in self.step.calls:
            if call.op is not None:
                self._call(call)
            else:
                self._redistribute(call, module(call))
        ends = wanted_by_output(self.step.program, self.mesh, sent, self.step.redistributed, gathers=gathers)
        output = self.graph.output(tuple(self.made[value] for value in ends))
        output.meta["ends"] = len(self.captured.ends)
        return self.graph

    def _modules(self) -> Callable[[LoweredCall], str]:
        """The module for which a redistribution is made: that of the next op, "" for the graph's output."""
        of: dict[LoweredCall, str] = {}
        module = ""
        for call in reversed(self.step.calls):
            if call.op is not None:
                module = call.op.module
            of[call] = module
        return of.__getitem__

    def _placeholder(self, node: fx.Node) -> None:
        layout, shape = self.plan.layouts[node.name], tuple(node.meta["val"].shape)
        copy = self.graph.placeholder(node.name)
        self._describe(copy, node, (layout,), "")
        if node.name in self.stored and node.users and not is_even(shape, layout, self.mesh):
            for dim, size in enumerate(local_shape(shape, layout, self.mesh)):
                if layout.axes_of(dim):
                    copy = self.graph.call_function(pad_dim, (copy, dim, size))
                    self._describe(copy, node, (layout,), "")
        self.made[node.name, layout] = copy

    def _call(self, call: LoweredCall) -> None:
        op, target = call.op, self.step.target
        assert op is not None
        node, names = self.captured.nodes[op.name], self.plan.choices[op.name]
        values = iter([self.made[value] for value in call.operands])
        function, args, kwargs = node.target, node.args, node.kwargs
        if (localize := rule_of(node).localize) is not None:  # of this very call, which may draw at a site of its own
            function, args, kwargs = localize(target.local(replace(op, node=node), names))
        replaced = fx.node.map_arg((args, dict(kwargs)), lambda _: next(values))
        copy = self.graph.create_node("call_function", function, *replaced, name=op.name)
        local = target.op(op, names)
        self._describe(copy, node, local.results, op.module)
        copy.meta["again"] = self._is_again(call)
        if op.rule.messages is not None:
            copy.meta["messages"] = local.forward_messages, local.backward_messages
        if not isinstance(node.meta["val"], tuple | list):
            self.made[op.name, local.results[0]] = copy
            return
        for index, (name, layout) in enumerate(zip(op.results, local.results, strict=True)):
            if name is not None:
                part = self.graph.create_node("call_function", operator.getitem, (copy, index), {}, name)
                self._describe(part, self.captured.nodes[name], (layout,), op.module)
                self.made[name, layout] = part

    def _redistribute(self, call: LoweredCall, module: str) -> None:
        step = call.step
        assert step is not None
        (name, layout), (value,) = call.operands[0], call.results
        assert value is not None
        source = self.captured.nodes[name]
        shape, size = tuple(source.meta["val"].shape), source.meta["val"].element_size()
        sum_size = self.plan.config.reduced_size(size) if name in self.stored else size
        is_alone = not (step.forward or step.backward)  # among one rank it is the call that it would be among several
        called = step_between(step.source, step.target) if is_alone else step
        function, kwargs = collective_call(called, shape, self.mesh)
        kwargs |= self._of_parameter(name, called, size, sum_size)
        copy = self.graph.call_function(function, (self.made[name, layout],), kwargs)
        self._describe(copy, source, (step.target,), module)
        ahead, back = messages(called, shape, size, self.mesh, sum_size)
        copy.meta["messages"] = ahead, back if any(call.gradients) else ()
        copy.meta["step"] = step
        copy.meta["again"] = self._is_again(call)
        self.made[value] = copy

    def _of_parameter(self, name: str, step: Step, size: int, sum_size: int) -> dict[str, object]:
        keywords: dict[str, object] = {}
        if step.forward == "all_gather" and self.plan.lifetimes.get(name) == "use":
            keywords["regather"] = True
        if sum_size != size and requires_grad(self.captured.nodes[name]) and step.backward in SUMS:
            keywords["bits"] = 8 * sum_size
        return keywords

    def _is_again(self, call: LoweredCall) -> bool:
        """Whether a call is run again in backward, or may copy (a view of any strides) what is."""
        again = self.step.recomputation
        if call.op is not None:
            if call.op.position in again.ops:
                return True
            if call.op.rule.alias is None or is_pure_view(call.op.node):
                return False
        return any(value is not None and self.step.root(*value) in again.first for value in call.results)

    def _describe(self, copy: fx.Node, node: fx.Node, given: tuple[Layout, ...], module: str) -> None:
        value = node.meta["val"]
        is_one = not isinstance(value, tuple | list)
        values: Sequence[torch.Tensor] = (value,) if is_one else value
        local = tuple(
            torch.empty(local_shape(tuple(v.shape), layout, self.mesh), dtype=v.dtype, device="meta")
            for v, layout in zip(values, given, strict=True)
        )
        copy.meta.update(
            val=local[0] if is_one else local,
            layouts=given,
            module=module,
            requires_grad=requires_grad(node),
            origin=node,
        )
        copy.meta["global"] = tuple(tuple(v.shape) for v in values)


def is_replayed(node: fx.Node) -> bool:
    """Whether a call of a local graph is run again; views only follow."""
    if not node.meta.get("again"):
        return False
    step = node.meta.get("step")
    return bool(step.forward) if step is not None else not _is_view(node)


def _is_view(node: fx.Node) -> bool:
    return rule_of(node.meta["origin"]).alias is not None and bool(operands(node))
