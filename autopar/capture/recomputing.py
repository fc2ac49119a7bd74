"""Is the backward of an `autograd.Function` the gradient of its forward? Then the graph may hold its ops instead.

A Function that is given modules (reversible layers, checkpoints of one's own) is no op that other processes can call.
Forward and backward are run on random numbers in place of all tensors, and so is forward alone, with the gradients that
autograd makes of it: where all gradients agree, the graph holds the ops of forward.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.python_state import Snapshot
from autopar.capture.reached import Reached
from autopar.capture.real_values import real_run
from autopar.values.inputs import leaves_of, mapped_tensors

LARGEST = 1 << 27
"""Numbers that are drawn for a comparison: 1 GB. With twice as many a capture would take seconds and gigabytes."""
AGREES = 1e-5
"""What rounding explains, relative to the largest gradient, of modules that round to float32 inside."""
Forward = Callable[..., Any]


def modules_in(value: Any, depth: int = 3) -> list[nn.Module]:
    """The modules that arguments hold, those of methods, partials and closures too."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, partial):
        parts: list[Any] = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif not depth or isinstance(value, Tensor | type):
        parts = []
    elif hasattr(value, "__closure__") or hasattr(value, "__self__"):
        cells = getattr(value, "__closure__", None) or ()
        parts = [getattr(value, "__self__", None), *(cell.cell_contents for cell in cells)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return list(dict.fromkeys(module for part in parts for module in modules_in(part, depth - 1)))


def is_recomputing(run: Forward, forward: Forward, args: Any, kwargs: Any) -> bool:
    """Whether `run`, which is `Function.apply`, has the gradients of `forward` alone."""
    modules = modules_in([args, kwargs])
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    tensors += [t for module in modules for t in (*module.parameters(), *module.buffers())]
    if not modules or sum(t.numel() for t in tensors) > LARGEST:
        return False
    before = [Snapshot(Reached.of(module)) for module in modules]
    try:
        return all(_agree(run, forward, args, kwargs, modules, scale) for scale in (1.0, 4.0))
    except Exception:  # whatever it does, it is not known to be a gradient
        return False
    finally:
        for snapshot in before:
            snapshot.restore()


def _agree(run: Forward, forward: Forward, args: Any, kwargs: Any, modules: list[nn.Module], scale: float) -> bool:
    with real_run():
        torch.manual_seed(0)
        twins: dict[int, Tensor] = {}

        def twin(tensor: Tensor) -> Tensor:
            if id(tensor) not in twins:
                twins[id(tensor)] = _random(tensor, scale)
            return twins[id(tensor)]

        with _exchanged(modules, twin):
            given, named = mapped_tensors(twin, (args, kwargs))
            found = [_gradients(call, given, named, list(twins.values())) for call in (run, forward)]
    (values, gradients), (other_values, other_gradients) = found
    return _close(values, other_values) and _close(gradients, other_gradients)


def _gradients(call: Forward, args: Any, kwargs: Any, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What a call makes, and the gradients of a sum of that."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    own = mapped_tensors(lambda t: t if not t.requires_grad or isinstance(t, nn.Parameter) else t.view_as(t), args)
    made = [leaf for leaf in leaves_of(call(*own, **kwargs)) if isinstance(leaf, Tensor)]
    torch.manual_seed(2)
    ends = [leaf for leaf in made if leaf.requires_grad]
    torch.autograd.backward(ends, [torch.randn_like(end) for end in ends])
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves if leaf.requires_grad]
    return [leaf.detach() for leaf in made], gradients


def _close(ones: list[Tensor], others: list[Tensor]) -> bool:
    largest = max((float(one.abs().max()) for one in ones if one.numel()), default=0.0)
    return len(ones) == len(others) and all(
        one.shape == other.shape and (not one.numel() or float((one - other).abs().max()) <= AGREES * largest)
        for one, other in zip(ones, others, strict=True)
    )


def _random(tensor: Tensor, scale: float) -> Tensor:
    """Numbers in place of a traced tensor."""
    if not tensor.is_floating_point():
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    width = scale / math.sqrt(max(tensor.shape[-1], 1)) if isinstance(tensor, nn.Parameter) and tensor.dim() else scale
    made = torch.randn(tuple(tensor.shape), dtype=torch.float64) * width
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made.requires_grad_(
        tensor.requires_grad
    )  # fmt: skip


@contextmanager
def _exchanged(modules: list[nn.Module], twin: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, modules hold twins of their parameters and buffers."""
    own = dict.fromkeys(part for module in modules for part in module.modules())
    tables: list[dict[str, Any]] = [table for part in own for table in (part._parameters, part._buffers)]
    saved = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    table[name] = twin(value)
        yield
    finally:
        for table, old in zip(tables, saved, strict=True):
            table.update(old)


def _viewed(tensor: Any) -> Tensor:
    viewed: Tensor = tensor.view_as(tensor)
    return viewed


@contextmanager
def gradients_kept(*, detached: bool) -> Iterator[None]:
    """Inside, `no_grad` leaves gradients alone, and so does `detach` if asked, as if forward were no Function's."""
    enter, leave, detach = torch.no_grad.__enter__, torch.no_grad.__exit__, Tensor.detach
    torch.no_grad.__enter__ = lambda own: None  # type: ignore[method-assign]
    torch.no_grad.__exit__ = lambda own, *error: None  # type: ignore[method-assign]
    if detached:
        Tensor.detach = _viewed  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.no_grad.__enter__, torch.no_grad.__exit__ = enter, leave  # type: ignore[method-assign]
        Tensor.detach = detach
