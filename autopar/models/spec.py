"""How is a model named on a command line? `file.py:function`, `module:function` or `hf:config.json`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.user_frame import user_frame
from autopar.cost_models.named_shapes import NAMES
from autopar.errors import ArgumentError, AutoparError, ModelSpecError
from autopar.models.overrides import parse_literal
from autopar.values.choices import check_choice, near
from autopar.values.precision import PRECISIONS, Precision, in_dtype, model_in_dtype, stored_as

FORMS = "name a model as file.py:function, module:function or hf:config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in training mode and the arguments of one call at the global batch."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    """Sizes of the inputs that nobody gave, in words, each with the option that gives it."""


def load_model(
    spec: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "fp32",
    overrides: Mapping[str, str] | None = None,
    device: str | torch.device = "meta",
) -> LoadedModel:
    """The model that `spec` names in `precision`: trained parameters in its storage dtype, all else in that of compute.

    Args:
        spec: `file.py:function` or `module:function`, a function that returns `(model, kwargs)` or `(model, args)` and
            is given those of `batch` and `seq` and of the overrides that are set; or `hf:PATH`, a transformers
            config.json or a folder that holds one.
        batch: samples in the global batch; 8 for `hf:` models if not given.
        seq: tokens a sample; for `hf:` models 512 or the model's limit, whichever is less, if not given.
        precision: one of `PRECISIONS`.
        overrides: `--set key=value` pairs as text, for the config or the function's parameters.
        device: on which model and inputs are built; on the meta device nothing is allocated.

    Raises:
        ModelSpecError: if the spec is of none of these forms, or names nothing that can be built.
        ArgumentError: if batch, seq, precision or an override does not fit the model.
    """
    check_choice("precision", precision, PRECISIONS)
    dtypes = PRECISIONS[precision]
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise ArgumentError(f"{name} {value} is not a positive number")
    kind, _, rest = spec.partition(":")
    if not rest:
        sizes_only = "; autopar simulate and advise know that name, whose sizes are all they need"
        raise ModelSpecError(f"{spec!r} has no colon; {FORMS}{sizes_only if spec in NAMES else ''}")
    if kind == "hf":
        from autopar.models.hf import assumed_sizes, load_hf  # transformers is optional, and slow to import

        model, kwargs, name = load_hf(
            Path(rest),
            batch=batch,
            seq=seq,
            dtype=dtypes.compute,
            overrides=overrides or {},
            device=torch.device(device),
        )
        sizes = assumed_sizes(kwargs, batch, seq)
        return LoadedModel(name=name, model=stored_as(model, dtypes), kwargs=kwargs, assumed=sizes)
    return _load_function(spec, batch, seq, dtypes, overrides or {}, torch.device(device))


def _load_function(
    spec: str,
    batch: int | None,
    seq: int | None,
    dtypes: Precision,
    overrides: Mapping[str, str],
    device: torch.device,
) -> LoadedModel:
    source, _, attribute = spec.rpartition(":")
    module = _import(source, spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ModelSpecError(f"{source} has no function {attribute!r}{near(attribute, public)}")
    options = function_options(function, spec, batch, seq, overrides)
    try:
        with torch.device(device):
            result = function(**options)
    except AutoparError:
        raise
    except Exception as error:
        where = user_frame(error) or spec
        raise ModelSpecError(
            f"{where}: {attribute}() failed on device {device}: {type(error).__name__}: {error}; it must return "
            "(model, kwargs) or (model, args) and build both without reading values of tensors"
        ) from error
    model, args, kwargs = _unpack(result, spec)
    args, kwargs = _cast(args, dtypes.compute), _cast(kwargs, dtypes.compute)
    model = stored_as(model_in_dtype(model, dtypes.compute), dtypes)
    return LoadedModel(name=type(model).__name__, model=model, args=args, kwargs=kwargs)


def function_options(
    function: Callable[..., Any], spec: str, batch: int | None, seq: int | None, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """Keywords for a model function: batch, seq and overrides, each of which it must accept."""
    given: dict[str, Any] = {key: value for key, value in (("batch", batch), ("seq", seq)) if value is not None}
    given |= {key: parse_literal(value) for key, value in overrides.items()}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    for key in given:
        if key not in parameters:
            raise ArgumentError(
                f"{spec} takes no {key!r}; give the function a parameter of that name, or leave it out"
                f"{near(key, parameters)}"
            )
    missing = [
        n for n, p in parameters.items() if p.default is p.empty and n not in given and p.kind is not p.VAR_POSITIONAL
    ]
    if missing:
        raise ArgumentError(f"{spec} needs {', '.join(missing)}; give a default, or set it with --set {missing[0]}=...")
    return given


def _import(source: str, spec: str) -> ModuleType:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source)
        if not path.is_file():
            beside = near(path.name, (file.name for file in path.parent.glob("*.py")))
            raise ModelSpecError(f"{spec!r}: there is no file {source}; {FORMS}{beside}")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does, for imports beside it
        sys.modules[path.stem] = module
        try:
            found.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.resolve().parent))
        return module
    except AutoparError:
        raise
    except Exception as error:
        where = user_frame(error) or source
        raise ModelSpecError(
            f"{spec!r} cannot be imported: {where}: {type(error).__name__}: {error}; {FORMS}"
        ) from error


def _unpack(result: Any, spec: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        model, inputs = result
        if isinstance(inputs, Mapping):
            return model, (), dict(inputs)
        if isinstance(inputs, tuple | list):
            return model, tuple(inputs), {}
    raise ModelSpecError(f"{spec} returned {type(result).__name__}; return (model, kwargs dict) or (model, args tuple)")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return in_dtype(value, dtype)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
