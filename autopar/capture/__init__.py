"""What does a model compute? Its forward pass and loss as one normalised graph, traced without memory or device."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.capture.counted import Decisions
from autopar.capture.decompose import decompose
from autopar.capture.expand import NotAlikeError, expand
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.grad_modes import grad_modes
from autopar.capture.gradient_hooks import check_hooks, keep_parameter_hooks, module_hooks
from autopar.capture.hidden_parts import check_parts
from autopar.capture.import_program import import_program, stop_gradients, written_parameters
from autopar.capture.loss import LossModule, unwatched
from autopar.capture.moved_modules import moved_modules
from autopar.capture.one_process import as_one_process
from autopar.capture.opaque import opaque_calls
from autopar.capture.own_functions import own_functions
from autopar.capture.python_state import Change, Constants, Snapshot, drawn_at, next_begin
from autopar.capture.questions import Questions
from autopar.capture.repeats import Repeat, few_layers, find_repeats
from autopar.capture.shared_memory import check_shared_memory
from autopar.capture.symmetric_checks import symmetric_checks
from autopar.capture.user_frame import files_of, raising_frame, user_frame
from autopar.capture.written import Written
from autopar.errors import AutoparError, CaptureError
from autopar.graph import CapturedModel, is_same_graph
from autopar.guards import BufferGuard
from autopar.inputs import flatten_inputs
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
    captured = _captured(model, module, tensors, name, repeats)
    _check_state(model, module, tensors, captured, repeats)
    return keep_parameter_hooks(captured, model)


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
            where = drawn_at(lambda: _run_on_fakes(model, module, tensors)) or captured.name
            raise CaptureError(
                f"{where}: forward draws from {moved} random generator, which a captured graph would repeat at every "
                "call; draw from torch's, as a tensor"
            )
        if not changes:
            continue
        constants = Constants()
        with suppress(Exception):
            _run_on_fakes(model, module, tensors, constants)
        changes, decisions = module.python.changes, Decisions()
        if not _stays(model, module, tensors, captured, repeats, next_begin(changes, constants, decisions)):
            raise _changing(changes[0])
        for other in decisions.others:
            decisions = Decisions(flipped=other)
            if not _stays(model, module, tensors, captured, repeats, next_begin(changes, constants, decisions)):
                raise _changing(changes[0])


def _stays(
    model: nn.Module,
    module: LossModule,
    tensors: Sequence[tuple[str, Tensor]],
    captured: CapturedModel,
    repeats: tuple[Repeat, ...] | None,
    begin: list[Change],
) -> bool:
    """Whether a call that begins with other attributes computes what `captured` does."""
    module.python.begin = begin
    try:
        return is_same_graph(captured, _captured(model, module, tensors, captured.name, repeats))
    finally:
        module.python.begin = []


def _changing(change: Change) -> CaptureError:
    return CaptureError(
        f"{change.where()} changes from call to call ({change.was!r}, then {change.value!r}), and forward computes "
        "otherwise with it, which one graph does not; keep it in a buffer, and compute with that"
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
        with _setting(model, module) as setting:
            inputs = new_inputs(setting.mode, tensors)
            with setting.mode:
                return find_repeats(model, lambda: module(*inputs))
    except Exception as error:
        logger.info("%s: every layer is traced, for a run on fake tensors failed: %s", type(model).__name__, error)
        return ()


def _trace(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    """The graph, the same on all paths through the model."""
    module.written = Written()
    return module.branches.explore(
        lambda: _traced(model, module, tensors, name), lambda: (module.python.changes, module.python.moved)
    )


def _traced(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    """The graph of one path; traced again where that found what a trace must know from the beginning: parameters that
    are written, modules that compute with numbers, buffers that change."""
    written = module.written
    while True:
        error: AutoparError | None = None
        before = set(written.names), len(module.shadows.tables), set(module.changing)
        try:
            captured = _traced_once(model, module, tensors, name)
        except AutoparError as found:
            error = found
        written.names |= written.found
        if before == (written.names, len(module.shadows.tables), module.changing):
            break
    if error is not None:
        raise error
    return captured


def _traced_once(
    model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str
) -> CapturedModel:
    questions = _questions(model, module)
    try:
        with _setting(model, module, questions) as setting:
            program = _export(module, new_inputs(setting.mode, tensors))
            module.written.found |= written_parameters(program)
    except AutoparError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode):
            module.shadows.may_add(raising_frame(error))
        raise questions.refused or CaptureError(_explain(error, name)) from error
    if questions.refused is not None:  # the model caught it
        raise questions.refused
    captured = normalize(
        import_program(program, name=name, model=model, inputs=tensors, opaques=setting.opaques, written=module.written)
    )
    return _guarded(captured, model, module, questions.guards) if questions.guards else captured


def _guarded(captured: CapturedModel, model: nn.Module, module: LossModule, places: Mapping[str, str]) -> CapturedModel:
    """With the values that the model's answers depend on, none of which a step changes.

    Raises:
        CaptureError: if one does.
    """
    changed = sorted(name for b in captured.buffers if b.mutated_by is not None for name in b.names if name in places)
    if changed:
        module.changing |= set(changed)
        raise CaptureError(
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
    questions = questions or _questions(model, module)
    module.watch = questions.asked
    before = Snapshot(model)  # torch.export puts copies of containers in their place
    try:
        with (
            torch.random.fork_rng(devices=[]),
            as_one_process(),
            opaque_calls() as opaques,
            fake_twin(model) as mode,
            torch.enable_grad(),
            own_functions(),
            module_hooks(),
            grad_modes(),
            symmetric_checks(),
            moved_modules(),
        ):
            yield _Setting(mode=mode, opaques=opaques)
    finally:
        before.restore()
        module.watch = unwatched


def _questions(model: nn.Module, module: LossModule) -> Questions:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return Questions(buffers, module.shadows, module.branches, module.changing)


def _export(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    with warnings.catch_warnings():
        # torch.export's own use of deprecated torch functions is not for our users to read.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.export.export(module, inputs, strict=False)
        stop_gradients(program)
        return decompose(program)


def _explain(error: Exception, name: str) -> str:
    where = user_frame(error) or name
    first = str(error).strip().split("\n")[0] or type(error).__name__
    if any("eager_transforms" in frame for frame in files_of(error)):
        return (
            f"{where}: forward differentiates inside itself (torch.func), which is not captured; compute it "
            "by a formula of its own, or give the loss that needs it to a step outside"
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
