"""Which part of a batch is this rank's? Input layouts say; dims given whole are sliced, slices taken as they are."""

from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from autopar.errors import BatchError
from autopar.graph import InputSpec
from autopar.inputs import flatten_inputs
from autopar.placement import Layout, local_ranges, local_shape

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule


def local_input(module: "DistributedModule", spec: InputSpec, value: Tensor) -> Tensor:
    """This rank's part of an input as the graph wants it, on its device; dims of local size are taken as slices.

    Raises:
        BatchError: if a dim has neither the planned size nor this rank's.
    """
    layout, mesh = module.plan.layouts[spec.placeholder], module.plan.mesh
    padded = local_shape(spec.shape, layout, mesh)
    ranges = local_ranges(spec.shape, layout, mesh, mesh.coordinate(module.groups.rank))
    allowed = [(whole, mine, true) for whole, mine, (_, true) in zip(spec.shape, padded, ranges, strict=True)]
    if value.dim() != len(spec.shape) or any(n not in sizes for n, sizes in zip(value.shape, allowed, strict=True)):
        raise BatchError(
            f"input {spec.path} has shape {tuple(value.shape)}; the plan is for the global batch {spec.shape}, of "
            f"which each rank takes {padded}; give one of the two (drop_last=True for a short last batch) or plan again"
        )
    part = value
    for dim, (start, length) in enumerate(ranges):
        if value.shape[dim] == spec.shape[dim]:
            part = part.narrow(dim, start, length)
    part = part.to(device=module.device, dtype=spec.dtype)
    if tuple(part.shape) == padded:
        return part.contiguous()
    out = part.new_zeros(padded)
    out[tuple(slice(n) for n in part.shape)] = part
    return out


def local_batch(module: "DistributedModule", batch: Any) -> Any:
    """Slices of a global batch in the batch's own structure; what is no input of the model stays as it is."""
    args, kwargs = (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((), batch)
    if isinstance(batch, Tensor):
        args, kwargs = (batch,), {}
    leaves, rebuild = flatten_inputs(args, kwargs)
    specs = {spec.path: spec for spec in module.local.captured.inputs}
    taken = [local_input(module, specs[path], leaf) if path in specs else leaf for path, leaf in leaves]
    new_args, new_kwargs = rebuild(taken)
    if isinstance(batch, Tensor):
        return new_args[0]
    return type(batch)(new_args) if isinstance(batch, (tuple, list)) else {key: new_kwargs[key] for key in batch}


class DistributedBatchSampler(Sampler[list[int]]):
    """Indices of this rank's rows of each global batch, for `DataLoader(dataset, batch_sampler=...)`.

    Global batch k has the rows `order[k * B : (k + 1) * B]` that one process would take, in an order of
    (seed, epoch) if shuffled; a short last batch is dropped. Ranks that compute on the same rows load the same rows.

    Raises:
        BatchError: if the inputs are not all split alike in their first dim, or the dataset has no whole batch.
    """

    def __init__(self, dataset: Sized, module: "DistributedModule", *, shuffle: bool = True, seed: int = 0) -> None:
        self.num_samples = len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.batch, self.start, self.length = _rows(module)
        if self.num_samples < self.batch:
            raise BatchError(
                f"the dataset has {self.num_samples} samples, fewer than the planned global batch of {self.batch}; "
                "plan for a smaller batch"
            )

    def set_epoch(self, epoch: int) -> None:
        """Another order for another epoch, the same on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for first in range(0, len(self) * self.batch, self.batch):
            yield list(order[first + self.start : first + self.start + self.length])


def _rows(module: "DistributedModule") -> tuple[int, int, int]:
    """Global batch size, and start and number of this rank's rows."""
    mesh, found = module.plan.mesh, {}
    for spec in module.local.captured.inputs:
        if spec.shape:
            layout: Layout = module.plan.layouts[spec.placeholder]
            ranges = local_ranges(spec.shape, layout, mesh, mesh.coordinate(module.groups.rank))
            found[spec.path] = (spec.shape[0], *ranges[0])
    if len(set(found.values())) != 1:
        rows = ", ".join(f"{path}: {length} of {batch}" for path, (batch, _, length) in found.items())
        raise BatchError(
            f"the plan does not split all inputs alike by batch (rows a rank: {rows}); load global batches and call "
            "the module with them, or slice them with module.local_batch"
        )
    return next(iter(found.values()))
