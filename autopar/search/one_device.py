"""What would one device take for the same step? The same micro-batches, nothing sent: whether parallelism pays."""

from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.search.known.baselines import memory_limit
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import Cluster, resized
from autopar.values.gigabytes import gigabytes, least_gigabytes
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.pins import NO_PINS
from autopar.values.train_config import TrainConfig


def one_device(captured: CapturedModel, cluster: Cluster, config: TrainConfig) -> float | str:
    """Seconds of a step on one device of the cluster, or why there is no plan for it.

    captured: the graph of one micro-batch.
    """
    machine = resized(cluster, 1, 1)
    options = SearchOptions(solver="double-recursive", with_baselines=False)
    try:
        return make_plan(
            captured, machine, make_mesh((1,)), replace(config, pins=NO_PINS), options
        ).estimate.step_seconds
    except InfeasibleError as error:
        limit = memory_limit(machine, config)
        needs = f"needs {least_gigabytes(error.least_nbytes)} GB of " if error.least_nbytes is not None else "of "
        return f"does not fit: {needs}{gigabytes(limit)} GB a device"
