"""A collective in two calls: one starts it, one waits for what it brings. Backward starts where forward waited.

Autograd runs backward in the reverse order of the forward's calls. So the second call's backward starts the collective
of the gradient, the first call's waits for it, and whatever stands between the two runs beside it, in both passes.
What each does to a value and to its gradient is its row of `ops.traced.ROWS`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.ops.collectives import Arrive, begin_exchange, begin_gather, begin_scatter_sum, begin_sum
from autopar.ops.groups import Groups, active_groups, names_of
from autopar.ops.traced import LOCALS, ROWS, numbers_of

Begin = Callable[[Tensor], Arrive]

_BEGIN: dict[str, Callable[..., Arrive]] = {
    "gather": begin_gather,
    "scatter_sum": begin_scatter_sum,
    "sum": begin_sum,
    "exchange": begin_exchange,
}


class Started:
    """A collective on its way. token: stands for its value in autograd; arrive: waits for the value, once."""

    __slots__ = ("arrive", "arrive_back", "back", "there", "token")

    def __init__(self, there: Begin, back: Begin) -> None:
        self.there, self.back = there, back
        self.arrive: Arrive | None = None
        self.arrive_back: Arrive | None = None
        self.token: Tensor | None = None

    def taken(self) -> Tensor:
        arrive, self.arrive = self.arrive, None
        assert arrive is not None, "a collective is waited for once"
        return arrive()

    def taken_back(self) -> Tensor:
        arrive, self.arrive_back = self.arrive_back, None
        assert arrive is not None, "a gradient is waited for once"
        return arrive()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, started: Started) -> Tensor:
        ctx.started = started
        started.arrive = started.there(x)
        return x.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.started.taken_back(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, started: Started) -> Tensor:
        ctx.started = started
        return started.taken()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.started.arrive_back = ctx.started.back(gradients[0])
        return gradients[0].new_zeros(()), None  # says only when, the gradient itself is on its way


def start_collective(x: Tensor, collective: str, **keywords: Any) -> Started:
    """Begin what the function of that name of `autopar.ops.collectives` does to `x`."""
    groups = active_groups()
    axis = names_of(keywords.pop("axis"))
    there, back = ROWS[collective](x, **keywords)
    started = Started(_begin(there, axis, groups), _begin(back, axis, groups))
    started.token = _Start.apply(x, started)  # type: ignore[no-untyped-call]
    return started


def wait_collective(started: Started) -> Tensor:
    """What a collective that was started brings."""
    token, started.token = started.token, None
    out: Tensor = _Wait.apply(token, started)  # type: ignore[no-untyped-call]
    return out


def _begin(description: str, axis: tuple[str, ...], groups: Groups) -> Begin:
    """The start of a row's function; one that sends nothing is done at once."""
    kind = description.split(" ")[0]
    if kind == "same":
        return lambda x: x.detach

    def start(x: Tensor) -> Arrive:
        numbers = numbers_of(description)
        if kind in _BEGIN:
            return _BEGIN[kind](x, **numbers, axis=axis, groups=groups)
        done = LOCALS[kind](x, **numbers, axis=axis, groups=groups)
        return lambda: done

    return start
