"""What does a cluster file say that a measurement should have given? Through the functions that planning uses."""

from dataclasses import replace
from functools import lru_cache

from autopar.calibration.measure_collectives import measuring_mesh
from autopar.calibration.samples import CollectiveSample, WorkSample
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.compute import rates_of
from autopar.cost_models.links import Links, axis_links
from autopar.rules.attention import BACKWARD_RATIO
from autopar.values.cluster import Cluster


def predicted_collective(cluster: Cluster, sample: CollectiveSample) -> float:
    """Seconds of the collective in the group that was measured."""
    return collective_seconds(sample.kind, sample.nbytes, _links(cluster, sample.level, sample.group_size))[0]


@lru_cache(maxsize=256)
def _links(cluster: Cluster, level: int | None, group_size: int) -> Links:
    sizes = tuple(level.size for level in cluster.levels if level.size > 1)
    mesh, places = measuring_mesh(sizes)
    [axes] = {place.axes for place in places if (place.level, place.size) == (level, group_size)}
    return axis_links(cluster, mesh.shape, tuple(mesh.names.index(name) for name in axes))


def predicted_work(cluster: Cluster, sample: WorkSample) -> float:
    """Seconds of the operation, forward and backward, timed alone: by fitted constants where the file names a device
    that has them and keeps its nominal figures, else by the roofline of the file's own.

    Raises:
        ArgumentError: if the device has no peak for the operation's dtype.
    """
    alone = replace(cluster.device, launch_in_step=1.0, bytes_in_step=1.0, flops_in_step=1.0)
    rates, nbytes, dtype = rates_of(alone), sample.nbytes, sample.dtype
    if sample.product:
        m, n, k = sample.product
        forward = rates.products([(1, m, n, k)], nbytes, dtype, rows=(n, k))
        return forward + rates.products([(1, m, k, n), (1, k, n, m)], nbytes, dtype, rows=(n, k))
    if sample.attention:
        flops, (_, _, rows, head) = sample.flops, sample.attention
        forward = rates.attention(flops, nbytes, dtype, head=head, keys=rows / 2, every=rows)
        back_flops, moved = BACKWARD_RATIO * flops, sample.backward_nbytes
        return forward + rates.attention(back_flops, moved, dtype, head=head, keys=rows / 2, every=rows, backward=True)
    return rates.other(0.0, nbytes, dtype) + rates.other(0.0, sample.backward_nbytes, dtype)
