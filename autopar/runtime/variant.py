"""How does a rank run a call that is not the planned step? Its graph, on the module's own parameters and buffers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autopar.ops.buckets import use_sink
from autopar.ops.groups import Groups, use_groups
from autopar.ops.random import Draws, use_draws
from autopar.ops.regather import regathering
from autopar.passes.call_natively import call_natively
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.prefetch import prefetch
from autopar.passes.recompute import again_graph
from autopar.runtime.data import local_input
from autopar.runtime.parameters import local_part, padded_part, to_dtensor
from autopar.runtime.reductions import Late
from autopar.runtime.state import State, all_whole
from autopar.values.graph import BufferSpec, InputSpec, ParameterSpec
from autopar.values.local_model import LocalModel
from autopar.values.outputs import Returned
from autopar.values.placement import Layout
from autopar.values.stage_plan import StagePlan

DTENSOR, LOCAL, GATHERED = "dtensor", "local", "whole"
"""How a call returns a tensor that ranks share out: as a DTensor, this rank's part of it, or gathered on every rank."""

End = tuple[Layout, tuple[int, ...], torch.dtype]
"""Layout, global shape and dtype of what a graph returns."""


class Owner(Protocol):
    """The module whose parameters and buffers a graph reads."""

    @property
    def groups(self) -> Groups: ...
    @property
    def device(self) -> torch.device: ...
    def get_buffer(self, target: str) -> Tensor: ...


class Part:
    """One graph on one rank, of a whole call or of a stage of it.

    owner: the module. state: has the parameters. sink: takes gradients of buckets.
    """

    def __init__(self, owner: Owner, state: State, local: LocalModel, sink: Late) -> None:
        self.owner, self.state, self.local, self.sink = owner, state, local, sink
        captured, plan = local.captured, local.plan
        graph = fuse_collectives(again_graph(local.graph), captured.parameters, plan)
        graph = prefetch(graph) if plan.prefetch else graph
        self.graph = fx.GraphModule(nn.Module(), call_natively(graph))
        self.placeholders = tuple(node.name for node in self.graph.graph.nodes if node.op == "placeholder")
        self.stored = {name: spec.placeholder for spec in state.specs.values() for name in spec.names}
        self.constants = {
            name: padded_part(value.to(owner.device), plan.layouts[name], plan.mesh, state.coordinate)
            for name, value in captured.constants.items()
        }

    @property
    def plan(self) -> StagePlan:
        return self.local.plan

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """What callers give, without what the stage before sends."""
        captured = self.local.captured
        return captured.inputs[: len(captured.inputs) - len(captured.received)]

    def run(
        self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], draws: Draws, *, is_local: bool
    ) -> Sequence[Tensor]:
        """This rank's values of the graph's `ends`, for inputs by placeholder; what forward writes is written."""
        captured, leaves = self.local.captured, self.state.leaves
        arguments = {**self.constants, **received}
        for parameter in captured.parameters:
            arguments[parameter.placeholder] = leaves[self.stored[parameter.names[0]]].to(parameter.dtype)
        for buffer in captured.buffers:
            held = self.owner.get_buffer(buffer.names[0])
            arguments[buffer.placeholder] = held.clone() if buffer.mutated_by else held
        for given in self.inputs:
            value = inputs[given.placeholder]
            arguments[given.placeholder] = local_input(self.owner, self.plan, given, value, is_local=is_local)
        self.sink.begin()
        with ExitStack() as stack:
            stack.enter_context(use_groups(self.owner.groups))
            stack.enter_context(use_draws(draws))
            if torch.is_grad_enabled():
                stack.enter_context(use_sink(self.sink))
                stack.enter_context(regathering())
            results: tuple[Tensor, ...] = self.graph(*(arguments[name] for name in self.placeholders))
        count = len(captured.ends)
        with torch.no_grad():
            for spec, value in zip(captured.written, results[count:], strict=False):
                self._write(spec, value)
        self.state.keep_watch(results[:count])
        return results[:count]

    def _write(self, spec: BufferSpec | ParameterSpec, value: Tensor) -> None:
        if isinstance(spec, ParameterSpec):
            self.state.write(self.state.specs[self.stored[spec.names[0]]], value)
        else:
            self.owner.get_buffer(spec.names[0]).copy_(value)


class Variant:
    """A call of a module without stages. `returned`: what is around its tensors."""

    def __init__(self, part: Part, returned: Returned) -> None:
        self.part, self.returned, self.ends = part, returned, ends_of(part.local)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        return self.part.inputs

    def run(self, inputs: Mapping[str, Tensor], draws: Draws, outputs: str, *, is_local: bool) -> Any:
        """What the model returns for inputs by placeholder."""
        made = self.part.run(inputs, {}, draws, is_local=is_local)
        pairs = zip(made, self.ends, strict=True)
        return self.returned.holding([given_back(value, end, self.part.state, outputs) for value, end in pairs])


def ends_of(local: LocalModel) -> tuple[End, ...]:
    """What the graph returns before what it writes."""
    output = next(node for node in reversed(local.graph.nodes) if node.op == "output")
    nodes: Any = output.args[0]
    return tuple(
        (node.meta["layouts"][0], node.meta["global"][0], node.meta["val"].dtype)
        for node in nodes[: output.meta["ends"]]
    )


def given_back(value: Tensor, end: End, state: State, outputs: str) -> Tensor:
    """A rank's value as its caller has it."""
    layout, shape, _ = end
    if all_whole((layout,)) and (outputs != DTENSOR or not shape):
        return value
    own = _without_padding(value, layout, shape, state)
    if outputs == LOCAL:
        return own
    return to_dtensor(own, layout, shape, state.mesh, state.device_mesh)


def _without_padding(value: Tensor, layout: Layout, shape: tuple[int, ...], state: State) -> Tensor:
    """What a rank truly holds of a value that is padded to equal parts."""
    like = local_part(torch.empty(shape, device="meta"), layout, state.mesh, state.coordinate)
    for dim, size in enumerate(like.shape):
        if value.shape[dim] != size:
            value = value.narrow(dim, 0, size)
    return value
