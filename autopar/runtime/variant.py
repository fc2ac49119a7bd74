"""How does a rank run a call that is not the planned step? Its graph, on the module's own parameters and buffers."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from autopar.graph import BufferSpec, LocalModel, ParameterSpec
from autopar.ops.buckets import use_sink
from autopar.ops.groups import use_groups
from autopar.ops.random import use_draws
from autopar.ops.regather import regathering
from autopar.outputs import Returned
from autopar.passes.call_natively import call_natively
from autopar.passes.fuse_collectives import fuse_collectives
from autopar.passes.recompute import again_graph
from autopar.placement import Layout
from autopar.plan import Plan
from autopar.runtime.data import local_input
from autopar.runtime.groups import build_groups, flattened_axes
from autopar.runtime.parameters import local_part, padded_part, to_dtensor
from autopar.runtime.state import all_whole

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule

DTENSOR, LOCAL, WHOLE = "dtensor", "local", "whole"
"""How a call returns a tensor that ranks share out: as a DTensor, this rank's part of it, or gathered on every rank."""


class Variant:
    """One graph of a module, made on all ranks together. `returned`: what is around its tensors."""

    def __init__(self, module: "DistributedModule", local: LocalModel, returned: Returned) -> None:
        self.local, self.returned, self.module = local, returned, module
        captured, plan = local.captured, local.plan
        _, own = build_groups(plan.mesh, module.device.type, flattened_axes(local.graph, plan.mesh))
        module.groups.groups.update(own.groups)
        graph = fuse_collectives(again_graph(local.graph), captured.parameters, plan)
        self.graph = fx.GraphModule(nn.Module(), call_natively(graph))
        self.placeholders = tuple(node.name for node in self.graph.graph.nodes if node.op == "placeholder")
        self.stored = {name: spec.placeholder for spec in module.local.captured.parameters for name in spec.names}
        coordinate = module.state.coordinate
        self.constants = {
            name: padded_part(value.to(module.device), plan.layouts[name], plan.mesh, coordinate)
            for name, value in captured.constants.items()
        }
        self.ends = _ends(local)

    @property
    def plan(self) -> Plan:
        return self.local.plan

    def run(self, inputs: Mapping[str, Tensor], outputs: str, *, is_local: bool) -> Any:
        """What the model returns for inputs by placeholder."""
        module, captured = self.module, self.local.captured
        leaves = module.state.leaves
        arguments = dict(self.constants)
        for parameter in captured.parameters:
            leaf = leaves[self.stored[parameter.names[0]]]
            arguments[parameter.placeholder] = leaf.to(parameter.dtype)
        for buffer in captured.buffers:
            arguments[buffer.placeholder] = module.get_buffer(buffer.names[0]).clone()
        for given in captured.inputs:
            value = inputs[given.placeholder]
            arguments[given.placeholder] = local_input(module, self.plan, given, value, is_local=is_local)
        module.sink.begin()
        with ExitStack() as stack:
            stack.enter_context(use_groups(module.groups))
            stack.enter_context(use_draws(module.next_draws(1)[0]))
            if torch.is_grad_enabled():
                stack.enter_context(use_sink(module.sink))
                stack.enter_context(regathering())
            results = self.graph(*(arguments[name] for name in self.placeholders))
        made, written = results[: len(self.ends)], results[len(self.ends) :]
        with torch.no_grad():
            for spec, value in zip(captured.written, written, strict=False):
                self._write(spec, value)
        return self.returned.holding([self._returned(v, *end, outputs) for v, end in zip(made, self.ends, strict=True)])

    def _write(self, spec: BufferSpec | ParameterSpec, value: Tensor) -> None:
        if isinstance(spec, ParameterSpec):
            stored = self.module.state.specs[self.stored[spec.names[0]]]
            self.module.state.write(stored, value)
        else:
            self.module.get_buffer(spec.names[0]).copy_(value)

    def _returned(self, value: Tensor, layout: Layout, shape: tuple[int, ...], outputs: str) -> Tensor:
        """A rank's value as its caller has it."""
        mesh, state = self.plan.mesh, self.module.state
        if all_whole((layout,)):
            if outputs != DTENSOR or not shape:
                return value
            return to_dtensor(value, layout, shape, mesh, state.device_mesh)
        own = _without_padding(value, layout, shape, self.plan, state.coordinate)
        if outputs == LOCAL:
            return own
        whole = to_dtensor(own, layout, shape, mesh, state.device_mesh)
        return whole.full_tensor() if outputs == WHOLE else whole


def _ends(local: LocalModel) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
    """Layout and global shape of what the graph returns."""
    output = next(node for node in reversed(local.graph.nodes) if node.op == "output")
    nodes: Any = output.args[0]
    return tuple((node.meta["layouts"][0], node.meta["global"][0]) for node in nodes[: output.meta["ends"]])


def _without_padding(
    value: Tensor, layout: Layout, shape: tuple[int, ...], plan: Plan, coordinate: tuple[int, ...]
) -> Tensor:
    """What a rank truly holds of a value that is padded to equal parts."""
    like = local_part(torch.empty(shape, device="meta"), layout, plan.mesh, coordinate)
    for dim, size in enumerate(like.shape):
        if value.shape[dim] != size:
            value = value.narrow(dim, 0, size)
    return value
