"""Which part of a batch is this rank's? Input layouts say. A call gives the global batch, or says that it does not."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler

from autopar.errors import BatchError
from autopar.ops.groups import Groups
from autopar.values.graph import InputSpec
from autopar.values.inputs import flatten_inputs
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, local_ranges, local_shape
from autopar.values.stage_plan import StagePlan


class Ranked(Protocol):
    """What runs on this rank: a whole module, or a stage of one."""

    @property
    def groups(self) -> Groups: ...
    @property
    def device(self) -> torch.device: ...


class Distributed(Ranked, Protocol):
    """A module without stages, as batches see it."""

    @property
    def plan(self) -> StagePlan: ...
    @property
    def inputs(self) -> tuple[InputSpec, ...]: ...


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's slices of a global batch: a dict (keywords), a tuple (positions) or one tensor, in place of a call's
    arguments. Rows are the rank's, micro-batch after micro-batch; other dims are its slice or whole."""

    batch: Any


def split_batch(specs: Sequence[InputSpec], count: int, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The `count` micro-batches of a step: inputs by placeholder cut along their first dim, whole or this rank's.

    Raises:
        BatchError: if the number of micro-batches does not divide an input.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for spec in specs:
        value = inputs[spec.placeholder]
        if value.dim() and value.shape[0] % count:
            rows = spec.shape[0] * count
            raise BatchError(
                f"input {spec.path} has {value.shape[0]} samples, which {count} micro-batches do not divide; the "
                f"plan is for a global batch of {rows} samples"
            )
        for part, piece in zip(parts, value.chunk(count) if value.dim() else [value] * count, strict=True):
            part[spec.placeholder] = piece
    return parts


def local_input(module: Ranked, plan: StagePlan, spec: InputSpec, value: Tensor, *, is_local: bool = False) -> Tensor:
    """This rank's part of an input as the graph wants it, on its device.

    is_local: rows are this rank's, and other dims of its size too.

    Raises:
        BatchError: if the input has another shape.
    """
    if value.is_meta or not _is_kind(value.dtype, spec.dtype):
        raise BatchError(
            f"input {spec.path} is a {value.dtype} on the {value.device} device; the plan is for {spec.dtype} with "
            "values; give that"
        )
    padded, ranges, local = _own_part(spec.shape, plan.layouts[spec.placeholder], plan.mesh, module.groups.rank)
    allowed: list[tuple[int, ...]] = [(n,) for n in spec.shape]
    if is_local:
        allowed = [own if dim == 0 else (*own, n) for dim, (own, n) in enumerate(zip(local, spec.shape, strict=True))]
    if value.dim() != len(spec.shape) or any(n not in sizes for n, sizes in zip(value.shape, allowed, strict=True)):
        count = plan.microbatches
        part, size = (f" in each of {count} parts", "micro-batch") if count > 1 else ("", "global batch")
        wanted = f"of which this rank's slices ({padded}) were to be given" if is_local else "which every rank gives"
        raise BatchError(
            f"input {spec.path} has shape {tuple(value.shape)}{part}; the plan is for the {size} {spec.shape}, "
            f"{wanted}; give that (a rank's own slices as autopar.LocalBatch(batch), drop_last=True for a short last "
            "batch) or plan again"
        )
    own = value
    for dim, (start, length) in enumerate(ranges):
        if value.shape[dim] not in local[dim]:
            own = own.narrow(dim, start, length)
    own = own.to(device=module.device, dtype=spec.dtype)
    if tuple(own.shape) == padded:
        return own.contiguous()
    out = own.new_zeros(padded)
    out[tuple(slice(n) for n in own.shape)] = own
    return out


def _is_kind(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast keeps what is meant: of floats to floats, of whole numbers to whole numbers."""
    if given.is_floating_point or given.is_complex or given == torch.bool:
        return given == wanted or (given.is_floating_point and wanted.is_floating_point)
    return not (wanted.is_floating_point or wanted.is_complex or wanted == torch.bool)


@lru_cache(maxsize=4096)
def _own_part(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """A rank's padded shape, (start, length) of what it truly holds, and the sizes that its slice may have."""
    padded = local_shape(shape, layout, mesh)
    ranges = local_ranges(shape, layout, mesh, mesh.coordinate(rank))
    return padded, ranges, tuple((mine, true) for mine, (_, true) in zip(padded, ranges, strict=True))


def local_batch(module: Distributed, batch: Any) -> LocalBatch:
    """Slices of a global batch in the batch's own structure; what is no input of the model stays as it is.

    They follow each other as the micro-batches do.
    """
    if isinstance(batch, LocalBatch):
        return batch
    args, kwargs = arguments_of(batch)
    leaves, rebuild = flatten_inputs(args, kwargs)
    specs = {spec.path: spec for spec in module.inputs}
    taken = [local_samples(module, specs[path], leaf) if path in specs else leaf for path, leaf in leaves]
    new_args, new_kwargs = rebuild(taken)
    if isinstance(batch, Tensor):
        return LocalBatch(new_args[0])
    return LocalBatch(new_args if isinstance(batch, (tuple, list)) else {key: new_kwargs[key] for key in batch})


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that a batch is for: a mapping is keywords, a tuple or list positions, a tensor the only position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def local_samples(module: Distributed, spec: InputSpec, value: Tensor) -> Tensor:
    """This rank's part of one input of a step, micro-batch after micro-batch."""
    count = module.plan.microbatches
    if count == 1 or not value.dim():
        return local_input(module, module.plan, spec, value)
    if value.shape[0] % count:
        raise BatchError(f"input {spec.path} has {value.shape[0]} samples, which {count} micro-batches do not divide")
    return torch.cat([local_input(module, module.plan, spec, part) for part in value.chunk(count)])


class DistributedBatchSampler(Sampler[list[int]]):
    """Indices of this rank's rows of each global batch, for `DataLoader(dataset, batch_sampler=...)`.

    Global batch k has the rows `order[k * B : (k + 1) * B]` that one process would take, in an order of
    (seed, epoch) if shuffled; a short last batch is dropped. Ranks that compute on the same rows load the same rows.
    Its state counts global batches that were taken, so that it goes on under another plan and number of ranks; a loader
    with workers takes batches ahead of training, and keeps the position itself if it is a stateful one.

    Raises:
        BatchError: if the inputs are not all split alike in their first dim, or the dataset has no whole batch.
    """

    def __init__(self, dataset: Sized, module: Distributed, *, shuffle: bool = True, seed: int = 0) -> None:
        self.num_samples = len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._taken = self._first = 0
        microbatch, self.start, self.length = _rows(module)
        self.batch, self.microbatch = microbatch * module.plan.microbatches, microbatch
        if self.num_samples < self.batch:
            raise BatchError(
                f"the dataset has {self.num_samples} samples, fewer than the planned global batch of {self.batch}; "
                "plan for a smaller batch"
            )

    def set_epoch(self, epoch: int) -> None:
        """Another order for another epoch, the same on every rank."""
        if epoch != self.epoch:
            self.epoch, self._taken, self._first = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch the next batch is."""
        return {"epoch": self.epoch, "taken": self._taken, "seed": self.seed, "batch": self.batch}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next iteration begin where the state says.

        Raises:
            BatchError: if it counts batches of another size.
        """
        if state_dict["batch"] != self.batch:
            raise BatchError(
                f"the state counts global batches of {state_dict['batch']} samples, the plan is for {self.batch}; "
                "begin an epoch anew, or plan for the batch that was trained on"
            )
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]
        self._taken = self._first = state_dict["taken"]

    def __len__(self) -> int:
        return self.num_samples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        begin, self._first = self._first, 0
        for number in range(begin, len(self)):
            self._taken = number + 1
            first = number * self.batch
            starts = range(first + self.start, first + self.batch, self.microbatch)
            yield [index for start in starts for index in order[start : start + self.length]]


def _rows(module: Distributed) -> tuple[int, int, int]:
    """Size of a micro-batch, and start and number of this rank's rows of it."""
    mesh, found = module.plan.mesh, {}
    for spec in module.inputs:
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
