"""How does one call of the user's become one node of a graph? As an op that tracing does not look into.

`torch.ops.autopar.opaque(tensors, number)` stands in a traced graph for call `number` of the `Opaques` that are active;
`import_program` puts the call itself there. (Private torch API: none but `torch.library`.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(slots=True, kw_only=True)
class Opaque:
    """A call: `run` makes its results on fake tensors.

    target: what stands in the graph, made when the trace is there. observes: it stands for what is done to the
    gradient of its one operand, whose every reader reads its result instead. constant: results without gradients.
    made: what `run` made, tensors and else.
    """

    run: Callable[..., Sequence[Tensor]]
    target: Callable[[], tuple[Any, tuple[Tensor, ...]]]
    key: Any
    observes: bool = False
    constant: tuple[int, ...] = ()
    made: Any = None


@dataclass(slots=True)
class Opaques:
    """The calls of one trace, alike ones once."""

    calls: list[Opaque] = field(default_factory=list)

    def call(self, tensors: Sequence[Tensor], own: Opaque) -> tuple[list[Tensor], Opaque]:
        """The results of a call, in the trace, and the first call that is alike."""
        for number, known in enumerate(self.calls):  # noqa: B007
            if type(known.key) is type(own.key) and known.key == own.key:
                break
        else:
            number = len(self.calls)
            self.calls.append(own)
        results: list[Tensor] = torch.ops.autopar.opaque(list(tensors), number)
        return results, self.calls[number]


_active: ContextVar[Opaques | None] = ContextVar("autopar_opaques", default=None)


def active_opaques() -> Opaques | None:
    return _active.get()


@contextmanager
def opaque_calls() -> Iterator[Opaques]:
    """Calls inside may be opaque."""
    own = Opaques()
    token = _active.set(own)
    try:
        yield own
    finally:
        _active.reset(token)


@torch.library.custom_op("autopar::opaque", mutates_args=())
def _opaque(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    raise AssertionError("stands in a traced graph only")


@_opaque.register_fake
def _(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    own = _called(number)
    with torch.no_grad():
        return [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in own.run(*tensors)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*(output[number] for number in _called(inputs[1]).constant))


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a call of the user's own backward cannot be differentiated while it is traced")


_opaque.register_autograd(_backward, setup_context=_setup)
OPAQUE = torch.ops.autopar.opaque.default
fx.node.has_side_effect(OPAQUE)  # a hook's result is read by nobody while it is traced


def _called(number: int) -> Opaque:
    own = _active.get()
    assert own is not None, "an opaque call outside its trace"
    return own.calls[number]
