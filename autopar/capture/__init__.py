"""What does a model compute? Its forward pass and loss as one normalised graph, traced without memory or device."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.capture.counted import Decisions, ReadError
from autopar.capture.decompose import decompose
from autopar.capture.expand import NotAlikeError, expand
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.grad_modes import grad_modes
from autopar.capture.gradient_hooks import check_hooks, keep_parameter_hooks, module_hooks
from autopar.capture.hidden_parts import check_parts
from autopar.capture.import_program import (
    import_program,
    stop_gradients,
    without_gradients,
    written_parameters,
)
from autopar.capture.loss import LossModule, OutputModule, unwatched
from autopar.capture.one_process import as_one_process
from autopar.capture.opaque import opaque_calls
from autopar.capture.own_functions import own_functions
from autopar.capture.python_state import (
    Change,
    Constants,
    Snapshot,
    UnknownChangeError,
    asked_begin,
    line_of_change,
    line_of_draw,
    next_begin,
)
from autopar.capture.questions import Questions
from autopar.capture.quiet import quiet
from autopar.capture.repeats import Repeat, few_layers, find_repeats
from autopar.capture.shared_memory import check_shared_memory
from autopar.capture.user_frame import files_of, user_frame
from autopar.capture.written import Written
from autopar.errors import AutoparError, CaptureError, TurningFlagError
from autopar.graph import CapturedModel, is_same_graph
from autopar.guards import BufferGuard
from autopar.inputs import flatten_inputs
from autopar.outputs import Returned
from autopar.passes.normalize import normalize

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
    name, state = captured.name, module.python
    if state.moved:
        where = line_of_draw(lambda: _run_on_fakes(model, module, tensors)) or name
        raise CaptureError(
            f"{where}: forward draws from {state.moved} random generator, which a captured graph would repeat at every "
            "call; draw from torch's, as a tensor"
        )
    if not state.changes:
        return
    constants, decisions = Constants(), Decisions()
    with suppress(Exception):
        _run_on_fakes(model, module, tensors, constants)
    changes = state.changes
    state.begin = begin = next_begin(changes, constants, decisions)
    try:
        _run_on_fakes(model, module, tensors)
    except ReadError:
        raise _changing(model, module, tensors, changes, decisions) from None
    except Exception as error:
        logger.info("%s: a second run on fake tensors failed: %s", name, error)
    finally:
        state.begin = []
    changing, known = list(state.changes), set[Any]().union(*(change.places for change in state.changes))
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
        more = [change for change in state.changes if id(change.holder) not in known and not change.places <= known]
        if more:  # which only this answer brought about
            changing, known = [*changing, *more], known.union(*(change.places for change in more))
            flips = (None,)
        else:
            flips = decisions.others if flips == (None,) else flips[1:]


def _changing(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    changes: Sequence[Change],
    decisions: Decisions,
) -> CaptureError:
    """What goes on changing, and where."""
    read = decisions.refused
    known = [change for change in changes if read is not None and read.label.startswith(change.label)]
    change = (known or list(changes))[0]
    where = line_of_change(lambda: _run_on_fakes(model, module, tensors), change) or type(model).__name__
    reads = "computes otherwise with it" if read is None else f"reads it ({read.where})"
    return CaptureError(
        f"{where}: {change}, and forward {reads}, so one graph cannot stand for the model; keep it in a buffer, and "
        "compute with that"
    )


def _run_on_fakes(
    model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], watched: Any = None
) -> None:
    """A run outside torch.export."""
    with _setting(model, module) as setting:
        inputs = new_inputs(setting.mode, tensors)
        with setting.mode, watched or nullcontext():
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
    if captured.guards:  # the buffers of layers that are left out have values of their own
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
        with _setting(model, module) as setting:
            inputs = new_inputs(setting.mode, tensors)
            with setting.mode:
                return find_repeats(model, lambda: module(*inputs))
    except Exception as error:
        logger.info("%s: every layer is traced, for a run on fake tensors failed: %s", type(model).__name__, error)
        return ()


def _trace(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    """The graph; traced again where parameters were found written that had no shadow from the beginning."""
    written = module.written = Written()
    while True:
        error: CaptureError | None = None
        try:
            captured = _traced_once(model, module, tensors, name)
        except CaptureError as found:
            error = found
        if written.found <= written.names:
            break
        written.names |= written.found
    if error is not None:
        raise error
    return captured


def _traced_once(
    model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str
) -> CapturedModel:
    questions = Questions(dict(model.named_buffers(remove_duplicate=False)))
    try:
        with _setting(model, module, questions) as setting:
            program = _export(module, new_inputs(setting.mode, tensors))
            module.written.found |= written_parameters(program)
    except AutoparError:
        raise
    except Exception as error:
        raise questions.refused or CaptureError(_explain(error, name, questions)) from error
    if questions.refused is not None:  # the model caught it
        raise questions.refused
    captured = normalize(
        import_program(
            program,
            name=name,
            model=model,
            inputs=tensors,
            opaques=setting.opaques,
            written=module.written,
            has_loss=module.has_loss,
        )
    )
    return _guarded(captured, model, questions.guards, turns=module.turns) if questions.guards else captured


def _guarded(captured: CapturedModel, model: nn.Module, places: Mapping[str, str], *, turns: bool) -> CapturedModel:
    """With the values that the model's answers depend on.

    Raises:
        TurningFlagError: if the step changes one, and none may turn.
    """
    changed = sorted(name for b in captured.buffers if b.mutated_by is not None for name in b.names if name in places)
    if changed and not turns:
        raise TurningFlagError(
            f"{places[changed[0]]}: forward decides on buffer {changed[0]}, which the step itself changes, so that one "
            "graph cannot stand for the model; if it is a flag that turns at the first batch, call the model on one "
            "before planning (`model(**batch)` in one process); if it changes at every step, compute with the tensor"
        )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return replace(captured, guards=tuple(BufferGuard.of(name, buffers[name]) for name in sorted(places)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What a run of the model for tracing takes place in."""

    mode: Any
    opaques: Any


@contextmanager
def _setting(model: nn.Module, module: LossModule, questions: Questions | None = None) -> Iterator[_Setting]:
    """Inside, the model runs on fake tensors as one process would, what export drops is kept, and what Python asks
    about values is answered."""
    questions = questions or Questions(dict(model.named_buffers(remove_duplicate=False)))
    module.watch = questions.asked
    before = Snapshot(module.python.reached(model))  # torch.export puts copies of containers in their place
    try:
        with (
            torch.random.fork_rng(devices=[]),
            as_one_process(),
            opaque_calls() as opaques,
            fake_twin(model) as mode,
            torch.set_grad_enabled(module.gradients),
            attention_as_written(),
            own_functions(),
            module_hooks(),
            grad_modes(),
        ):
            yield _Setting(mode=mode, opaques=opaques)
    finally:
        before.restore()
        module.watch = unwatched


@contextmanager
def attention_as_written() -> Iterator[None]:
    """Inside, torch's attention and encoder layers run op by op without gradients too, not as one kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _export(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    with quiet():
        program = torch.export.export(module, inputs, strict=False)
        stop_gradients(program)
        return decompose(program)


def _explain(error: Exception, name: str, questions: Questions) -> str:
    where = user_frame(error) or name
    first = str(error).strip().split("\n")[0] or type(error).__name__
    if any("eager_transforms" in frame for frame in files_of(error)):
        return (
            f"{where}: forward differentiates inside itself (torch.func), which is not captured; compute it "
            "by a formula of its own, or give the loss that needs it to a step outside"
        )
    if isinstance(error, GuardOnDataDependentSymNode) and questions.unsized:
        return (
            f"{questions.unsized}, so one graph cannot stand for the model; use a mask or torch.where, or pad to a "
            "fixed number (of repeat_interleave: give output_size)"
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{where}: Python control flow depends on the values of a tensor ({first}), so one graph cannot stand for "
            f"the model; use torch.where or a mask, or move the decision out of forward"
        )
    return (
        f"{where}: {name} cannot be traced: {type(error).__name__}: {first}; the forward must run on "
        "fake tensors: no .item(), .numpy() or file access, and inputs as in a real call"
    )
