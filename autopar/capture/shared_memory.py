"""Do parameters and buffers share memory without being the same tensor? A step would change one by another."""

from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopar.capture.import_program import by_identity
from autopar.errors import CaptureError


def check_shared_memory(model: nn.Module) -> None:
    """Raises CaptureError if a parameter overlaps with another parameter or with a buffer.

    Parts of one storage that do not overlap (flattened weights of an RNN) are no matter.
    """
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    parameters = {id(parameter) for parameter in model.parameters()}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for names, tensor in by_identity(named):
        if tensor.layout is not torch.strided or is_lazy(tensor):
            continue
        groups.setdefault(tensor.untyped_storage()._cdata, []).append((names[0], tensor))
    for group in groups.values():
        for (name, one), (other, two) in combinations(group, 2):
            if parameters & {id(one), id(two)} and _overlap(one, two):
                raise CaptureError(
                    f"{other} of {type(model).__name__} shares memory with {name}, so that a step changes both; "
                    "give one of them a clone(), or make them the same tensor"
                )


def _overlap(one: Tensor, two: Tensor) -> bool:
    spans = []
    for tensor in (one, two):
        begin = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
