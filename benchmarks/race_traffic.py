"""How many bytes of a plan's step pass from the first of two hosts to the second? From what is predicted to be sent.

Gloo's algorithms, as counting them showed: all-reduce is a ring, each rank hands 2 (n-1)/n N to its neighbour;
reduce-scatter is an all-reduce that keeps its part; all-gather is a ring of (n-1)/n N; all-to-all sends N/n from each
rank to each. N is the whole tensor; the ranks of a group stand in order; the first host has the first half of them.
"""

from autopar.lower.messages import messages_of
from autopar.values.local_model import LocalModel
from autopar.values.mesh import Mesh

RING_PASSES = {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1}


def crossing_nbytes(local: LocalModel) -> float:
    """Payload of a step from the first half of the ranks to the second."""
    mesh = local.plan.mesh
    return sum(
        crossing(kind, members, mesh.size // 2, nbytes)
        for (kind, axes), (_, nbytes) in messages_of(local.captured, local.plan, on_host=True).items()
        for members in groups_along(mesh, axes)
    )


def crossing(kind: str, members: tuple[int, ...], first_host: int, nbytes: float) -> float:
    """Of one collective: payload from ranks below `first_host` to the others."""
    n = len(members)
    here = [rank < first_host for rank in members]
    if kind == "all_to_all":
        return sum(here) * (n - sum(here)) * nbytes / n
    edges = sum(here[i] and not here[(i + 1) % n] for i in range(n))
    return edges * RING_PASSES[kind] * (n - 1) / n * nbytes


def groups_along(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Ranks of every group of those axes."""
    fixed = [i for i, name in enumerate(mesh.names) if name not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(mesh.coordinates()):
        groups.setdefault(tuple(place[i] for i in fixed), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
