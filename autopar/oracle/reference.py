"""What is the right answer? The captured graph run whole on one process, on real tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from autopar.values.graph import CapturedModel


def run_captured(
    captured: CapturedModel,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the new value of every buffer and parameter that is written; all mappings are by placeholder.

    Parameters are cast to what the graph computes on.

    Of a micro-batch's graph with a count of labels, that count is the value under its node's name.

    Differentiable: gradients of the loss reach the tensors given as parameters. Constants follow the device of the
    inputs (of the parameters, if there are no inputs).
    """
    device = next(iter((*inputs.values(), *parameters.values()))).device
    constants = {name: value.to(device) for name, value in captured.constants.items()}
    computed = {p.placeholder: parameters[p.placeholder].to(p.dtype) for p in captured.parameters}
    values = {**computed, **buffers, **constants, **inputs}
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    module = fx.GraphModule(nn.Module(), captured.graph)
    outputs: tuple[Any, ...] = module(*(values[name] for name in placeholders))
    mutated = [spec.placeholder for spec in captured.written]
    accumulation = captured.accumulation
    counted = [accumulation.count] if accumulation is not None and accumulation.count is not None else []
    return outputs[0], dict(zip((*mutated, *counted), outputs[1:], strict=True))


def parameters_of(captured: CapturedModel, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by placeholder."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {spec.placeholder: named[spec.names[0]] for spec in captured.parameters}


def buffers_of(captured: CapturedModel, model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers by placeholder."""
    named = dict(model.named_buffers(remove_duplicate=False))
    return {spec.placeholder: named[spec.names[0]] for spec in captured.buffers}
