"""How is a module run without a trace? What a step may change of it is put back: values, gradients, attributes, seeds.

The module itself runs, not a copy: copies lose hooks of parameters, and some modules cannot be copied.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor, nn

from autopar.capture.python_state import Snapshot
from autopar.capture.reached import TABLES, Reached


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the module runs as it likes; after, its tensors, their gradients, the state of Python that it reaches,
    and the random generators of torch, NumPy and Python, are what they were."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    storages = {key: tensor.data for key, tensor in tensors.items()}
    values = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    gradients = {key: tensor.grad for key, tensor in tensors.items()}
    needs = {key: tensor.requires_grad for key, tensor in tensors.items()}
    kept = {key: dict(vars(tensor)) for key, tensor in tensors.items()}
    attributes = Snapshot(Reached.of(model))
    tables = [(vars(module)[name], dict(vars(module)[name])) for module in model.modules() for name in TABLES]
    python, numbers = random.getstate(), numpy.random.get_state()
    for tensor in tensors.values():
        tensor.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        attributes.restore()
        for table, content in tables:
            table.clear()
            table.update(content)
        with torch.no_grad():
            for key, tensor in tensors.items():
                if tensor.requires_grad != needs[key]:
                    tensor.requires_grad_(needs[key])
                if tensor.layout is not torch.strided:
                    tensor.data = values[key]
                elif not _same(tensor, storages[key]) or not torch.equal(tensor, values[key]):
                    tensor.data = storages[key].copy_(values[key])
                tensor.grad = gradients[key]
                vars(tensor).clear()
                vars(tensor).update(kept[key])


def _same(tensor: Tensor, storage: Tensor) -> bool:
    """Whether a tensor still is what it was, but for values."""
    return tensor.data_ptr() == storage.data_ptr() and tensor.shape == storage.shape and tensor.dtype == storage.dtype
