"""Does the captured graph do what the module does? Compared once, on real numbers, before anything is planned."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, FidelityError
from autopar.oracle.compare import StepDifference, Tolerance, compare_steps, first_beyond, floor_of
from autopar.oracle.first_difference import first_difference
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.oracle.steps import Again, Arguments, TrainedStep, graph_steps, module_steps, other_samples
from autopar.values.graph import CapturedModel
from autopar.values.inputs import flatten_inputs

TOLERANCES = {
    torch.float64: Tolerance(loss=1e-9, gradient=1e-7),
    torch.float32: Tolerance(loss=1e-4, gradient=2e-3),
    torch.bfloat16: Tolerance(loss=2e-2, gradient=1e-1),
    torch.float16: Tolerance(loss=1e-2, gradient=5e-2),
}
"""What rounding explains, by the narrowest dtype of a trained parameter. Twice as large hides nothing that a dropped
term of the loss would not show; half as large calls deep models' float32 gradients different."""

COPIES = 6
"""How many times its tensors a check holds: values, what restores them, two sets of gradients, the graph's own."""


REMEDY = "write that part in operations that torch.export keeps; check=False (--no-check) plans the graph as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A module with values, its graph at the batch of the call, and the call."""

    model: nn.Module
    captured: CapturedModel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None = None
    again: Again | None = None
    """The graph where buffers that forward decides on have other values, by name."""

    @property
    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers by placeholder."""
        found = parameters_of(self.captured, self.model) | buffers_of(self.captured, self.model)
        return {name: tensor.detach() for name, tensor in found.items()}

    @property
    def tolerance(self) -> Tolerance:
        dtypes = {p.dtype for p in self.model.parameters()} & set(TOLERANCES)
        return TOLERANCES[min(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.float64)]

    def calls(self, count: int) -> list[Arguments]:
        return other_samples(self.args, self.kwargs, count)


def not_checkable(model: nn.Module, args: Any, kwargs: Any) -> str:
    """Why a module cannot be run for a comparison; empty if it can."""
    tensors = [*model.parameters(), *model.buffers()]
    inputs = [leaf for _, leaf in flatten_inputs(args, kwargs)[0] if isinstance(leaf, Tensor)]
    if any(t.is_meta for t in tensors):
        return "the model is on the meta device"
    if any(t.is_meta for t in inputs):
        return "the example inputs have no values"
    needed = COPIES * sum(t.numel() * t.element_size() for t in tensors if not t.is_sparse)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
    if tensors and tensors[0].device.type == "cpu" and needed > free:
        return f"that takes {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Steps of the module, and how far those of the graph are from them, all within tolerance."""

    steps: tuple[TrainedStep, ...]
    differences: tuple[StepDifference, ...]


def check_module(
    subject: Subject,
    num_calls: int = 2,
    tolerance: Tolerance | None = None,
    context: Callable[[], Any] = nullcontext,
) -> Checked:
    """Compare module and graph over `num_calls` steps with different inputs.

    Args:
        subject: what is compared.
        num_calls: how many steps, the first on the samples given.
        tolerance: what rounding explains, by default that of the module's dtype.
        context: entered around the module's forward.

    Raises:
        FidelityError: if they differ; names what differs, and the first line whose value or gradient does.
        CaptureError: if the module itself fails on the inputs.
    """
    calls, values = subject.calls(num_calls), subject.values
    module = module_steps(subject.model, subject.captured, calls, subject.loss_fn, context)
    try:
        graph = graph_steps(subject.captured, values, calls, subject.again)
    except CaptureError:
        raise
    except Exception as error:
        raise FidelityError(
            f"the captured graph of {type(subject.model).__name__} fails where the module itself runs: "
            f"{type(error).__name__}: {error}; {REMEDY}"
        ) from error
    floor = floor_of(p.dtype for p in subject.captured.parameters)
    differences = compare_steps(graph, module, floor)
    found = first_beyond(differences, tolerance or subject.tolerance)
    if found is None:
        return Checked(steps=module, differences=tuple(differences))
    raise FidelityError(_explain(subject, values, calls, found))


def _explain(subject: Subject, values: dict[str, Tensor], calls: list[Arguments], found: StepDifference) -> str:
    name = type(subject.model).__name__
    if found.step > 1:
        why = (
            "the calls before agreed: its forward keeps something from call to call that is no parameter or buffer "
            "(a Python attribute, a cache, a random generator of its own); make it a buffer"
        )
    else:
        place = first_difference(subject.model, subject.captured, values, calls[0], subject.loss_fn, found.kind)
        what = "gradient" if found.kind == "gradient" else "value"
        why = (f"the first {what} that differs is that of {place}; " if place else "") + REMEDY
    return f"the captured graph is not {name}: {found}; {why}"
