"""Checks of torch.distributions that look at symmetry before they look further: in a trace they look at both.

`if not symmetric.all(): return symmetric` is a branch, after which either result is only asked whether all of it holds.
The two joined hold where both do, so that a trace needs no branch. (Private torch API, kept in this file: constraints.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

_SYMMETRIC: Any = type(constraints.symmetric)
_JOINED: dict[Any, Any] = {
    _SYMMETRIC: lambda x: torch.isclose(x, x.mT, atol=1e-6).all(-2).all(-1),
    type(constraints.positive_definite): lambda x: torch.linalg.cholesky_ex(x).info.eq(0),
    type(constraints.positive_semidefinite): lambda x: torch.linalg.eigvalsh(x).ge(0).all(-1),
}


@contextmanager
def symmetric_checks() -> Iterator[None]:
    """Inside, these checks do not branch."""
    before = {kind: kind.check for kind in _JOINED}

    def joined(kind: Any) -> Any:
        def check(self: Any, value: Tensor) -> Tensor:
            value = value.detach()
            holds: Tensor = super(kind, self).check(value)
            if value.shape[-1] != value.shape[-2]:
                return holds
            return torch.logical_and(holds, _JOINED[kind](value))

        return check

    try:
        for kind in _JOINED:
            kind.check = joined(kind)
        yield
    finally:
        for kind, own in before.items():
            kind.check = own
