"""Does forward keep state on parameters and buffers, as attributes of Python's (`weight.average = ...`)?

A trace runs on others in their place, which have none. Plain values (a flag, a name) are read from the tensors
themselves; what else is read, or is set, is state that no graph keeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import _getframe
from typing import Any

from torch import Tensor, nn

from autopar.capture.user_frame import is_machinery, own_frame
from autopar.errors import CaptureError

_PLAIN = (type(None), bool, int, float, str)


class TensorAttributes:
    """What a model's parameters and buffers have besides their values."""

    def __init__(self, model: nn.Module) -> None:
        self.held = {name: dict(vars(tensor)) for name, tensor in _named(model)}

    @contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Inside, tensors in the place of the model's show plain attributes of those, and others are refused."""
        names = {id(tensor): name for name, tensor in _named(model)}

        def read(tensor: Tensor, attribute: str) -> Any:
            """An attribute that a tensor lacks."""
            held = self.held.get(names.get(id(tensor), ""), {})
            if attribute not in held:
                raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {attribute!r}")
            if not isinstance(held[attribute], _PLAIN):
                raise _refused(names[id(tensor)], attribute, "reads")
            return held[attribute]

        def write(tensor: Tensor, attribute: str, value: Any) -> None:
            is_own = id(tensor) in names and not hasattr(type(tensor), attribute)
            if is_own and not is_machinery(Path(_getframe(1).f_code.co_filename)):
                raise _refused(names[id(tensor)], attribute, "sets")
            object_setattr(tensor, attribute, value)

        object_setattr = Tensor.__setattr__
        Tensor.__getattr__, Tensor.__setattr__ = read, write  # type: ignore[attr-defined, method-assign, assignment]
        try:
            yield
        finally:
            del Tensor.__getattr__, Tensor.__setattr__  # type: ignore[attr-defined]


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _refused(name: str, attribute: str, does: str) -> CaptureError:
    return CaptureError(
        f"{own_frame()}: forward {does} the attribute {attribute!r} of {name}, state that no captured graph keeps; "
        "keep it in a buffer of the module (`self.register_buffer`)"
    )
