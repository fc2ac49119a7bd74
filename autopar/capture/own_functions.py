"""How is an `autograd.Function` kept? Each `apply` in forward is one call of the graph, with the user's own backward.

Tracing would look into `Function.forward`, and forget `backward`. Private torch API, kept in this file:
`torch.autograd.function._SingleLevelFunction`, through which every `apply` goes, also one that was bound at import
(`round_ = Round.apply`); `torch.utils.checkpoint.CheckpointFunction`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.fake_twin import fake_like, is_fake
from autopar.capture.opaque import Opaque, active_opaques
from autopar.capture.real_values import outside_traces
from autopar.capture.recomputing import gradients_kept, is_recomputing
from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError
from autopar.ops.own_gradient import Applied, ArgumentSlot, filled
from autopar.values.inputs import leaves_of, mapped_tensors

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, torch.layout)
FEW = 1 << 20
"""Elements of operands on which a backward is tried."""
TORCH_KEPT = ("torch.nn.modules._functions",)
"""Modules of torch whose Functions are layers' own; others belong to its machinery."""


@contextmanager
def own_functions() -> Iterator[None]:
    """Inside, every `apply` of a user's Function is an opaque call."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(_SingleLevelFunction, cls).apply
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        own = cls.__module__.startswith("torch.") and cls.__module__ not in TORCH_KEPT
        tracing = active_opaques()
        if own or tracing is None or not _is_traced((args, kwargs)):
            return run(*args, **kwargs)
        return _applied(cls, args, kwargs)

    before = vars(_SingleLevelFunction).get("apply")
    assert before is None, "autograd.Function.apply is exchanged already"
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _checkpointed(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """What a reentrant checkpoint computes: without gradients inside where no argument has one."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return run(*args)
    with torch.no_grad():
        return run(*args)


def _is_traced(given: Any) -> bool:
    return any(is_fake(leaf) for leaf in leaves_of(given))


def _applied(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where = own_frame() or cls.__qualname__
    tensors, objects = list[Tensor](), list[Any]()

    def slots(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return ArgumentSlot(len(tensors) - 1)
        if type(value) in (tuple, list):
            return type(value)(slots(part) for part in value)
        if type(value) is dict:
            return {key: slots(part) for key, part in value.items()}
        if not isinstance(value, PLAIN) and not inspect.isfunction(value) and not inspect.isclass(value):
            objects.append(value)
        return value

    placed, named = slots(args), tuple((name, slots(value)) for name, value in sorted(kwargs.items()))
    if objects:
        return _inlined(cls, args, kwargs, objects[0], where)
    needs = tuple(tensor.requires_grad for tensor in tensors)

    def run(*operands: Tensor) -> Sequence[Tensor]:
        own.made, context = _forward(cls, placed, dict(named), operands, needs, where)
        results = [own.made] if isinstance(own.made, Tensor) else [p for p in own.made if isinstance(p, Tensor)]
        _check_backward(cls, placed, dict(named), operands, needs, where)
        plain = {id(tensor) for tensor in context.plain}
        own.constant = tuple(i for i, tensor in enumerate(results) if id(tensor) in plain)
        return results

    def target() -> tuple[Any, tuple[Tensor, ...]]:
        return Applied(cls, placed, named, own.constant, where), ()

    own = Opaque(run=run, target=target, key=(Applied(cls, placed, named), needs))
    tracing = active_opaques()
    assert tracing is not None
    results, alike = tracing.call(tensors, own)
    made = iter(results)
    if isinstance(alike.made, Tensor):
        return results[0]
    return tuple(next(made) if isinstance(part, Tensor) else part for part in alike.made)


def _inlined(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], thing: Any, where: str) -> Any:
    """The ops of forward, where the Function's backward is their gradient."""

    def forward(*args: Any, detached: bool = False, **kwargs: Any) -> Any:
        context = _Context(tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args), where)
        with gradients_kept(detached=detached):
            if not _has_setup(cls):
                made = cls.forward(context, *args, **kwargs)
            else:
                made = cls.forward(*args, **kwargs)
                cls.setup_context(context, args, made)
        plain = {id(tensor) for tensor in context.plain}
        return mapped_tensors(lambda t: t.detach() if id(t) in plain else t, made)

    run = super(_SingleLevelFunction, cls).apply
    for call in (forward, partial(forward, detached=True)):
        if is_recomputing(run, call, args, kwargs):
            return call(*args, **kwargs)
    raise CaptureError(
        f"{where}: {cls.__qualname__}.apply is given an object of {type(thing).__name__}, which no other process has, "
        "and its backward is not what autograd makes of its forward (or that could not be tried on random numbers); "
        "give it tensors and plain values"
    )


class _Context:
    """What `forward` gets as `ctx`."""

    def __init__(self, needs: tuple[bool, ...], where: str) -> None:
        self.needs_input_grad = needs
        self.plain: tuple[Tensor, ...] = ()
        self.saved_tensors: tuple[Any, ...] = ()
        self._where = where

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For forward mode only."""

    def set_materialize_grads(self, value: bool) -> None:
        """Of backward only."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.plain = tensors

    def mark_dirty(self, *_: Tensor) -> None:
        raise CaptureError(
            f"{self._where}: an autograd.Function that writes its input in place (ctx.mark_dirty) is not captured; "
            "return a new tensor instead"
        )


def _forward(
    cls: Any, placed: Any, named: dict[str, Any], operands: Sequence[Tensor], needs: tuple[bool, ...], where: str
) -> tuple[Any, _Context]:
    args, kwargs = filled(placed, operands), {name: filled(value, operands) for name, value in named.items()}
    flags = iter(needs)
    context = _Context(tuple(next(flags) if isinstance(arg, Tensor) else False for arg in args), where)
    versions = [operand._version for operand in operands]
    with _OnlyOperands(operands, cls, where):
        if _has_setup(cls):
            made = cls.forward(*args, **kwargs)
            cls.setup_context(context, args, made)
        else:
            made = cls.forward(context, *args, **kwargs)
    if [operand._version for operand in operands] != versions:
        context.mark_dirty()
    if not isinstance(made, Tensor | tuple):
        raise CaptureError(f"{where}: {cls.__qualname__} returned {type(made).__name__}; return tensors")
    return made, context


def _check_backward(
    cls: Any, placed: Any, named: dict[str, Any], operands: Sequence[Tensor], needs: tuple[bool, ...], where: str
) -> None:
    """Raises CaptureError if backward draws numbers, which would be others on every rank and in every micro-batch.

    It runs on numbers, or where those were many on fake tensors; what fails without the model's own has to do.
    """
    drawn = _Drawn()
    are_few = sum(operand.numel() for operand in operands) <= FEW
    with outside_traces(), torch.random.fork_rng(devices=[]), suppress(Exception), torch.no_grad():
        own = [torch.ones(o.shape, dtype=o.dtype) for o in operands] if are_few else fake_like(operands)
        made, context = _forward(cls, placed, named, own, needs, where)
        results = [made] if isinstance(made, Tensor) else [part for part in made if isinstance(part, Tensor)]
        with drawn:
            cls.backward(context, *(torch.ones_like(result) for result in results))
    if drawn.by:
        raise CaptureError(
            f"{where}: the backward of {cls.__qualname__} draws random numbers ({drawn.by}), which ranks and "
            "micro-batches could not agree on; draw them outside and pass them to apply()"
        )


class _Drawn(TorchDispatchMode):
    """The first op that drew numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.by = self.by or str(func)
        return func(*args, **(kwargs or {}))


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not _SingleLevelFunction.setup_context


class _OnlyOperands(TorchDispatchMode):
    """Inside, ops read what they are given, and what was made of that."""

    def __init__(self, operands: Sequence[Tensor], cls: Any, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {id(operand): operand for operand in operands}
        self.cls, self.where = cls, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_fake(tensor) and id(tensor) not in self.known for tensor in given):
            raise CaptureError(
                f"{self.where}: {self.cls.__qualname__} reads a tensor that it is not given ({func}); pass what it "
                "computes on, parameters included, to apply()"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{self.where}: {self.cls.__qualname__} draws random numbers ({func}), which ranks could not agree on; "
                "draw them outside and pass them to apply()"
            )
        made = func(*args, **(kwargs or {}))
        self.known.update((id(leaf), leaf) for leaf in leaves_of(made) if isinstance(leaf, Tensor))
        return made
