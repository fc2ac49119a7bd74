"""Is the graph that is planned a foreign model? The captured graph against the module, then random plans against that.

Three training steps with different inputs and no optimizer: loss, every gradient (missing = zero), every buffer and
parameter after each step, in float64 (in float32 where the model does not run in float64, for instance grouped products
of experts), the default generator seeded alike before each step on both sides. Then random plans on four ranks,
threads of this process (`tests.plans_in_threads`), against the graph run whole.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopar.api.captures import captured_model
from autopar.capture.loss import accepted_inputs, find_loss, num_positional
from autopar.errors import AutoparError
from autopar.oracle.compare import FLOOR
from autopar.oracle.reference import buffers_of, parameters_of, run_captured
from autopar.passes.promote_casts import promote_casts
from autopar.search.known.random_plan import random_plan
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from tests.plans_in_threads import errors_of, one_process

STEPS = 3
MESHES = ((2, 2), (4,))
TIGHT, LOOSE = (1e-10, 1e-8), (1e-5, 1e-3)
"""Largest relative error of loss and gradients that rounding explains in float64, and where float32 is in the graph."""
LARGEST = 50_000_000
"""Parameters: larger ones do not fit beside their gradients on four ranks in the memory of a process."""
VERDICTS = ("equal", "refused", "wrong", "crashed", "slow", "left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A model in training mode, what makes one call's arguments (a tuple, or a mapping of keywords), and its loss."""

    model: nn.Module
    inputs: Callable[[], Any]
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """verdict: one of `VERDICTS`. said: what was seen, or the error. calls: of the graph, 0 where there is none."""

    verdict: str
    said: str
    calls: int = 0


def check(make: Callable[[], Foreign], plans: int = 2) -> Outcome:
    """The verdict on one model, with so many random plans. `make` is called again for each copy that is needed."""
    outcome = _check(make, plans, torch.float64)
    if outcome.verdict in ("left out", "refused"):  # perhaps only so: a dtype written into forward
        second = _check(make, plans, torch.float32)
        return outcome if second.verdict == "left out" else second
    return outcome


def _check(make: Callable[[], Foreign], plans: int, dtype: torch.dtype) -> Outcome:
    try:
        eager = _Eager(made(make, dtype), calls_of(make, dtype))
        if (size := sum(p.numel() for p in eager.foreign.model.parameters())) > LARGEST:
            return Outcome(verdict="left out", said=f"{size / 1e6:.0f} million parameters")
        before = {name: value.clone() for name, value in _state(eager.foreign.model).items()}
        seen = [eager.step(number) for number in range(STEPS)]
    except Exception as error:
        return Outcome(verdict="left out", said=f"{type(error).__name__}: {_first_line(error)}")
    if not all(step["loss"].isfinite().all() for step in seen):
        return Outcome(verdict="left out", said="the loss is not a number")
    precision = "fp64" if dtype is torch.float64 else "fp32"
    model, calls = made(make, dtype), calls_of(make, dtype)
    for name, value in _state(model.model).items():
        value.copy_(before[name])  # what `torch.empty` made is alike too
    try:
        captured, _ = captured_model(model.model, calls[0], precision, model.loss_fn)
    except AutoparError as error:
        return Outcome(verdict="refused", said=f"{type(error).__name__}: {_first_line(error)}")
    size = sum(node.op == "call_function" for node in captured.graph.nodes)
    changed = [name for name, value in _state(model.model).items() if not _same(value, before[name])]
    found = f"capture changed {changed[0]} of the model" if changed else _graph_error(captured, model, calls, seen)
    found = found or _plan_error(captured, model, calls[0], plans, precision)
    if not found:
        return Outcome(verdict="equal", said=precision, calls=size)
    noisy = ", draws noise" if _differs_by_seed(make, dtype, seen[0]) else ""
    return Outcome(verdict="wrong", said=f"{found} ({precision}{noisy})", calls=size)


class _Eager:
    """The module, unmodified, and what its steps give."""

    def __init__(self, foreign: Foreign, calls: list[Call]) -> None:
        self.foreign = foreign
        self.calls = calls

    def step(self, number: int, seed: int = 0) -> dict[str, Tensor]:
        """Loss, gradients and state after the step, by name."""
        model, call = self.foreign.model, self.calls[number]
        model.zero_grad(set_to_none=True)
        _seed(number, 100 * seed + number)
        loss = self._loss(call)
        loss.backward()  # type: ignore[no-untyped-call]
        named = dict(model.named_parameters(remove_duplicate=False))
        gradients = {
            f"gradient of {n}": torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
            for n, p in named.items()
            if p.requires_grad
        }
        return {"loss": loss.detach(), **gradients, **{n: v.clone() for n, v in _state(model).items()}}

    def _loss(self, call: Call) -> Tensor:
        model, loss_fn = self.foreign.model, self.foreign.loss_fn
        if loss_fn is None:
            return find_loss(model(*call.args, **call.kwargs))
        args, kwargs = accepted_inputs(model, call.args, call.kwargs)
        output = model(*args, **kwargs)
        batch = call.kwargs or call.args
        loss: Tensor = loss_fn(output) if num_positional(loss_fn) == 1 else loss_fn(output, batch)
        return loss


def _graph_error(captured: CapturedModel, model: Foreign, calls: list[Call], seen: list[dict[str, Tensor]]) -> str:
    """What of the graph's steps is not what was seen of the module, "" if nothing."""
    low = any(_is_low(node) for node in captured.graph.nodes)
    loss_tolerance, tolerance = LOOSE if low else TIGHT
    parameters = {n: p.detach().clone() for n, p in parameters_of(captured, model.model).items()}
    buffers = {n: b.detach().clone() for n, b in buffers_of(captured, model.model).items()}
    for number, want in enumerate(seen):
        for spec in captured.parameters:
            parameters[spec.placeholder] = parameters[spec.placeholder].detach().requires_grad_(spec.trainable)
        tensors = calls[number].tensors()
        inputs = {spec.placeholder: tensors[spec.path].clone() for spec in captured.inputs}
        _seed(number, number)
        loss, results = run_captured(captured, parameters, buffers, inputs)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        written = {name: value.detach() for name, value in results.items()}
        leaves = parameters
        parameters = {name: written.get(name, value) for name, value in parameters.items()}
        buffers = {name: written.get(name, value) for name, value in buffers.items()}
        errors = {"loss": (_error(loss.detach(), want["loss"], 0.0), loss_tolerance)}
        largest = max((_largest(v) for n, v in want.items() if n.startswith("gradient")), default=0.0)
        for spec in captured.parameters:
            got = leaves[spec.placeholder].grad
            for name in spec.names if spec.trainable else ():
                whole = want[f"gradient of {name}"]
                errors[f"gradient of {name}"] = (
                    _error(torch.zeros_like(whole) if got is None else got, whole, FLOOR * largest),
                    tolerance,
                )
            for name in spec.names:
                errors[name] = _error(parameters[spec.placeholder].detach(), want[name], 0.0), tolerance
        for buffer in captured.buffers:
            for name in buffer.names:
                errors[name] = _error(buffers[buffer.placeholder], want[name], 1e-12), tolerance
        wrong = {name: error for name, (error, limit) in errors.items() if not error <= limit}
        if wrong:
            name = "loss" if "loss" in wrong else max(wrong, key=lambda n: (wrong[n] != wrong[n], wrong[n]))
            return f"step {number}: {name} off by {wrong[name]:.1e}, {len(wrong)} of {len(errors)} tensors wrong"
    return ""


def _plan_error(captured: CapturedModel, model: Foreign, call: Call, plans: int, precision: str) -> str:
    """What of random plans is not the graph, "" if nothing: in float64 where its kernels have that."""
    try:
        promoted = promote_casts(captured)
        model.model._apply(lambda value: in_dtype(value, torch.float64))
        reference = one_process(promoted, model.model, call.in_dtype(torch.float64).tensors())
        captured, (loss_tolerance, tolerance) = promoted, TIGHT
    except RuntimeError:
        if precision == "fp64":
            raise
        model.model._apply(lambda value: in_dtype(value, torch.float32))
        reference, (loss_tolerance, tolerance) = one_process(captured, model.model, call.tensors()), LOOSE
    rng = random.Random(captured.name)
    for number in range(plans):
        shape = MESHES[number % len(MESHES)]
        plan = random_plan(captured, make_mesh(shape), rng)
        try:
            loss, gradient, name = errors_of(reference, plan)
        except AssertionError as error:
            return f"plan on {shape}: {_first_line(error)}"
        if not (loss <= loss_tolerance and gradient <= tolerance):
            return f"plan on {shape}: loss off by {loss:.1e}, gradient of {name} by {gradient:.1e}"
    return ""


def _differs_by_seed(make: Callable[[], Foreign], dtype: torch.dtype, seen: Mapping[str, Tensor]) -> bool:
    again = _Eager(made(make, dtype), calls_of(make, dtype)).step(0, seed=1)
    return any(not _same(value, seen[name]) for name, value in again.items())


def made(make: Callable[[], Foreign], dtype: torch.dtype) -> Foreign:
    """The model built under seed 0, in `dtype` and training mode."""
    _seed(0, 0)
    foreign = make()
    foreign.model._apply(lambda value: in_dtype(value, dtype)).train()
    return foreign


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


def calls_of(make: Callable[[], Foreign], dtype: torch.dtype) -> list[Call]:
    """The calls of the steps: the arguments of one model, made under a seed a step."""
    inputs = make().inputs
    calls = []
    for number in range(STEPS):
        _seed(1000 + number, 1000 + number)
        given = inputs()
        call = Call(kwargs=given) if isinstance(given, Mapping) else Call(args=tuple(given))
        calls.append(call.in_dtype(dtype))
    return calls


def _seed(number: int, default: int) -> None:
    """Python's and NumPy's generators by one seed, torch's default generator by another."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(default)


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in named}


def _is_low(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0)))


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _error(got: Tensor, want: Tensor, floor: float) -> float:
    """Largest difference, relative to the largest value (at least `floor`); inf where shapes differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not got.numel() or _same(got, want):
        return 0.0
    if not (got.is_floating_point() or got.is_complex()):
        return float("inf")
    return _largest(got - want) / max(_largest(want), floor, 1e-300)


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0][:400]
