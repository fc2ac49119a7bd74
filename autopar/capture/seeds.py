"""Does forward seed torch's generators, or set what they go on from? A captured graph has no place for that.

Machinery of torch's that does so for itself (checkpointing, tracing) is let through. (Private torch API: none but the
generator that `torch.random` names, and the code of `torch.cuda`'s functions.)
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autopar.capture.user_frame import is_machinery, own_frame
from autopar.errors import CaptureError

_ASKED = {"manual_seed", "seed", "initial_seed", "get_state", "set_state"}
_OF_DEVICES = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
_BETWEEN = (
    *("torch/random.py", "torch/cuda/random.py", "torch/utils/_contextlib.py", "torch/_compile.py"),
    *("torch/_dynamo/eval_frame.py", "contextlib.py", "capture/seeds.py"),
)


@contextmanager
def seeds() -> Iterator[None]:
    """Inside, code of the user's that seeds torch's generators, or reads or sets their state, is refused."""
    functions = [getattr(torch.cuda.random, name) for name in _OF_DEVICES]
    codes = [function.__code__ for function in functions]
    with mock.patch.object(torch.random, "default_generator", _Guarded(torch.default_generator)):
        try:
            for function in functions:
                function.__code__ = _of_device.__code__
            yield
        finally:
            for function, code in zip(functions, codes, strict=True):
                function.__code__ = code


class _Guarded:
    """A generator whose state only machinery asks for or sets."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            refuse_users()
        return getattr(self._generator, name)


def refuse_users() -> None:
    """Raises CaptureError where code of the user's, through functions of torch's generators, brought us here."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    if not is_machinery(Path(frame.f_code.co_filename)):
        raise CaptureError(
            f"{own_frame()}: forward seeds torch's random generator, or reads or sets its state, as no captured graph "
            "does; draw what is needed twice once, as a tensor, and seed outside of the model"
        )


def _of_device(*args: Any, **kwargs: Any) -> None:
    from autopar.capture.seeds import refuse_users

    refuse_users()
