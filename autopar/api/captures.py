"""What does a call of a model compute in a precision? Its graph at the batch sizes that a search asks for.

With every size the same layers are alike, which is found once where another capture can do without.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from autopar.capture import alike_layers, capture
from autopar.capture.repeats import Repeat
from autopar.capture.shared_memory import check_shared_memory
from autopar.errors import CaptureError, PlanMismatchError
from autopar.oracle.reference import buffers_of, parameters_of
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.values.calls import Call
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.precision import PRECISIONS, Precision, computed_twin, has_dtype, with_storage


@dataclass(slots=True, kw_only=True)
class Captures:
    """The graphs of a model by batch size. bare: what the model was last seen to return, see `Call`. known: the graph
    of the call, if it was captured before, and the call as it was seen."""

    model: nn.Module
    call: Call
    precision: str
    loss_fn: Callable[..., Any] | None = None
    bare: bool = False
    turns: bool = False
    known: tuple[CapturedModel, Call] | None = None
    _layers: tuple[Repeat, ...] | None = None

    def at(self, size: int | None) -> CapturedModel:
        """The graph of so many samples, None for those of the call, whatever was found before at another size."""
        own = self.call if size is None else self.call.with_batch(size)
        captured, seen = self._captured(own, self._layers if own is self.call else None)
        self.bare = seen.bare
        return captured

    def sharing(self) -> Callable[[int], CapturedModel]:
        """`at`, but for the layers that are alike: those that are in the call's own batch, which is found now."""
        if self._layers is None:
            model, call = computed_model(self.model, self.call, PRECISIONS[self.precision])
            self._layers = alike_layers(model, call.args, call.kwargs, loss_fn=self.loss_fn)
        return lambda size: self._captured(self.call.with_batch(size), self._layers)[0]

    def microbatch(self, count: int) -> tuple[CapturedModel, Call]:
        """The graph of one of so many micro-batches, and the call with what it was seen to return."""
        if count == 1 and self.known is not None:
            return self.known
        return captured_model(self.model, self.call, self.precision, self.loss_fn, count, turns=self.turns)

    def _captured(self, call: Call, layers: tuple[Repeat, ...] | None) -> tuple[CapturedModel, Call]:
        if call is self.call and self.known is not None:
            return self.known
        return captured_model(self.model, call, self.precision, self.loss_fn, layers=layers, turns=self.turns)


def captured_model(
    model: nn.Module,
    call: Call,
    precision: str,
    loss_fn: Callable[..., Any] | None = None,
    microbatches: int = 1,
    *,
    layers: tuple[Repeat, ...] | None = None,
    turns: bool = False,
) -> tuple[CapturedModel, Call]:
    """The graph of a micro-batch in a precision, and the call (of the global batch) with what it was seen to return.

    layers: of the model, known to be alike. turns: as for `capture`.
    """
    dtypes = PRECISIONS[precision]
    computed, whole = computed_model(model, call, dtypes)
    part = whole.microbatch(microbatches)
    seen = _Seen(bare=loss_fn is not None)
    watch = computed.register_forward_hook(seen)
    try:
        captured = capture(computed, part.args, part.kwargs, loss_fn=loss_fn, repeats=layers, turns=turns)
    finally:
        watch.remove()
    captured = accumulate_gradients(
        captured, microbatches, lambda: capture(computed, whole.args, whole.kwargs, loss_fn=loss_fn)
    )
    return with_storage(captured, dtypes), replace(call, bare=seen.bare)


@contextmanager
def as_it_is_now(model: nn.Module, modes: Mapping[str, bool], buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model's parts are in these modes (training or not), and its buffers have these values, by name."""
    parts = dict(model.named_modules(remove_duplicate=False))
    before = {name: module.training for name, module in parts.items()}
    held: list[tuple[nn.Module, str, Tensor | None]] = []
    try:
        for name, mode in modes.items():
            parts[name].training = mode
        for name, value in buffers.items():
            path, _, own = name.rpartition(".")
            held.append((parts[path], own, parts[path]._buffers[own]))
            parts[path]._buffers[own] = value.detach()
        yield
    finally:
        for name, mode in before.items():
            parts[name].training = mode
        for module, own, tensor in held:
            module._buffers[own] = tensor


@dataclass(slots=True)
class _Seen:
    """A forward hook that sees whether a model returns a tensor."""

    bare: bool

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.bare = self.bare or isinstance(output, Tensor)


def computed_model(model: nn.Module, call: Call, dtypes: Precision) -> tuple[nn.Module, Call]:
    """Model and call in the dtype that is computed in."""
    if has_dtype(model, dtypes.compute):
        return model, call
    check_shared_memory(model)  # a twin shares none
    return computed_twin(model, dtypes), call.in_dtype(dtypes.compute)


def captured_for(
    plan: Plan, model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None
) -> tuple[CapturedModel, Call]:
    """The graph that a plan is for, and the call with what it was seen to return.

    Raises:
        PlanMismatchError: if the model does not run as it was planned.
    """
    try:
        return captured_model(model, call, plan.config.precision, loss_fn, plan.microbatches, turns=True)
    except CaptureError as error:
        shapes = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in call.tensors().items())
        raise PlanMismatchError(
            f"this plan was made for {plan.model} called with {shapes}; the model at hand does not run so: {error}; "
            "plan again for this model"
        ) from error


def values_of(captured: CapturedModel, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by placeholder, in the dtypes that are stored."""
    specs = [(p.placeholder, p.storage) for p in captured.parameters]
    specs += [(b.placeholder, b.dtype) for b in captured.buffers]
    values = {**parameters_of(captured, model), **buffers_of(captured, model)}
    return {name: values[name].detach().to(dtype) for name, dtype in specs}
