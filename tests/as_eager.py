"""Is a captured graph the eager module, step after step, and is a sharded plan the graph?

Three steps of SGD on different inputs: loss, every gradient (missing is zero), every buffer and parameter after the
step. Then random plans, their ranks threads of this process.
"""

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.loss import find_loss
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.search.known.random_plan import random_plan
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs
from autopar.values.mesh import make_mesh
from tests.plans_in_threads import errors_of, one_process

LEARNING_RATE = 0.1
MESHES = ((2,), (4,), (2, 2))


def assert_as_eager(model: nn.Module, kwargs: dict[str, Any], *, steps: int = 3) -> CapturedModel:
    """The graph of `model`, which is left as it was, with values in float64."""
    captured = capture(model, (), kwargs)
    eager = copy.deepcopy(model)
    for own, twin in zip(model.parameters(), eager.parameters(), strict=True):
        twin._backward_hooks = own._backward_hooks
    parameters = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        for name, value in parameters_of(captured, model).items()
    }
    buffers = {name: value.detach().clone() for name, value in buffers_of(captured, model).items()}
    for step in range(steps):
        batch = {name: _other(value, step) for name, value in kwargs.items()}
        expected = find_loss(eager(**batch))
        expected.backward()  # type: ignore[no-untyped-call]
        loss, new = run_captured(captured, parameters, buffers, bind_inputs(captured.inputs, (), batch))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, expected, msg=lambda text: f"step {step}: loss: {text}")  # noqa: B023
        leaves = dict(eager.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in new.items():
                (parameters if name in parameters else buffers)[name].copy_(value)
            for spec in captured.parameters:
                leaf, found = leaves[spec.names[0]], parameters[spec.placeholder]
                if spec.trainable:
                    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in (found, leaf)]
                    torch.testing.assert_close(*gradients, msg=lambda text: f"gradient of {spec.names[0]}: {text}")  # noqa: B023
                    for parameter, gradient in zip((found, leaf), gradients, strict=True):
                        parameter -= LEARNING_RATE * gradient
                        parameter.grad = None
                torch.testing.assert_close(found, leaf.detach(), msg=lambda text: f"{spec.names[0]}: {text}")  # noqa: B023
            for name, buffer in buffers_of(captured, eager).items():
                torch.testing.assert_close(buffers[name], buffer)
    return captured


def assert_shards_as_whole(
    captured: CapturedModel, model: nn.Module, kwargs: dict[str, Any], *, plans: int = 3
) -> None:
    """Random plans give the loss, gradients and bytes of the graph on one process."""
    reference = one_process(captured, model, kwargs)
    rng = random.Random(0)
    for number in range(plans):
        plan = random_plan(captured, make_mesh(MESHES[number % len(MESHES)]), rng)
        loss_error, gradient_error, name = errors_of(reference, plan)
        assert loss_error <= 1e-10, f"plan {number} on {plan.mesh}: loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"plan {number} on {plan.mesh}: gradient of {name} off by {gradient_error}"


def _other(value: Any, step: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.roll(step, 0) * (1 + 0.3 * step) if value.is_floating_point() else value.roll(step, 0)
