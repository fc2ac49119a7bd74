"""What does training minimise? The model's own scalar loss, or `loss_fn` of its output and the batch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any, cast

from torch import Tensor, nn

from autopar.capture.branches import Branches
from autopar.capture.held_state import HeldState
from autopar.capture.python_state import PythonState
from autopar.capture.seeds import seeds
from autopar.capture.shadows import Shadows
from autopar.capture.tensor_attributes import TensorAttributes
from autopar.capture.written import Watch, Written
from autopar.errors import NoLossError, TurningFlagError
from autopar.values.inputs import Rebuild, leaves_of
from autopar.values.outputs import FOLLOWING, Returned, flatten_outputs

WRAP = (
    "let the function return a module around it whose forward(self, x, y) returns "
    "nn.functional.cross_entropy(self.model(x), y), with y among the inputs"
)
"""What to do about a missing loss at a shell."""


class LossModule(nn.Module):
    """The model and its loss as one module from flat tensors to a scalar, for tracing.

    Inputs that are not tensors (`use_cache=False`) are constants of the trace. `loss_fn` is called as
    `loss_fn(output, batch)`, batch being the call's keywords (or its positional arguments, if there are no keywords),
    or as `loss_fn(output)` if it takes one argument. Inputs that the model's forward does not accept are for
    `loss_fn` alone: keywords it does not name, positions beyond its last. The scalar is followed by new values of the
    parameters that forward writes, which `written` names.
    """

    def __init__(
        self, model: nn.Module, leaves: Sequence[Any], rebuild: Rebuild, loss_fn: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.model = model
        self._leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._rebuild = rebuild
        self._loss_fn = loss_fn
        self.written, self.python = Written(), PythonState()
        self.gradients, self.turns = True, False
        self._held, self._attributes = HeldState(model), TensorAttributes(model)
        self.shadows, self.branches = Shadows(), Branches()
        self.changing, self.turning = set[str](), cast(TurningFlagError | None, None)
        self.watch: Callable[[nn.Module], AbstractContextManager[None]] = unwatched
        """Entered around every run, with the model."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._held.followed(), self.python.kept(self.model), self.watch(self.model):
            watch = Watch(self.model, self.written)
            try:
                with self._attributes.followed(self.model), seeds(), watch:
                    ends = self.ends(*tensors)
            except Exception:
                watch.check()
                raise
            return (*ends, *watch.finish())

    has_loss = True

    def ends(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What `forward` gives first."""
        return (self.loss(*tensors),)

    def loss(self, *tensors: Tensor) -> Tensor:
        """The loss, run as the model is."""
        args, kwargs = self._call(tensors)
        if self._loss_fn is None:
            return find_loss(self.model(*args, **kwargs))
        own_args, own_kwargs = accepted_inputs(self.model, args, kwargs)
        output = self.model(*own_args, **own_kwargs)
        batch = kwargs if kwargs else args
        loss = self._loss_fn(output) if num_positional(self._loss_fn) == 1 else self._loss_fn(output, batch)
        if not is_loss(loss):
            raise NoLossError(f"loss_fn returned {describe(loss)}; return one scalar that depends on a parameter")
        return cast(Tensor, loss)

    def _call(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            leaves[slot] = tensor
        return self._rebuild(leaves)


class OutputModule(LossModule):
    """The model as one module from flat tensors to those that it returns, for tracing.

    A call with inputs that are for `loss_fn` alone returns the loss, as with `wants_loss` any. returned: the value
    around the tensors, of the last run. then: made of the output, and of the inputs `FOLLOWING`, what is returned.
    """

    has_loss = False
    wants_loss = False
    then: Callable[[Any, list[Tensor]], Any] | None = None
    returned: Returned

    def ends(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._call(tensors)
        extras = kwargs.pop(FOLLOWING, [])
        own_args, own_kwargs = (args, kwargs) if self._loss_fn is None else accepted_inputs(self.model, args, kwargs)
        wants_loss = self.wants_loss or (len(own_args), len(own_kwargs)) != (len(args), len(kwargs))
        output = self.loss(*tensors) if wants_loss else self.model(*own_args, **own_kwargs)
        found, self.returned = flatten_outputs(output if self.then is None else self.then(output, extras))
        return tuple(found)


def unwatched(_: nn.Module) -> AbstractContextManager[None]:
    """Nothing around a run."""
    return nullcontext()


def accepted_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a call that the model's forward takes; the rest is for the loss function."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        args = args[: len(positional)]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        kwargs = {key: value for key, value in kwargs.items() if key in names}
    return args, dict(kwargs)


def num_positional(function: Callable[..., Any]) -> int:
    """How many arguments a caller may pass by position (2 where Python cannot tell)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def find_loss(output: Any) -> Tensor:
    """The `loss` field of a model's output, or its first scalar that training can minimise.

    Raises:
        NoLossError: if there is neither.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        candidates = [named]
    elif is_dataclass(output) and not isinstance(output, Mapping):
        candidates = list(vars(output).values())
    else:
        candidates = leaves_of(output)
    for candidate in candidates:
        if is_loss(candidate):
            return candidate
    found = (
        f"the model returned {describe(output)}, and no scalar among it depends on a trainable parameter; "
        "pass labels so that the model computes its loss, or"
    )
    raise NoLossError(f"{found} give loss_fn=lambda output, batch: ...", at_shell=f"{found} {WRAP}")


def is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and value.requires_grad


def describe(value: Any) -> str:
    """A value in a few words: types, shapes and dtypes, no contents."""
    if isinstance(value, Tensor):
        frozen = "" if value.requires_grad else ", no gradient"
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}{frozen}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{k}={describe(v)}' for k, v in value.items())})"
    if isinstance(value, tuple | list):
        return f"({', '.join(describe(v) for v in value)})"
    return type(value).__name__
