"""`module.to(x.device)` in forward: where every tensor is in one place, as in a trace, it changes nothing.

(Private torch API, kept in this file: `Module._apply`.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.capture.fake_twin import is_fake
from autopar.capture.real_values import real_values
from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError


@contextmanager
def moved_modules() -> Iterator[None]:
    """Inside, modules are moved to where they are."""
    before: Callable[..., nn.Module] = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if not any(map(is_fake, tensors)):
            return before(self, fn, recurse)
        if not all(_is_kept(fn, tensor) for tensor in tensors):
            raise CaptureError(
                f"{own_frame()}: forward gives the parameters of {type(self).__name__} another dtype, device or "
                "value; do so before the model is captured"
            )
        return self

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _is_kept(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    """Whether a function leaves alone what is like this tensor: asked of one with a value of its own."""
    with real_values():
        probe = torch.ones((1,) * tensor.dim(), dtype=tensor.dtype)
        return fn(probe) is probe and bool(probe.eq(1).all())
