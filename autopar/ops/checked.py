"""A check of values that the model itself makes: it runs with the step, on the part of the values that a rank has."""

import warnings

import torch
from torch import Tensor

from autopar.errors import DataCheckError

ERROR, WARNING = "autopar error ", "autopar warning "
"""How the message of an assertion in a captured graph begins, that is a check of the model's."""


def checked(x: Tensor, failures: Tensor, *, message: str) -> Tensor:
    """`x`, after a look at how many values on this rank fail the check.

    failures: a count, perhaps a summand of the whole one: it is never negative, so that it is zero on every rank or the
        check fails. message: what kind of complaint, and which.

    Raises:
        DataCheckError: if there are any and the model raises an error then; a warning is issued where it only tells.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(failures == 0, message.removeprefix(ERROR))
    elif not failures.is_meta and failures.item() > 0:
        if message.startswith(WARNING):
            warnings.warn(message.removeprefix(WARNING), stacklevel=2)
        else:
            raise DataCheckError(message.removeprefix(ERROR))
    return x
