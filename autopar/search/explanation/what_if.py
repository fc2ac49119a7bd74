"""The same machine with one figure changed: a link level, or the devices' arithmetic, so many times as fast."""

from dataclasses import replace

from autopar.values.cluster import Cluster


def faster_link(cluster: Cluster, depth: int, factor: float) -> Cluster:
    """`factor` times the bandwidth of level `depth`, in every line that it has; what a message costs at least stays."""
    level = cluster.levels[depth]
    lines = tuple(replace(line, bandwidth=line.bandwidth * factor) for line in level.lines)
    network = level.in_network
    changed = replace(
        level,
        bandwidth=level.bandwidth * factor,
        line_rate=None if level.line_rate is None else level.line_rate * factor,
        lines=lines,
        in_network=None if network is None else replace(network, bandwidth=network.bandwidth * factor),
    )
    levels = (*cluster.levels[:depth], changed, *cluster.levels[depth + 1 :])
    return replace(cluster, levels=levels)


def faster_arithmetic(cluster: Cluster, factor: float) -> Cluster:
    """`factor` times the peak flop/s of every dtype; memory is as fast as before."""
    peaks = tuple((dtype, peak * factor) for dtype, peak in cluster.device.peak_flops)
    return replace(cluster, device=replace(cluster.device, peak_flops=peaks))


def faster_memory(cluster: Cluster, factor: float) -> Cluster:
    """`factor` times the bytes/s of the devices' own memory."""
    device = cluster.device
    return replace(cluster, device=replace(device, memory_bandwidth=device.memory_bandwidth * factor))
