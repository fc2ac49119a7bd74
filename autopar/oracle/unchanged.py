"""How is a module run without a trace? What a step may change of it is put back: values, gradients, attributes, seeds.

The module itself runs, not a copy: copies lose hooks of parameters, and some modules cannot be copied.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the module runs as it likes; after, its tensors, gradients and attributes, and the random generators of
    torch, NumPy and Python, are what they were."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    storages = {key: tensor.data for key, tensor in tensors.items()}
    values = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    gradients = {key: tensor.grad for key, tensor in tensors.items()}
    needs = {key: tensor.requires_grad for key, tensor in tensors.items()}
    attributes = [(module, dict(vars(module)), _contents(vars(module))) for module in model.modules()]
    python, numbers = random.getstate(), numpy.random.get_state()
    for tensor in tensors.values():
        tensor.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        for module, table, contents in attributes:
            vars(module).clear()
            vars(module).update(table)
            for holder, content in contents:
                _refill(holder, content)
        with torch.no_grad():
            for key, tensor in tensors.items():
                if tensor.requires_grad != needs[key]:
                    tensor.requires_grad_(needs[key])
                if tensor.layout is not torch.strided:
                    tensor.data = values[key]
                elif not _same(tensor, storages[key]) or not torch.equal(tensor, values[key]):
                    tensor.data = storages[key].copy_(values[key])
                tensor.grad = gradients[key]


def _contents(table: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Containers among attributes, the tables of parameters, buffers and modules too, each with a shallow copy."""
    found: list[tuple[Any, Any]] = []
    for value in table.values():
        if isinstance(value, CONTAINERS) and not isinstance(value, Tensor):
            try:
                found.append((value, copy.copy(value)))
            except Exception:  # a container that cannot be copied is left to itself
                continue
    return found


def _refill(holder: Any, content: Any) -> None:
    if isinstance(holder, list):
        holder[:] = content
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(content)
    else:
        holder.clear()
        holder.update(content)


def _same(tensor: Tensor, storage: Tensor) -> bool:
    """Whether a tensor still is what it was, but for values."""
    return tensor.data_ptr() == storage.data_ptr() and tensor.shape == storage.shape and tensor.dtype == storage.dtype
