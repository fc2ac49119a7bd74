"""Which mesh, and how many pipeline ranks, did a user ask for on this cluster?"""

from typing import Literal

from autopar.errors import ArgumentError, MeshError
from autopar.search.known.named_configuration import parse_configuration
from autopar.search.pipeline_parts import devices_text, part_of
from autopar.values.cluster import Cluster
from autopar.values.mesh import Mesh, make_mesh, parse_mesh


def asked_mesh(
    machine: Cluster,
    mesh: str | tuple[int, ...] | Mesh | None,
    pipeline: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    baseline: str | None = None,
    solver: str = "auto",
) -> tuple[int, Mesh]:
    """The number of pipeline ranks asked for, and the mesh of each (that of the cluster's levels where it is searched).

    Raises:
        MeshError: if the mesh is not that of a pipeline rank's devices, or needs mesh auto.
        ArgumentError: if a schedule has no pipeline, the baseline says otherwise, or the solver takes one mesh alone.
    """
    if solver == "double-recursive" and baseline is None and (mesh == "auto" or pipeline not in (None, 1)):
        asked = "mesh auto" if mesh == "auto" else f"{pipeline} pipeline ranks"
        raise ArgumentError(f"solver {solver} decides on one mesh without a pipeline, not on {asked}; take auto or ilp")
    if mesh == "auto":
        if baseline is not None:
            raise MeshError(f"the baseline {baseline} is made for one mesh; give it instead of auto, as in 8x8")
        return 1, mesh_for(machine, None)
    if pipeline == "auto":
        raise MeshError(f"the best number of pipeline ranks is found with mesh auto, not {mesh}; give one or the other")
    if baseline is not None:
        said = parse_configuration(baseline)
        if pipeline not in (None, said.pp) or schedule not in ("auto", said.schedule):
            raise ArgumentError(
                f"the baseline {said} has {said.pp} pipeline ranks and its own schedule; leave pipeline {pipeline} and "
                f"schedule {schedule} out, and give pp and schedule as its keys"
            )
        return said.pp, mesh_for(machine, mesh, said.pp)
    if schedule != "auto" and pipeline in (None, 1):
        raise ArgumentError(f"schedule {schedule} is that of a pipeline; give 2 pipeline ranks or more, or mesh auto")
    return pipeline or 1, mesh_for(machine, mesh, pipeline or 1)


def mesh_for(machine: Cluster, mesh: str | tuple[int, ...] | Mesh | None, pipeline: int = 1) -> Mesh:
    """The mesh asked for, or by default the cluster's levels that hold more than one device; of each pipeline rank.

    Raises:
        MeshError: if it has another number of ranks than there are devices, or these cannot be shared out.
    """
    part = part_of(machine, pipeline)
    if mesh is None:
        return make_mesh(tuple(level.size for level in part.levels if level.size > 1) or (1,))
    if isinstance(mesh, str):
        own = parse_mesh(mesh)
    elif isinstance(mesh, tuple | list):
        own = make_mesh(tuple(mesh))
    elif isinstance(mesh, Mesh):
        own = mesh
    else:
        raise MeshError(f"mesh {mesh!r} is neither text nor a tuple; write it as 2x2, data=2,model=2 or (2, 2)")
    n = part.num_devices
    if own.size != n:
        shapes = [str(n), *(f"{a}x{n // a}" for a in range(2, n) if n % a == 0)][:4]
        stages = f", {n // own.size} pipeline ranks of it" if pipeline == 1 and n % own.size == 0 else ""
        raise MeshError(
            f"mesh {own} has {own.size} ranks, not {devices_text(machine, pipeline)}; use a mesh of {n}, "
            f"such as {' or '.join(shapes)}{stages}, or another cluster"
        )
    return own
