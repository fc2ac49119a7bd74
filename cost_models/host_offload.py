"""What does it cost to keep optimizer state, or parameters too, in the host's memory? Nominal rates, nothing fitted.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840, section 4): once a step a rank's shard of the gradients goes to the
host, which updates its part there, and its parameters come back. FSDP2's `CPUOffloadPolicy` keeps the parameters'
shards there too: each gather copies them in first, and each micro-batch's gradients go out. What overlaps these copies
is not modelled.
"""

from autopar.cost_models.training_config import TrainingConfig, grad_nbytes, param_nbytes
from autopar.errors import ClusterError
from autopar.values.cluster import Cluster
from autopar.values.link_file import link_table

_DGX_H100 = "NVIDIA DGX H100 user guide: 2 Xeon Platinum 8480C, each 8 channels of DDR5-4800; 8 GPUs"
# A device's link to its host, bytes/s of the host's memory for one of eight devices, and the source of both.
HOSTS = {
    "a100": ("pcie4", 4.096e11 / 8, "NVIDIA DGX A100 user guide: 2 EPYC 7742, each 8 channels of DDR4-3200; 8 GPUs"),
    "h100": ("pcie5", 6.144e11 / 8, _DGX_H100),
    "h200": ("pcie5", 6.144e11 / 8, _DGX_H100),
}


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
    link, memory, _ = HOSTS[name]
    bandwidth = float(link_table(link, f"offload {config.offload}")["bandwidth"]["value"])
    own = params / config.shards
    # read: gradient, master copy, states; written: master copy, states and the parameter as it is used
    update = own * (grad_nbytes(config) + 8 + 8 * config.optimizer_states + param_nbytes(config)) / memory
    if config.offload == "optimizer":
        return update + own * (grad_nbytes(config) + param_nbytes(config)) / bandwidth
    gathers = 1 if config.keep_gathered else 2
    copied = gathers * param_nbytes(config) + grad_nbytes(config)
    return update + config.num_microbatches * own * copied / bandwidth
