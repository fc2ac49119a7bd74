"""Which line of the model computes what the graph does not? The first call whose value, or gradient, the graph lacks.

Every result of the eager module and every value of the graph has a mark that does not depend on how it is viewed: its
number of elements, their sum and their sum of squares. Rewrites leave out values (a fused projection that is split),
but what follows from them is there again. The culprit is the first call, in the order of execution, whose mark the
graph lacks together with those of everything that follows from it; for gradients, backwards from the loss.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name

from autopar.capture.user_frame import innermost
from autopar.oracle.steps import SEED, Arguments, module_loss
from autopar.oracle.unchanged import unchanged
from autopar.values.graph import CapturedModel
from autopar.values.inputs import bind_inputs

Mark = tuple[int, float, float]


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call of torch in the eager module. sources: calls whose results it reads; marks of its result and gradient."""

    name: str
    where: str
    sources: list["_Call"]
    value: Mark
    gradient: Mark | None = None


@dataclass(slots=True)
class _Recorder(TorchFunctionMode):
    """Every call of the eager module with a floating result, in order."""

    calls: list[_Call] = field(default_factory=list)
    made_by: dict[int, _Call] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in _tensors(result) if t.is_floating_point() or t.is_complex()]
        if not tensors or getattr(func, "__name__", "") in ("__get__", "detach_", "requires_grad_", "backward"):
            return result
        sources = [self.made_by[id(t)] for t in _tensors((args, kwargs or {})) if id(t) in self.made_by]
        for tensor in tensors:
            call = _Call(name=_name(func), where=_where(), sources=sources, value=mark(tensor))
            self.calls.append(call)
            self.made_by[id(tensor)] = call
            self.kept.append(tensor)  # an id is its own while the tensor lives
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(_gradient_of(call))  # type: ignore[no-untyped-call]
        return result


def first_difference(
    model: nn.Module,
    captured: CapturedModel,
    values: Mapping[str, Tensor],
    call: Arguments,
    loss_fn: Callable[..., Any] | None,
    kind: str,
) -> str:
    """`torch.mul at file.py:12`, of the first call of the module whose value (kind `loss` or `state`) or whose
    gradient (kind `gradient`) the graph does not have; empty if there is none to tell.

    Args:
        model, captured, values, call, loss_fn: as for `module_steps` and `graph_steps`.
        kind: what was seen to differ.
    """
    args, kwargs = call
    with unchanged(model):
        recorder = _Recorder()
        loss = module_loss(model, args, kwargs, loss_fn, SEED, lambda: recorder)
        loss.backward()  # type: ignore[no-untyped-call]
    own = _GraphMarks(captured)
    own.run_on(values, bind_inputs(captured.inputs, args, kwargs))
    if kind == "gradient":
        found = _last_without(recorder.calls, own.gradients)
    else:
        found = _first_without(recorder.calls, own.values)
    return f"{found.name} at {found.where}" if found is not None else ""


def mark(tensor: Tensor) -> Mark:
    wide = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    wide = wide.to(torch.float64)
    return tensor.numel(), float(wide.sum()), float((wide * wide).sum())


class _Marks:
    """A set of marks that knows equal ones up to rounding."""

    def __init__(self) -> None:
        self.by_size: dict[int, list[tuple[float, float]]] = {}

    def add(self, one: Mark) -> None:
        self.by_size.setdefault(one[0], []).append(one[1:])

    def __contains__(self, one: Mark) -> bool:
        total, squares = one[1:]
        near = 1e-4 * (abs(squares) ** 0.5 + abs(total)) + 1e-12
        return any(
            abs(other - total) <= near and abs(square - squares) <= 1e-4 * abs(squares) + 1e-12
            for other, square in self.by_size.get(one[0], ())
        )


class _GraphMarks(fx.Interpreter):
    """Marks of all values and gradients of a graph."""

    def __init__(self, captured: CapturedModel) -> None:
        super().__init__(fx.GraphModule(nn.Module(), captured.graph), garbage_collect_values=False)
        self.captured = captured
        self.values, self.gradients = _Marks(), _Marks()

    def run_on(self, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Forward and backward of one step."""
        device = next((v.device for v in values.values()), torch.device("cpu"))
        given = {
            name: t.detach().clone().to(device)
            for name, t in (dict(values) | dict(self.captured.constants) | dict(inputs)).items()
        }
        for spec in self.captured.parameters:
            given[spec.placeholder].requires_grad_(spec.trainable)
        torch.manual_seed(SEED)
        names = [node.name for node in self.captured.graph.nodes if node.op == "placeholder"]
        with torch.enable_grad():
            loss, *_ = self.run(*(given[name] for name in names))
            if loss.requires_grad:
                loss.backward()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for tensor in _tensors(result):
            if tensor.is_floating_point() or tensor.is_complex():
                self.values.add(mark(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self.gradients.add(mark(gradient)))  # type: ignore[no-untyped-call]
        return result


def _first_without(calls: Sequence[_Call], known: _Marks) -> _Call | None:
    """The first call of whose result, and of what follows from it, nothing is known."""
    followed: set[int] = set()  # calls from which something known follows
    for call in reversed(calls):
        if call.value in known or id(call) in followed:
            followed |= {id(source) for source in call.sources}
            followed.add(id(call))
    return next((call for call in calls if id(call) not in followed), None)


def _last_without(calls: Sequence[_Call], known: _Marks) -> _Call | None:
    """The last call of whose gradient, and of those of what it reads, nothing is known."""
    led: set[int] = set()
    for call in calls:
        if (
            call.gradient is None
            or call.gradient in known
            or any(id(source) in led and source.gradient is not None for source in call.sources)
        ):
            led.add(id(call))
    return next((call for call in reversed(calls) if id(call) not in led), None)


def _gradient_of(call: _Call) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        call.gradient = mark(gradient)

    return note


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided and not value.is_meta else []
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []


def _name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def _where() -> str:
    """File and line of the user's own code that is running."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return innermost(frames[::-1]) or "a line of a library"
