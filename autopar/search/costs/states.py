"""What do a model's states take, whatever the plan? Parameters, gradients and the optimizer's, one copy on all devices.

At the optimizer's step each of them is somewhere, so that the devices together hold one copy at least, and the fullest
an even share of it.
"""

import math

from autopar.cost_models.memory import optimizer_state_nbytes
from autopar.errors import InfeasibleError
from autopar.lower.program import Program
from autopar.values.cluster import Cluster
from autopar.values.gigabytes import gigabytes
from autopar.values.train_config import TrainConfig

GIGA = 1e9


def states_nbytes(program: Program, optimizer: str) -> float:
    """Bytes of all parameters, and of gradients and optimizer states of those that are trained."""
    total = 0.0
    for name, tensor in program.tensors.items():
        if tensor.kind == "parameter":
            size = tensor.stored_size
            if name in program.updated:
                size += optimizer_state_nbytes(optimizer, tensor.stored_size) + tensor.stored_size
            total += size * math.prod(tensor.shape)
    return total


def check_states(program: Program, cluster: Cluster, config: TrainConfig, num_devices: int, limit: float) -> None:
    """Raises InfeasibleError where an even share of the states is more than a device's `limit`, in bytes."""
    total = states_nbytes(program, config.optimizer)
    if total <= num_devices * limit:
        return
    raise InfeasibleError(
        f"parameters, gradients and {config.optimizer}'s states take {total / GIGA:.6g} GB: on each of the "
        f"{num_devices} devices of {cluster} {total / num_devices / GIGA:.6g} GB, however they are split, and "
        f"{gigabytes(limit)} GB are there; use {math.ceil(total / limit)} devices or more, lower precision, or an "
        "optimizer with fewer states",
        least_nbytes=total / num_devices,
    )
