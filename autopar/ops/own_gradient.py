"""Calls whose backward pass is the user's own: an `autograd.Function`, a hook on a gradient, a parameter written anew.

Each is the target of one node of a graph, a value: equal calls are equal, and it is pickled by what can be imported.
"""

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Stands for the operand of that number among a call's arguments."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """`function.apply`, an `autograd.Function` of the user's, of arguments in which each `ArgumentSlot` is an operand.

    constant: numbers of those results that carry no gradient, though they are floating.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    constant: tuple[int, ...] = ()
    where: str = field(default="", compare=False)

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_{zlib.crc32(self._words().encode()) & 0xFFFF:x}"

    def __call__(self, *operands: Tensor) -> Any:
        args, kwargs = filled(self.args, operands), {name: filled(value, operands) for name, value in self.kwargs}
        return results_of(self.function.apply(*args, **kwargs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and other.function is self.function and other._words() == self._words()

    def __hash__(self) -> int:
        return hash(self._words())

    def __repr__(self) -> str:
        """Python that makes this value again, for exported code."""
        module, name, file = place_of(self.function, self.where)
        return (
            f"own_function({module!r}, {name!r}, {file!r}, {_source(self.args)}, {_source(self.kwargs)},"
            f" {self.constant!r})"
        )

    def __str__(self) -> str:
        return self.__name__

    def __reduce__(self) -> Any:
        place = place_of(self.function, self.where)
        return own_function, (*place, self.args, self.kwargs, self.constant)

    def _words(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}{self.args}{self.kwargs}{self.constant}"


def own_function(
    module: str,
    name: str,
    file: str | None,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...] = (),
    constant: tuple[int, ...] = (),
) -> Applied:
    """The call of a Function that is found by its module and name, in `file` where the module is one that was read
    from a file."""
    return Applied(found(module, name, file), args, kwargs, constant)


def place_of(thing: Any, where: str = "") -> tuple[str, str, str | None]:
    """How another process finds a class or function: module, qualified name, and the module's file if it is no module
    that an import finds.

    Raises:
        CaptureError: if it is not to be found so.
    """
    module = sys.modules.get(thing.__module__)
    held: Any = module
    for part in thing.__qualname__.split("."):
        held = getattr(held, part, None)
    if held is not thing or module is None:
        raise CaptureError(
            f"{where + ': ' if where else ''}{thing.__qualname__} cannot be imported from {thing.__module__}, so that "
            "other processes cannot call it; define it at the top level of its module"
        )
    file = getattr(module, "__file__", None)
    known = None if thing.__module__ == "__main__" else _spec(thing.__module__)
    is_found = known is not None and file is not None and known.origin is not None and Path(known.origin) == Path(file)
    return thing.__module__, thing.__qualname__, None if is_found or file is None else str(Path(file).resolve())


def _spec(module: str) -> Any:
    held = sys.modules.pop(module)
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    finally:
        sys.modules[module] = held


def found(module: str, name: str, file: str | None) -> Any:
    """What `place_of` says where to find.

    Raises:
        CaptureError: if it is not there.
    """
    known = sys.modules.get(module)
    if known is None or (file is not None and Path(getattr(known, "__file__", None) or "").resolve() != Path(file)):
        known = importlib.import_module(module) if file is None else _read(module, file)
    for part in name.split("."):
        known = getattr(known, part, None)
    if known is None:
        raise CaptureError(f"{module} has no {name}, which the model calls; give this process the module that it had")
    return known


def _read(module: str, file: str) -> Any:
    name = f"autopar_read_{Path(file).stem}" if module == "__main__" else module
    if name in sys.modules and Path(sys.modules[name].__file__ or "").resolve() == Path(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise CaptureError(f"there is no file {file}, whose autograd.Function the model calls")
    read = importlib.util.module_from_spec(spec)
    sys.modules[name] = read
    sys.path.insert(0, str(Path(file).parent))  # for what it imports beside it
    try:
        spec.loader.exec_module(read)
    finally:
        sys.path.remove(str(Path(file).parent))
    return read


Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""An op by name, and its arguments, in which an `ArgumentSlot` is a value made before: operands, then results."""


@dataclass(frozen=True, slots=True)
class Hooked:
    """The first `count` operands as they are; their gradients are what `steps` make of the gradients that arrive.

    Further operands are constants that the steps read. results: slots of the gradients, None for no gradient.
    """

    count: int
    steps: tuple[Step, ...]
    results: tuple[ArgumentSlot | None, ...]

    @property
    def __name__(self) -> str:
        return f"hooked_{zlib.crc32(repr(self).encode()) & 0xFFFF:x}"

    def __call__(self, *operands: Tensor) -> Any:
        made = _Hook.apply(self, *operands)  # type: ignore[no-untyped-call]
        return made[0] if self.count == 1 else made

    def gradients(self, values: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Of gradients that arrive, and constants."""
        known = list(values)
        for name, args, kwargs in self.steps:
            made = _op(name)(*filled(args, known), **{key: filled(value, known) for key, value in kwargs})
            known.append(made)
        return tuple(None if slot is None else known[slot.number] for slot in self.results)


class _Hook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hooked: Hooked, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.hooked = hooked
        ctx.save_for_backward(*operands[hooked.count :])
        return tuple(operand.view_as(operand) for operand in operands[: hooked.count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        made = ctx.hooked.gradients((*gradients, *ctx.saved_tensors))
        return (None, *made, *(None for _ in ctx.saved_tensors))


def renewed(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, written into `parameter` in forward: the gradient is the parameter's, as of a leaf that was written."""
    made: Tensor = _Renew.apply(parameter, value)  # type: ignore[no-untyped-call]
    return made


class _Renew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def filled(value: Any, operands: Sequence[Any]) -> Any:
    """Arguments with operands in place of their slots."""
    if isinstance(value, ArgumentSlot):
        return operands[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(filled(part, operands) for part in value)
    if isinstance(value, dict):
        return {key: filled(part, operands) for key, part in value.items()}
    return value


def results_of(made: Any) -> Any:
    """The tensors that a Function returns: one, or a tuple of them."""
    if isinstance(made, Tensor):
        return made
    tensors = tuple(part for part in made if isinstance(part, Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


def is_own(target: Any) -> bool:
    """Whether a node's target is one of these."""
    return isinstance(target, (Applied, Hooked)) or target is renewed


def _op(name: str) -> Any:
    made: Any = torch.ops
    for part in name.split("."):
        made = getattr(made, part)
    return made


def _source(value: Any) -> str:
    if isinstance(value, type) or callable(value):
        raise CaptureError(f"{value} among the arguments of an autograd.Function has no source; give it a plain value")
    return repr(value)
