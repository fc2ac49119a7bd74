"""The graph of one trace of a model, with what export drops kept and what Python asks about values answered."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.capture.decompose import decompose
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.grad_modes import grad_modes
from autopar.capture.gradient_hooks import module_hooks
from autopar.capture.import_program import import_program, stop_gradients, written_parameters
from autopar.capture.loss import LossModule, unwatched
from autopar.capture.moved_modules import moved_modules
from autopar.capture.one_process import as_one_process
from autopar.capture.opaque import opaque_calls
from autopar.capture.own_functions import own_functions
from autopar.capture.python_state import Snapshot
from autopar.capture.questions import Questions
from autopar.capture.quiet import quiet
from autopar.capture.symmetric_checks import symmetric_checks
from autopar.capture.user_frame import files_of, raising_frame, user_frame
from autopar.errors import AutoparError, CaptureError, TurningFlagError
from autopar.passes.normalize import normalize
from autopar.values.graph import CapturedModel
from autopar.values.guards import BufferGuard


def traced_once(
    model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str
) -> CapturedModel:
    questions = _questions(model, module)
    try:
        with setting(model, module, questions) as inside:
            program = _export(module, new_inputs(inside.mode, tensors))
            module.written.found |= written_parameters(program)
    except AutoparError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode):
            module.shadows.may_add(raising_frame(error))
        raise questions.refused or CaptureError(_explain(error, name, questions)) from error
    if questions.refused is not None:  # the model caught it
        raise questions.refused
    captured = normalize(
        import_program(
            program,
            name=name,
            model=model,
            inputs=tensors,
            opaques=inside.opaques,
            written=module.written,
            has_loss=module.has_loss,
        )
    )
    return _guarded(captured, model, module, questions.guards) if questions.guards else captured


def _guarded(captured: CapturedModel, model: nn.Module, module: LossModule, places: Mapping[str, str]) -> CapturedModel:
    """With the values that the model's answers depend on.

    Raises:
        TurningFlagError: if the step changes one, and none may turn.
    """
    changed = sorted(name for b in captured.buffers if b.mutated_by is not None for name in b.names if name in places)
    if changed and not module.turns:
        module.changing |= set(changed)
        module.turning = module.turning or TurningFlagError(
            f"{places[changed[0]]}: forward decides on buffer {changed[0]}, which the step itself changes, so that one "
            "graph cannot stand for the model; if it is a flag that turns at the first batch, call the model on one "
            "before planning (`model(**batch)` in one process); if it changes at every step, compute with the tensor"
        )
        raise module.turning
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return replace(captured, guards=tuple(BufferGuard.of(name, buffers[name]) for name in sorted(places)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run of the model for tracing takes place in."""

    mode: Any
    opaques: Any


@contextmanager
def setting(model: nn.Module, module: LossModule, questions: Questions | None = None) -> Iterator[Setting]:
    """Inside, the model runs on fake tensors as one process would, what export drops is kept, and what Python asks
    about values is answered."""
    questions = questions or _questions(model, module)
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
            symmetric_checks(),
            moved_modules(),
        ):
            yield Setting(mode=mode, opaques=opaques)
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


def _questions(model: nn.Module, module: LossModule) -> Questions:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return Questions(buffers, module.shadows, module.branches, module.changing)


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
