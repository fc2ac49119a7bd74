"""How is a parameter stored over the ranks? As a DTensor, so that optimizers, clipping and checkpoints know it.

Invariant and Replicate are DTensor's Replicate. A dim split by several axes in another order than the mesh's (a later
axis outermost, as tensor parallelism with FSDP inside) is `_StridedShard` on the axes that come later in the nesting:
declared as plain Shards, `full_tensor()` would be silently permuted. Uneven sizes are stored as DTensor stores them:
chunks of ceil(size / n), the last ones shorter or empty, no padding.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import ArgumentError
from autopar.runtime.parts import HeldPart
from autopar.runtime.private_torch import strided_shard
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, Shard, local_ranges, local_shape

MARK = "autopar_name"
"""Attribute that tells our parameters from others."""

STAGE = "autopar_stage"
"""Attribute of those beside which other ranks have others."""


def torch_placements(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """DTensor's placements for storage in `layout`."""
    out: list[TorchPlacement] = []
    for axis, placement in enumerate(layout.axes):
        if not isinstance(placement, Shard):
            out.append(TorchReplicate())
            continue
        nested = layout.axes_of(placement.dim)
        outer = nested[: nested.index(axis)]
        factor = math.prod(mesh.shape[a] for a in outer if a > axis)
        out.append(strided_shard(placement.dim, factor) if factor > 1 else TorchShard(placement.dim))
    return tuple(out)


def local_part(whole: Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Tensor:
    """A view of what the rank at `coordinate` stores of `whole`, without padding."""
    for dim, (start, length) in enumerate(local_ranges(tuple(whole.shape), layout, mesh, coordinate)):
        whole = whole.narrow(dim, start, length)
    return whole


def padded_part(whole: Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Tensor:
    """What the rank at `coordinate` holds of `whole` in the graph: equal chunks, zeros beyond the true size."""
    part = local_part(whole, layout, mesh, coordinate)
    shape = local_shape(tuple(whole.shape), layout, mesh)
    if tuple(part.shape) == shape:
        return part.contiguous()
    out = part.new_zeros(shape)
    out[tuple(slice(n) for n in part.shape)] = part
    return out


def to_dtensor(local: Tensor, layout: Layout, shape: tuple[int, ...], mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """A DTensor of global `shape` whose local tensor shares `local`'s storage."""
    return DTensor.from_local(
        local,
        device_mesh,
        torch_placements(layout, mesh),
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def register_under(root: nn.Module, name: str, value: nn.Parameter | Tensor, persistent: bool = True) -> None:
    """Register a parameter or buffer under its qualified name, on plain containers that mirror the original modules."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, HeldPart())
        child = root._modules[part]
        assert child is not None
        root = child
    if isinstance(value, nn.Parameter):
        root.register_parameter(leaf, value)
    else:
        root.register_buffer(leaf, value, persistent=persistent)


def has_name(root: nn.Module, name: str) -> bool:
    """Whether a parameter or buffer of that qualified name is registered."""
    *path, leaf = name.split(".")
    for part in path:
        child = root._modules.get(part)
        if child is None:
            return False
        root = child
    return leaf in root._parameters or leaf in root._buffers


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raises ArgumentError if the model calls a part of its own as the distributed module calls one of its methods."""
    clash = sorted({name.split(".")[0] for name in names} & set(taken))
    if clash:
        raise ArgumentError(
            f"the model has an attribute {clash[0]!r}, which the distributed module needs for itself; rename it"
        )
