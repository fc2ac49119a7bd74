"""Which devices has one rank of a pipeline? They take equal parts of the cluster, from its slowest links on."""

from autopar.errors import MeshError
from autopar.search.meshes import parts
from autopar.values.cluster import Cluster


def part_of(cluster: Cluster, pipeline: int) -> Cluster:
    """What each of `pipeline` ranks has of the cluster.

    Raises:
        MeshError: if the cluster's levels cannot be shared out so.
    """
    possible = parts(cluster)
    if pipeline not in possible:
        raise MeshError(
            f"{pipeline} pipeline ranks do not take equal parts of {cluster}, {cluster.num_devices} devices, along its "
            f"levels; use one of {', '.join(map(str, possible))}"
        )
    return possible[pipeline]


def devices_text(cluster: Cluster, pipeline: int) -> str:
    """`the 8 devices of 8xh100`, `the 4 devices of each of 2 pipeline ranks on 8xh100`."""
    whose = f"each of {pipeline} pipeline ranks on {cluster}" if pipeline > 1 else str(cluster)
    return f"the {part_of(cluster, pipeline).num_devices} devices of {whose}"
