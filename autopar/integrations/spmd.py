"""What is a layout in `spmd_types`? Its R, I, P are ours; S(d) is V, with the axis in the PartitionSpec.

`spmd_types` types a tensor on named mesh axes, and says as we do what its gradient is (R: Partial, I: the same, P: the
whole). Axes that split one dim together stand in one entry of the PartitionSpec, the outermost split first.
"""

from typing import Any

from autopar.api.model_plan import ModelPlan
from autopar.errors import ArgumentError
from autopar.integrations.packages import missing
from autopar.integrations.placements import NamedLayouts, named_layouts
from autopar.values.mesh import Mesh
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Invariant, Layout, Partial, Placement, Shard

try:
    import spmd_types as spmd
except ImportError as error:
    raise missing("spmd_types", error) from error

Typed = dict[str, dict[str, Any]]
"""`parameters`, `inputs` and `outputs`: a `spmd_types.SpmdType` by name."""


def to_spmd(layout: Layout, mesh: Mesh, num_dims: int) -> Any:
    """The `spmd_types.SpmdType` of a tensor, axes by name.

    Args:
        num_dims: of the tensor.
    """
    local = {name: _local(placement) for name, placement in zip(mesh.names, layout.axes, strict=True)}
    if not layout.sharded_dims():
        return spmd.SpmdType(local)
    entries = [tuple(mesh.names[axis] for axis in layout.axes_of(dim)) for dim in range(num_dims)]
    parts = (None if not names else names[0] if len(names) == 1 else names for names in entries)
    return spmd.SpmdType(local, spmd.PartitionSpec(*parts))


def from_spmd(typed: Any, mesh: Mesh, num_dims: int) -> Layout:
    """The layout that an `spmd_types.SpmdType` says.

    Args:
        typed: with axes by name; a split as S(d), or as V and a PartitionSpec.
        num_dims: of the tensor, for dims that are counted from the end.

    Raises:
        ArgumentError: if an axis is unknown or says nothing, or a split has no dim or no order.
    """
    unknown = [axis for axis in typed.local_type if axis not in mesh.names]
    if unknown:
        raise ArgumentError(f"{unknown[0]!r} is no axis of mesh {mesh}; name its axes {', '.join(mesh.names)}")
    dims: dict[str, int] = {}
    order: list[int] = []
    for dim, entry in enumerate(typed.partition_spec or ()):
        for axis in () if entry is None else entry if isinstance(entry, tuple) else (entry,):
            dims[axis] = dim
            order.append(mesh.names.index(axis))
    for axis, kind in typed.local_type.items():
        if isinstance(kind, spmd.Shard):
            dim = kind.dim % num_dims
            if dim in dims.values():
                raise ArgumentError(
                    f"several axes split dim {dim}, and S({dim}) does not say which splits first; give a PartitionSpec"
                )
            dims[axis] = dim
            order.append(mesh.names.index(axis))
    axes = tuple(Shard(dims[axis]) if axis in dims else _placement(axis, typed) for axis in mesh.names)
    return Layout(axes, tuple(order))


def plan_to_spmd(plan: ModelPlan) -> Typed:
    """The types of a plan's parameters, inputs and outputs.

    Raises:
        PlanMismatchError: if the plan was loaded and is not bound to a model.
    """
    found = named_layouts(plan)
    tables = {"parameters": found.parameters, "inputs": found.inputs, "outputs": found.outputs}
    return {
        kind: {name: to_spmd(layout, found.mesh, found.num_dims[name]) for name, layout in table.items()}
        for kind, table in tables.items()
    }


def plan_from_spmd(typed: Typed, like: NamedLayouts) -> NamedLayouts:
    """The layouts that types say, of the tensors of `like`.

    Raises:
        ArgumentError: as `from_spmd`; for names that `like` has not.
    """

    def layouts(kind: str, table: dict[str, Layout]) -> dict[str, Layout]:
        given = typed.get(kind, {})
        if unknown := sorted(set(given) - set(table)):
            raise ArgumentError(f"the plan has no {kind[:-1]} {unknown[0]!r}; it has {', '.join(sorted(table)[:5])}")
        return {name: from_spmd(one, like.mesh, like.num_dims[name]) for name, one in given.items()}

    return NamedLayouts(
        mesh=like.mesh,
        parameters=layouts("parameters", like.parameters),
        inputs=layouts("inputs", like.inputs),
        outputs=layouts("outputs", like.outputs),
        num_dims=like.num_dims,
    )


def _local(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return spmd.V
    if isinstance(placement, Partial):
        return spmd.P
    return spmd.I if isinstance(placement, Invariant) else spmd.R


def _placement(axis: str, typed: Any) -> Placement:
    kind = typed.local_type.get(axis)
    known: dict[Any, Placement] = {spmd.R: REPLICATE, spmd.I: INVARIANT, spmd.P: PARTIAL}
    if kind not in known:
        said = "nothing" if kind is None else f"{kind!r}, which has no dim"
        raise ArgumentError(f"axis {axis} says {said}; give R, I, P, or S(dim)")
    return known[kind]
