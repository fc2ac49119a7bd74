"""What does a model compute? Its forward pass and loss as one normalised graph, traced without memory or device."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor, nn

from autopar.capture.counted import Decisions, ReadError
from autopar.capture.expand import NotAlikeError, expand
from autopar.capture.fake_twin import new_inputs
from autopar.capture.gradient_hooks import check_hooks, keep_parameter_hooks
from autopar.capture.hidden_parts import check_parts
from autopar.capture.import_program import without_gradients
from autopar.capture.loss import LossModule, OutputModule
from autopar.capture.one_trace import setting, traced_once
from autopar.capture.python_state import (
    Constants,
    StateChange,
    UnknownChangeError,
    asked_begin,
    line_of_change,
    line_of_draw,
    next_begin,
)
from autopar.capture.repeats import Repeat, few_layers, find_repeats
from autopar.capture.shared_memory import check_shared_memory
from autopar.capture.written import Written
from autopar.errors import AutoparError, CaptureError
from autopar.values.graph import CapturedModel, is_same_graph
from autopar.values.inputs import flatten_inputs
from autopar.values.outputs import Returned

logger = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    name: str | None = None,
    repeats: tuple[Repeat, ...] | None = None,
    turns: bool = False,
) -> CapturedModel:
    """Trace `model(*args, **kwargs)` at the shapes given, in the mode (training or not) that the model is in.

    Args:
        model: on any device, the meta device included; it is not changed, and its activations are never allocated.
        args, kwargs: example inputs at the global batch; only shapes and dtypes of tensors are used, other values
            (`use_cache=False`) become constants of the graph.
        loss_fn: `loss_fn(output, batch)` or `loss_fn(output)`, see `LossModule`; without it the model must return its
            own loss (a `loss` field, or a scalar that depends on a parameter).
        name: of the captured model; its class name if not given.
        repeats: layers that need no tracing, as `alike_layers` of the model found them; found anew if not given.
        turns: forward may decide on buffers that it changes; whoever runs the graph captures another one then.

    Raises:
        NoLossError: if there is nothing to minimise.
        CaptureError: if torch.export cannot trace the model; names the line at fault.
    """
    name = name or type(model).__name__
    lazy = [path for path, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise CaptureError(f"{name} has parameters without a shape ({', '.join(lazy[:3])}); run its forward once first")
    check_parts(model)
    check_hooks(model)
    check_shared_memory(model)
    module, tensors = _call(model, args, kwargs, loss_fn)
    module.turns = turns
    captured = _captured(model, module, tensors, name, repeats)
    _check_state(model, module, tensors, captured, repeats)
    return keep_parameter_hooks(captured, model)


def capture_call(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    gradients: bool = True,
    wants_loss: bool = False,
    then: Callable[[Any, list[Tensor]], Any] | None = None,
    name: str | None = None,
) -> tuple[CapturedModel, Returned]:
    """Trace what `model(*args, **kwargs)` returns at the shapes given, in the mode that the model is in: the graph of
    its tensors, and the value around them.

    Args:
        model, args, kwargs, name: as of `capture`. Every layer is traced, for each may return something.
        loss_fn: a call with inputs that are for it alone returns the loss.
        wants_loss: any call returns the loss.
        then: made of the output, and of the keyword `FOLLOWING`, what is returned instead.
        gradients: whether anything gets some (`torch.is_grad_enabled()`).

    Raises:
        CaptureError: if torch.export cannot trace the model; names the line at fault.
    """
    name = name or type(model).__name__
    check_parts(model)
    check_hooks(model)
    check_shared_memory(model)
    named_leaves, rebuild = flatten_inputs(args, kwargs or {})
    tensors = [(path, leaf) for path, leaf in named_leaves if isinstance(leaf, Tensor)]
    module = OutputModule(model, [leaf for _, leaf in named_leaves], rebuild, loss_fn)
    module.gradients, module.wants_loss, module.turns, module.then = gradients, wants_loss, True, then
    captured = _captured(model, module, tensors, name, ())
    returned = module.returned
    _check_state(model, module, tensors, captured, ())
    return (keep_parameter_hooks(captured, model) if gradients else without_gradients(captured)), returned


def _check_state(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    captured: CapturedModel,
    repeats: tuple[Repeat, ...] | None,
) -> None:
    """Raises CaptureError if the next call would compute another graph, or if forward draws numbers outside torch."""
    for path, (changes, moved) in list(module.branches.left):
        module.branches.path = path
        if moved:
            where = line_of_draw(lambda: _run_on_fakes(model, module, tensors)) or captured.name
            raise CaptureError(
                f"{where}: forward draws from {moved} random generator, which a captured graph would repeat at every "
                "call; draw from torch's, as a tensor"
            )
        if changes:
            _check_next(model, module, tensors, captured, repeats)


def _check_next(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    captured: CapturedModel,
    repeats: tuple[Repeat, ...] | None,
) -> None:
    """Raises CaptureError if the call after one on this path would compute another graph."""
    name, state, path = captured.name, module.python, module.branches.path
    paths = [path for path, _ in module.branches.left]
    constants, decisions = Constants(), Decisions()
    with suppress(Exception):
        _run_on_fakes(model, module, tensors, constants)
    changes = state.changes
    state.begin = begin = next_begin(changes, constants, decisions)
    changing = list[StateChange]()
    for after in paths:
        module.branches.path = after
        try:
            _run_on_fakes(model, module, tensors)
        except ReadError:
            state.begin, module.branches.path = [], path
            raise _changing(model, module, tensors, changes, decisions) from None
        except Exception as error:
            logger.info("%s: a second run on fake tensors failed: %s", name, error)
        changing += state.changes
    state.begin = []
    known = set[Any]().union(*(change.places for change in changing))
    flips: tuple[int | None, ...] = (None,)
    while flips:
        reported = [next((c for c in changes if c.holder is again.holder), again) for again in changing] or changes
        decisions = Decisions(flipped=flips[0])
        begin = next_begin(changes, constants, decisions)
        try:
            begin += asked_begin(changing, state.reached(model), decisions)
            state.begin = begin
            is_same = is_same_graph(captured, _captured(model, module, tensors, name, repeats))
        except (ReadError, UnknownChangeError):
            is_same = False
        finally:
            state.begin = []
        if not is_same or decisions.refused is not None:
            raise _changing(model, module, tensors, reported, decisions)
        left = [change for _, (found, _) in module.branches.left for change in found]
        more = [change for change in left if id(change.holder) not in known and not change.places <= known]
        if more:  # which only this answer brought about
            changing, known = [*changing, *more], known.union(*(change.places for change in more))
            flips = (None,)
        else:
            flips = decisions.others if flips == (None,) else flips[1:]


def _changing(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    changes: Sequence[StateChange],
    decisions: Decisions,
) -> CaptureError:
    """What goes on changing, and where."""
    read = decisions.refused
    known = [change for change in changes if read is not None and read.label.startswith(change.label)]
    change = (known or list(changes))[0]
    where = line_of_change(lambda: _run_on_fakes(model, module, tensors), change)
    where = where or (type(model).__name__ if read is None else read.where)
    reads = "computes otherwise with it" if read is None else f"reads it ({read.where})"
    return CaptureError(
        f"{where}: {change}, and forward {reads}, so one graph cannot stand for the model; keep it in a buffer, and "
        "compute with that"
    )


def _run_on_fakes(
    model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], watched: Any = None
) -> None:
    """A run outside torch.export."""
    with setting(model, module) as inside:
        inputs = new_inputs(inside.mode, tensors)
        with inside.mode, watched or nullcontext():
            module(*inputs)


def _captured(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    name: str,
    repeats: tuple[Repeat, ...] | None,
) -> CapturedModel:
    if repeats is None:
        repeats = _repeats(model, module, tensors)
    with few_layers(model, repeats):
        captured = _trace(model, module, tensors, name)
    if not repeats:
        return captured
    if captured.guards or len(module.branches.left) > 1:  # layers that are left out have values of their own
        return _trace(model, module, tensors, name)
    try:
        if any(parameter.mutated_by for parameter in captured.parameters):
            raise NotAlikeError("forward writes parameters")
        return expand(captured, repeats, model)
    except NotAlikeError as error:
        logger.info("%s: every layer is traced, for %s", name, error)
        return _trace(model, module, tensors, name)


def alike_layers(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Repeat, ...]:
    """The layers of a model, called as for `capture`, that need no tracing. Half of a deep model's capture or less."""
    module, tensors = _call(model, args, kwargs, loss_fn)
    return _repeats(model, module, tensors)


def _call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, loss_fn: Callable[..., Any] | None
) -> tuple[LossModule, list[tuple[str, Tensor]]]:
    """The model with its loss, and the tensors that it takes."""
    named_leaves, rebuild = flatten_inputs(args, kwargs or {})
    tensors = [(path, leaf) for path, leaf in named_leaves if isinstance(leaf, Tensor)]
    return LossModule(model, [leaf for _, leaf in named_leaves], rebuild, loss_fn), tensors


def _repeats(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]]) -> tuple[Repeat, ...]:
    """The layers that need no tracing; none where the model does not run on fake tensors outside torch.export."""
    try:
        with setting(model, module) as inside:
            inputs = new_inputs(inside.mode, tensors)
            with inside.mode:
                return find_repeats(model, lambda: module(*inputs))
    except Exception as error:
        logger.info("%s: every layer is traced, for a run on fake tensors failed: %s", type(model).__name__, error)
        return ()


def _trace(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    """The graph, the same on all paths through the model."""
    module.written = Written()
    first: list[str] = []

    def traced() -> CapturedModel:
        captured = _traced(model, module, tensors, name)
        if isinstance(module, OutputModule):
            first.append(repr(module.returned.rebuild(list(module.returned.leaves))))
            if first[-1] != first[0]:
                raise CaptureError(f"{name}: what forward returns depends on the values of a tensor")
        return captured

    try:
        return module.branches.explore(traced, lambda: (module.python.changes, module.python.moved))
    except CaptureError as error:
        raise module.turning or error from error


def _traced(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    """The graph of one path; traced again where that found what a trace must know from the beginning: parameters that
    are written, modules that compute with numbers, buffers that change."""
    written = module.written
    while True:
        error: AutoparError | None = None
        before = set(written.names), len(module.shadows.tables), set(module.changing)
        try:
            captured = traced_once(model, module, tensors, name)
        except AutoparError as found:
            error = found
        written.names |= written.found
        if before == (written.names, len(module.shadows.tables), module.changing):
            break
    if error is not None:
        raise error
    return captured
