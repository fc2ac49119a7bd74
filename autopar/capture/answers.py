"""Answers to what Python asks of a tensor's value: its truth, numbers, words and comparisons (`questions`)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.checks import find_check, find_comparison, is_formatted, violated_of
from autopar.capture.fake_twin import has_constant
from autopar.capture.knowledge import Knowledge
from autopar.capture.numbers import MANY, Number, as_numbers
from autopar.capture.python_state import NOBODYS
from autopar.capture.real_values import ASSERTIONS, real_values
from autopar.capture.told import is_identified, is_part_of_answer, is_told
from autopar.capture.user_frame import asker, model_frame, place_of
from autopar.errors import CaptureError
from autopar.ops.checked import ERROR

Handler = Callable[[Knowledge, Any, tuple[Any, ...], dict[str, Any]], Any]
ASK = object()
"""What a handler returns that has no answer: the call is made."""


def _refusal(questions: Knowledge, tensor: Tensor, what: str, instead: str) -> CaptureError:
    place, text = place_of(asker())
    if missing := questions.known.lacking(tensor):
        instead = f"buffer {missing}, from which they follow, has no value on the meta device; build it on the CPU"
    return CaptureError(f"{place}: forward {what}{text}, so one graph cannot stand for the model; {instead}")


def _refused(questions: Knowledge, tensor: Tensor, what: str, instead: str) -> CaptureError:
    error = _refusal(questions, tensor, what, instead)
    questions.refused = questions.refused or error
    return error


def _truth(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    value = questions.value(tensor)
    if value is not None:
        with real_values():
            return bool(value)
    if has_constant(tensor) or tensor.numel() != 1:
        return ASK
    if is_part_of_answer(asker()):
        questions.shadows.may_add(asker())
        raise _branches(questions, tensor)
    return _checked(questions, tensor, tensor)


_BRANCHES = "branches on the values of a tensor", "use torch.where or a mask, or move the decision out of forward"


def _branches(questions: Knowledge, tensor: Tensor) -> CaptureError:
    return _refused(questions, tensor, *_BRANCHES)


def _checked(questions: Knowledge, tensor: Tensor, tested: Tensor) -> bool:
    """The answer that a check wants of `tested`."""
    assert questions.stop is not None
    check = find_check(asker(), questions.stop)
    if check is None:
        if questions.shadows.may_add(asker()):
            raise _branches(questions, tensor)  # the next trace may take another way here (`max(n, 1)`)
        return questions.branches.answer(_refusal(questions, tensor, *_BRANCHES))
    if not check.others:
        questions.keep(tested if check.wanted else torch.logical_not(tested), check)
        return check.wanted
    own = torch.logical_not(tested) if check.wanted else tested != 0
    rest = violated_of(check.others, True, check.frame)
    if isinstance(rest, Tensor):
        questions.keep(torch.logical_not(torch.logical_and(own, rest)), check)
    elif rest:
        questions.keep(torch.logical_not(own), check)
    return check.wanted


def _number(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """item, float, int. In place of a number that is computed with, a `Number` will do."""
    tensor = args[0]
    if is_known(questions, tensor):
        value = questions.value(tensor)
        with real_values():
            return func(value, *args[1:])
    if has_constant(tensor) or tensor.numel() != 1:
        return ASK
    assert questions.stop is not None
    frame = asker()
    is_new = questions.shadows.may_add(frame)  # where it is, the next trace takes another way here
    if func is Tensor.item:
        if is_identified(frame):
            raise number_refused(questions, tensor)
        return Number(tensor)
    found = find_comparison(frame, questions.stop) if func in (Tensor.__float__, Tensor.__int__) else None
    if found is not None and not found.check.others:
        number = tensor.long() if func is Tensor.__int__ else tensor
        holds = found.compare(number, found.other)
        questions.keep(holds if found.check.wanted else torch.logical_not(holds), found.check)
        return int(found.answer) if func is Tensor.__int__ else float(found.answer)
    if func in (Tensor.__float__, Tensor.__int__) and not is_new and is_formatted(frame) and is_told(frame):
        return NOBODYS if func is Tensor.__int__ else math.nan
    raise number_refused(questions, tensor)


def is_known(questions: Knowledge, tensor: Tensor) -> bool:
    """Whether a number is answered by a value: not by that of a buffer which the step changes."""
    found = questions.known.value(tensor)
    return found is not None and not found[1] & questions.changing


def number_refused(questions: Knowledge, tensor: Tensor) -> CaptureError:
    return _refused(
        questions,
        tensor,
        "asks for values of a tensor as Python numbers or a NumPy array",
        "compute with tensors (torch in place of math and NumPy, no .item()), or move it out of forward",
    )


def _numbers(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """tolist, numpy and what is like them."""
    value = questions.value(args[0])
    if value is not None:
        with real_values():
            return func(value.clone(), *args[1:], **kwargs)
    if has_constant(args[0]):
        return ASK
    is_new = questions.shadows.may_add(asker())
    if func is Tensor.tolist and args[0].numel() <= MANY and not is_new and not is_identified(asker()):
        return as_numbers(args[0])
    raise number_refused(questions, args[0])


def _words(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """What is printed of a tensor: its value where it is known, and its shape where it is not."""
    value = questions.value(args[0])
    if value is not None:
        with real_values():
            return func(value, *args[1:])
    frame = model_frame()
    if has_constant(args[0]):
        return ASK
    if frame is not None and not is_told(frame):
        raise _refused(
            questions, args[0], "makes text of a tensor's values, and uses it", "compute with the tensor instead"
        )
    return f"tensor(..., size={tuple(args[0].shape)}, dtype={args[0].dtype})"


def _alike(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.equal and torch.allclose."""
    left, right = args[0], args[1] if len(args) > 1 else kwargs["other"]
    values = [questions.value(left), questions.value(right)]
    if values[0] is not None and values[1] is not None:
        with real_values():
            return func(*values, *args[2:], **{k: v for k, v in kwargs.items() if k != "other"})
    if has_constant(left) and has_constant(right):
        return ASK
    if func in (torch.equal, Tensor.equal):
        if left.shape != right.shape:
            return False
        return _checked(questions, left, (left == right).all())
    return _checked(questions, left, torch.isclose(left, right, *args[2:], **kwargs).all())


def _contains(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, element = args
    values = [questions.value(a) if isinstance(a, Tensor) else a for a in (tensor, element)]
    if all(value is not None for value in values):
        with real_values():
            return func(*values)
    return _checked(questions, tensor, (tensor == element).any())


def _assertion(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """torch._assert or _assert_async of a tensor: a check wherever it is called."""
    condition = args[0] if args else kwargs.get("condition", kwargs.get("input"))
    message = args[1] if len(args) > 1 else kwargs.get("message", kwargs.get("assert_msg", ""))
    if not isinstance(condition, Tensor) or has_constant(condition):
        return ASK
    value = questions.value(condition)
    if value is not None:
        with real_values():
            return func(value, message)  # as torch spells it where there is none
    place, _ = place_of(asker())
    torch.ops.aten._assert_async.msg(condition.detach().reshape(()), f"{ERROR}{place}: AssertionError: {message}")
    return None


def _gaussian_nll(questions: Knowledge, func: Any, args: Any, kwargs: Any) -> Any:
    """F.gaussian_nll_loss, which tests its variance in Python, and then clamps it without a gradient of its own."""
    if len(args) != 3 or not isinstance(args[2], Tensor) or args[2].shape != args[0].shape:
        return ASK
    prediction, target, variance = args
    place, _ = place_of(asker())
    holds = torch.logical_not((variance.detach() < 0).any())
    torch.ops.aten._assert_async.msg(holds, f"{ERROR}{place}: ValueError: var has negative entry/entries")
    variance = variance + (variance.clamp(min=kwargs.get("eps", 1e-6)) - variance).detach()
    loss = 0.5 * (torch.log(variance) + (prediction - target) ** 2 / variance)
    if kwargs.get("full", False):
        loss = loss + 0.5 * math.log(2 * math.pi)
    reduction = kwargs.get("reduction", "mean")
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def both(*names: str) -> list[Any]:
    """torch's functions of these names, and its tensors' methods."""
    return [found for name in names for place in (torch, Tensor) if (found := getattr(place, name, None)) is not None]


ANSWERS: dict[Any, Handler] = {
    **dict.fromkeys((Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero), _truth),
    **dict.fromkeys((Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__), _number),
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.__array__), _numbers),
    **dict.fromkeys((Tensor.__repr__, Tensor.__format__), _words),
    **dict.fromkeys(both("equal", "allclose"), _alike),
    **dict.fromkeys(ASSERTIONS, _assertion),
    Tensor.__contains__: _contains,
    F.gaussian_nll_loss: _gaussian_nll,
}
