"""Which contexts of autograd would a trace forget? `inference_mode` becomes `no_grad`, hooks on saved tensors an error.

What torch's own hooks on saved tensors do (checkpointing, offloading) leaves gradients as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import inference_mode
from torch.autograd.graph import saved_tensors_hooks

from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError


@contextmanager
def grad_modes() -> Iterator[None]:
    """Inside, a trace sees where gradients stop."""
    before = inference_mode.__enter__, inference_mode.__exit__, saved_tensors_hooks.__enter__
    entered: list[Any] = []

    def enter(own: Any) -> None:
        entered.append(torch.set_grad_enabled(False if own.mode else torch.is_grad_enabled()))
        entered[-1].__enter__()

    def leave(own: Any, *error: Any) -> None:
        entered.pop().__exit__(*error)

    def hooks(own: Any) -> None:
        if not type(own).__module__.startswith("torch.") or type(own) is saved_tensors_hooks:
            raise CaptureError(
                f"{own_frame()}: hooks on saved tensors are not captured, which may change gradients; leave them out, "
                "a plan decides what is kept"
            )
        before[2](own)

    inference_mode.__enter__, inference_mode.__exit__ = enter, leave  # type: ignore[method-assign]
    saved_tensors_hooks.__enter__ = hooks  # type: ignore[method-assign]
    try:
        yield
    finally:
        inference_mode.__enter__, inference_mode.__exit__ = before[:2]  # type: ignore[method-assign]
        saved_tensors_hooks.__enter__ = before[2]  # type: ignore[method-assign]
