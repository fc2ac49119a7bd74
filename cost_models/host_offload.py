"""What does it cost to keep optimizer state, or parameters too, in the host's memory? Assumed rates, nothing fitted.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840, section 4): once a step a rank's shard of the gradients goes to the
host, which updates its part there, and its parameters come back. FSDP2's `CPUOffloadPolicy` keeps the parameters'
shards there too: each gather copies them in first, and each micro-batch's gradients go out. What overlaps these copies
is not modelled.
"""

from functools import lru_cache

from autopar.cost_models.training_config import TrainingConfig, grad_nbytes, param_nbytes
from autopar.errors import ClusterError
from autopar.values.cluster import Cluster
from autopar.values.link_file import link_table

# A device's link to its host, and bytes/s of the host's memory for one of eight devices. Assumed, at nominal rates: a
# DGX A100 with two EPYC 7742 (8 channels of DDR4-3200 each), a DGX H100 with two Xeon 8480C (8 of DDR5-4800 each).
HOSTS = {"a100": ("pcie4", 4.096e11 / 8), "h100": ("pcie5", 6.144e11 / 8), "h200": ("pcie5", 6.144e11 / 8)}


def has_host(cluster: Cluster) -> bool:
    """Whether the host of the cluster's devices is known."""
    return cluster.device.name.partition("-")[0] in HOSTS


def offload_seconds(config: TrainingConfig, params: float, cluster: Cluster) -> float:
    """Seconds of a step that copies to and from the host and its update take.

    Args:
        config: with `offload` optimizer or all.
        params: parameters of the fullest rank's stage, before they are sharded.
        cluster: whose devices have a host.

    Raises:
        ClusterError: if the host of such a device is not known.
    """
    name = cluster.device.name.partition("-")[0]
    if name not in HOSTS:
        raise ClusterError(
            f"offload {config.offload}: the host of device {cluster.device.name} is not known; known are those of "
            f"{', '.join(HOSTS)}"
        )
    link, memory = HOSTS[name]
    bandwidth = _bandwidth(link)
    own = params / config.shards
    # read: gradient, master copy, states; written: master copy, states and the parameter as it is used
    update = own * (grad_nbytes(config) + 8 + 8 * config.optimizer_states + param_nbytes(config)) / memory
    if config.offload == "optimizer":
        return update + own * (grad_nbytes(config) + param_nbytes(config)) / bandwidth
    gathers = 1 if config.keep_gathered else 2
    copied = gathers * param_nbytes(config) + grad_nbytes(config)
    return update + config.num_microbatches * own * copied / bandwidth


@lru_cache
def _bandwidth(link: str) -> float:
    """Bytes/s of a device's link to its host."""
    return float(link_table(link, "offload")["bandwidth"]["value"])
