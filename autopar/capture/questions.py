"""What does Python learn about values while a model is traced? Answers that hold at every step, or an error.

A value that follows from constants alone is answered as it is; one that follows from buffers is answered with a guard,
the name of the buffer; a test of which one outcome only raises is answered with the other, and the condition is left in
the trace as an assertion; a result whose shape follows from known values (`x[mask]`) is made of integer indices. What
is left depends on the data, and is refused with the line that asks.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.answers import ANSWERS, ASK, is_known, number_refused
from autopar.capture.fake_twin import has_constant
from autopar.capture.knowledge import Knowledge
from autopar.capture.known_shapes import SHAPES
from autopar.capture.number_arguments import with_numbers
from autopar.capture.numbers import Number, as_number, as_tensors, has_numbers
from autopar.capture.real_values import is_wrapped
from autopar.capture.told import is_identified
from autopar.capture.user_frame import asker, place_of
from autopar.errors import CaptureError
from autopar.values.inputs import mapped_tensors

HANDLERS = {**ANSWERS, **SHAPES}


_RETURN_IT = {
    *("to", "type", "type_as", "contiguous", "cpu", "float", "double", "half", "bfloat16", "as_tensor", "asarray"),
    *("positive", "__pos__", "real", "conj", "resolve_conj", "resolve_neg", "sum_to_size", "expand_as"),
    *("atleast_1d", "atleast_2d", "atleast_3d"),
}
"""Functions that return the very tensor which they are given, where it is as they are to make it."""


def _without_gradients(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, dict[int, Tensor]]:
    """A call's arguments, under `no_grad` as tensors without gradients, and whose those are.

    A call that returns its very operand (`x.to(x.device)`) would otherwise leave that without a gradient in the trace.
    """
    if torch.is_grad_enabled() or getattr(func, "__name__", "") not in _RETURN_IT:
        return args, kwargs, {}
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def plain(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or is_wrapped(tensor):
            return tensor
        if id(tensor) not in own:
            own[id(tensor)] = tensor, tensor.detach()
        return own[id(tensor)][1]

    args, kwargs = mapped_tensors(plain, (args, kwargs))
    return args, kwargs, {id(made): tensor for tensor, made in own.values()}


def has_unknown_size(result: Any) -> bool:
    """Whether a call made a tensor with a size that is no number yet."""
    first = result[0] if type(result) is tuple and result else result
    return isinstance(first, Tensor) and not all(type(n) is int for n in first.shape)


class Questions(Knowledge, TorchFunctionMode):
    """Answers questions about values inside `asked`, for one trace of a model."""

    @contextmanager
    def asked(self, model: nn.Module) -> Iterator[None]:
        """Inside, which the caller's frame encloses, `model` asks; its buffers are those being traced."""
        self.stop = sys._getframe(2).f_code
        self.known.bind(dict(model.named_buffers(remove_duplicate=False)))
        self.branches.asked = []
        with self.shadows.exchanged(self), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_numbers((args, kwargs)):
            if (made := with_numbers(func, args, kwargs)) is not None:
                return made
            args, kwargs = as_tensors((args, kwargs))
        if kwargs.get("generator") is not None:
            place, text = place_of(asker())
            self.refused = self.refused or CaptureError(
                f"{place}: forward draws from a torch.Generator of its own{text}, whose numbers ranks could not agree "
                "on; leave out generator=, so that torch's default generator is drawn from, which plans keep in step"
            )
            raise self.refused
        args, kwargs, own = _without_gradients(func, args, kwargs)
        result = self._result(func, args, kwargs)
        return own.get(id(result), result) if own else result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None and (answer := handler(self, func, args, kwargs)) is not ASK:
            return answer
        result = func(*args, **kwargs)
        if not self.unsized and has_unknown_size(result):
            place, text = place_of(asker())
            self.unsized = f"{place}: the data says how many places {func.__name__} gives{text}"
        if result is None or isinstance(result, Tensor | tuple | list):
            self.known.note(func, args, kwargs, result)
        return result

    def number(self, value: Tensor | Number, kind: type) -> Any:
        """`float` or `int` of a tensor or number."""
        tensor = value.tensor if type(value) is Number else value
        assert isinstance(tensor, Tensor)
        if is_known(self, tensor) or has_constant(tensor) or tensor.numel() != 1 or tensor.is_complex():
            return kind(value)
        if is_identified(asker()):
            raise number_refused(self, tensor)
        return as_number(tensor, kind)
