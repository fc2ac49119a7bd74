"""How is a model traced without memory? Its tensors are exchanged for fake ones of the same shape while it is traced.

Fake tensors pretend to live on the CPU, so that `torch.arange(n)` or `torch.tensor([...])` inside a forward, which
say no device, work for models that stand on the meta device, the CPU or a GPU alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import CaptureError


@contextmanager
def fake_twin(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Parameters and buffers of `model` are fake inside the `with`, and the very same objects again after it.

    What forward registers inside is gone after it too. Tied tensors stay tied. Plain tensor attributes keep their
    values (they become constants), unless they have none.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, export=True, shape_env=ShapeEnv(tracked_fakes=[]))
    twins: dict[int, Tensor] = {}
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    registered = [(table, table.copy()) for module in model.modules() for table in _registered(module)]

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            with mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            twins[id(tensor)] = fake
        return twins[id(tensor)]

    try:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for table in tables:
                for key, value in list(table.items()):
                    if not isinstance(value, Tensor) or (table is vars(module) and not value.is_meta):
                        continue
                    saved.append((table, key, value))
                    table[key] = twin(value)
        yield mode
        before = {id(own): content for own, content in registered}
        for module in model.modules():
            known = before.get(id(module._parameters), module._parameters)
            if made := module._parameters.keys() - known.keys():
                raise CaptureError(
                    f"forward of {type(module).__name__} makes the parameter {min(made)!r}, which training would not "
                    "see; call the model once before planning"
                )
    finally:
        for own, content in registered:
            own.clear()
            own.update(content)
        for table, key, value in saved:
            table[key] = value


def _registered(module: nn.Module) -> tuple[Any, ...]:
    """The tables of a module's own parameters, buffers and modules."""
    return module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set


def new_inputs(mode: FakeTensorMode, tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, ...]:
    """One fake tensor an input, so that `labels=input_ids` does not tie the two."""
    with mode:
        return tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for _, tensor in tensors)


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def fake_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake tensors of a mode of their own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def has_value(tensor: Tensor) -> bool:
    """Is there data behind a tensor, neither fake nor meta?"""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def has_constant(tensor: Tensor) -> bool:
    """Does a tensor answer questions about its value itself?"""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def device_of(tensor: Tensor) -> torch.device | None:
    """Where a fake tensor pretends to live, without a dispatch; None for others."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else None
