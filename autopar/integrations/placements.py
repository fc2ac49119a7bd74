"""Where does a plan have each tensor, by the names that a user knows? And what does DTensor call that?

| here | DTensor | spmd_types |
|---|---|---|
| Shard(d) | Shard(d), _StridedShard where a later mesh axis splits first | V, and the axis at d of the PartitionSpec |
| Replicate | Replicate, its gradient Partial | R |
| Invariant | Replicate, its gradient Replicate | I |
| Partial | Partial(sum) | P |

`spmd_types` is exchanged in `autopar.integrations.spmd`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.api.model_plan import ModelPlan
from autopar.errors import ArgumentError
from autopar.runtime.parameters import torch_placements
from autopar.runtime.variant import ends_of
from autopar.values.mesh import Mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Partial, Placement, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLayouts:
    """Where a plan has the tensors at its borders, on the mesh of one pipeline rank.

    parameters: by every qualified name, as they are stored.
    inputs: by keyword or position (`input_ids`, `0`), of one micro-batch.
    outputs: the loss of a step, as `loss`.
    num_dims: dims of each, by the same names.
    """

    mesh: Mesh
    parameters: dict[str, Layout]
    inputs: dict[str, Layout]
    outputs: dict[str, Layout]
    num_dims: dict[str, int]


def named_layouts(plan: ModelPlan) -> NamedLayouts:
    """The layouts of a plan's parameters, inputs and outputs.

    Raises:
        PlanMismatchError: if the plan was loaded and is not bound to a model (`plan.bind(model)`).
    """
    parameters: dict[str, Layout] = {}
    inputs: dict[str, Layout] = {}
    num_dims: dict[str, int] = {}
    for part, stage in zip(plan.parts, plan.stages, strict=True):
        for parameter in part.parameters:
            for name in parameter.names:
                parameters[name], num_dims[name] = stage.layouts[parameter.placeholder], len(parameter.shape)
        for given in part.inputs[: len(part.inputs) - len(part.received)]:
            inputs[given.path], num_dims[given.path] = stage.layouts[given.placeholder], len(given.shape)
    layout, shape, _ = ends_of(plan.locals[-1])[0]
    num_dims["loss"] = len(shape)
    return NamedLayouts(
        mesh=plan.mesh, parameters=parameters, inputs=inputs, outputs={"loss": layout}, num_dims=num_dims
    )


def to_dtensor(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """DTensor's placement on each mesh axis; of what the gradient is, DTensor's `grad_placements` say more
    (`gradient_to_dtensor`).

    Args:
        layout: of a tensor on `mesh`.
    """
    placed = torch_placements(layout, mesh)
    pairs = zip(layout.axes, placed, strict=True)
    return tuple(TorchPartial() if isinstance(own, Partial) else theirs for own, theirs in pairs)


def gradient_to_dtensor(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """DTensor's placement of the gradient on each mesh axis: Partial for Replicate, whole for Invariant and Partial.

    Args:
        layout: of the tensor itself.
    """
    placed = torch_placements(layout, mesh)
    pairs = zip(layout.axes, placed, strict=True)
    return tuple(TorchPartial() if own == REPLICATE else theirs for own, theirs in pairs)


def from_dtensor(
    placements: Sequence[TorchPlacement], mesh: Mesh, gradients: Sequence[TorchPlacement] | None = None
) -> Layout:
    """The layout that DTensor's placements say.

    Args:
        placements: one a mesh axis.
        mesh: the plan's; axes in the order of the DeviceMesh.
        gradients: those of the gradient; a Replicate whose gradient is Partial is Replicate here, else Invariant, which
            is what DTensor does where nothing is said.

    Raises:
        ArgumentError: for placements that no layout has.
    """
    if len(placements) != mesh.num_axes or (gradients is not None and len(gradients) != mesh.num_axes):
        raise ArgumentError(f"{len(placements)} placements for mesh {mesh}; give one an axis")
    axes = tuple(
        _placement(one, None if gradients is None else gradients[axis], axis) for axis, one in enumerate(placements)
    )
    for order in _orders(axes):
        layout = Layout(axes, order)
        if torch_placements(layout, mesh) == tuple(
            TorchReplicate() if isinstance(one, TorchPartial) else one for one in placements
        ):
            return layout
    raise ArgumentError(f"no order of splits on mesh {mesh} gives the placements {list(placements)}")


def _placement(one: Any, gradient: TorchPlacement | None, axis: int) -> Placement:
    if isinstance(one, TorchReplicate):
        return REPLICATE if isinstance(gradient, TorchPartial) else INVARIANT
    if isinstance(one, TorchPartial):
        if one.reduce_op != "sum":
            raise ArgumentError(f"mesh axis {axis} has {one}; a plan knows partial sums only")
        return PARTIAL
    dim = getattr(one, "dim", -1)  # Shard and _StridedShard have one
    if dim < 0:
        raise ArgumentError(f"mesh axis {axis} has {one}; give Shard with a dim from 0, Replicate or Partial")
    return Shard(dim)


def _orders(axes: tuple[Placement, ...]) -> list[tuple[int, ...]]:
    """Every order in which the axes can split, that of the mesh first."""
    dims = sorted({p.dim for p in axes if isinstance(p, Shard)})
    groups = [[axis for axis, p in enumerate(axes) if p == Shard(dim)] for dim in dims]
    return [tuple(a for group in choice for a in group) for choice in product(*(permutations(g) for g in groups))]
