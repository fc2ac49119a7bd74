"""What does a model compute? Its forward pass and loss as one normalised graph, traced without memory or device."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.capture.decompose import decompose
from autopar.capture.expand import NotAlikeError, expand
from autopar.capture.fake_twin import fake_twin, new_inputs
from autopar.capture.import_program import import_program, stop_gradients
from autopar.capture.loss import LossModule
from autopar.capture.repeats import Repeat, few_layers, find_repeats
from autopar.capture.user_frame import user_frame
from autopar.errors import AutoparError, CaptureError
from autopar.graph import CapturedModel
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
    module, tensors = _call(model, args, kwargs, loss_fn)
    if repeats is None:
        repeats = _repeats(model, module, tensors)
    with few_layers(model, repeats):
        captured = _trace(model, module, tensors, name)
    if not repeats:
        return captured
    try:
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
        with fake_twin(model) as mode, torch.enable_grad():
            inputs = new_inputs(mode, tensors)
            with mode:
                return find_repeats(model, lambda: module(*inputs))
    except Exception as error:
        logger.info("%s: every layer is traced, for a run on fake tensors failed: %s", type(model).__name__, error)
        return ()


def _trace(model: nn.Module, module: LossModule, tensors: Sequence[tuple[str, Tensor]], name: str) -> CapturedModel:
    try:
        with fake_twin(model) as mode, torch.enable_grad():
            program = _export(module, new_inputs(mode, tensors))
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, name)) from error
    return normalize(import_program(program, name=name, model=model, inputs=tensors))


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
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{where}: Python control flow depends on the values of a tensor ({first}), so one graph cannot stand for "
            f"the model; use torch.where or a mask, or move the decision out of forward"
        )
    return (
        f"{where}: {name} cannot be traced: {type(error).__name__}: {first}; the forward must run on "
        "fake tensors: no .item(), .numpy() or file access, and inputs as in a real call"
    )
