"""What do the same steps do on one process? The captured graph's, where the module itself cannot say it: with numbers
drawn by step and site, or on the device of the ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ops.random import Draws, use_draws
from autopar.oracle import TrainedStep
from autopar.oracle.reference import run_captured
from autopar.runtime.accumulate import total_loss
from autopar.values.graph import Accumulation, BufferSpec, CapturedModel, ParameterSpec, is_random

SEED = 1
"""Of the random numbers of a verified step."""


def draws(captured: CapturedModel) -> bool:
    """Whether a step draws random numbers: of each micro-batch others, so that only the same parts can be compared."""
    return any(is_random(node) for node in captured.graph.nodes)


def reference_steps(captured: CapturedModel, tensors: Mapping[str, Any], device: torch.device) -> list[TrainedStep]:
    """Steps of one process, on the CPU again."""
    values = {name: t.to(device) for name, t in tensors["values"].items()}
    specs: tuple[ParameterSpec | BufferSpec, ...] = (*captured.parameters, *captured.buffers)
    names = {spec.placeholder: spec.names[0] for spec in specs}
    steps = []
    for number, given in enumerate(tensors["inputs"]):
        inputs = {name: t.to(device) for name, t in given.items()}
        loss, gradients, written = reference_gradients(captured, values, inputs, number)
        values.update(written)
        steps.append(
            TrainedStep(
                loss=loss.cpu(),
                gradients={names[name]: gradient.cpu() for name, gradient in gradients.items()},
                state={names[name]: value.cpu().clone() for name, value in values.items()},
            )
        )
    return steps


def reference_gradients(
    captured: CapturedModel, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor], number: int = 0
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, the gradient of every trainable parameter, and what the step writes, by placeholder, on one process.

    Of a micro-batch's graph: of the step, its micro-batches one after the other. number: of the step, from 0 on.
    """
    trainable = {p.placeholder for p in captured.parameters if p.trainable}
    parameters = {p.placeholder: values[p.placeholder].detach().clone() for p in captured.parameters}
    for name in trainable:
        parameters[name].requires_grad_()
    buffers = {b.placeholder: values[b.placeholder].clone() for b in captured.buffers}
    accumulation = captured.accumulation or Accumulation(microbatches=1, weight=1.0)
    losses, counts, written = [], [], dict[str, Tensor]()
    for part, given in enumerate(_parts(inputs, accumulation.microbatches)):
        step = number * accumulation.microbatches + part
        with use_draws(Draws(seed=SEED, step=step, exact=True)):
            loss, results = run_captured(captured, parameters, buffers, given)
        losses.append(loss)
        counts += [] if accumulation.count is None else [results[accumulation.count]]
        written |= {name: value.detach() for name, value in results.items() if name in values}
        buffers |= {name: value for name, value in written.items() if name in buffers}
    loss = losses[0] if captured.accumulation is None else total_loss(accumulation, losses, counts)
    torch.autograd.backward(loss)
    gradients = {
        name: torch.zeros_like(parameters[name]) if (grad := parameters[name].grad) is None else grad
        for name in sorted(trainable)
    }
    return loss.detach(), gradients, written


def _parts(inputs: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    pieces = {name: value.chunk(count) if value.dim() else (value,) * count for name, value in inputs.items()}
    for i in range(count):
        yield {name: values[i] for name, values in pieces.items()}
