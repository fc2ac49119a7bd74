"""Writes `cost_models/interconnects/*.toml`: line rates from data sheets, constants from the fits of `collectives_fit`.

    python -m benchmarks.interconnects [--references DIR]

A link that rows of the references describe has their fit. Another has its published bandwidth, and the fractions and
latencies of its kind's fit (networks: of the Hopper clusters with a known line rate together) or NCCL's own; each
figure says which.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.values.link import Line, LinkLevel
from autopar.values.link_file import level_toml
from benchmarks.collectives_fidelity import REFERENCES, consistent
from benchmarks.collectives_fit import (
    NODE,
    NVLINK_HOP,
    PCI_HOP,
    fit_network,
    fit_node,
    network_level,
    node_level,
)  # fmt: skip
from benchmarks.collectives_rows import Measurement, network_rates, read_measurements, stated_rates

FOLDER = Path(__file__).resolve().parents[1] / "cost_models" / "interconnects"
NCCL = "github NVIDIA/nccl 5067397, src/graph/tuning.cc: hwLatencies, baseLatencies, protocol efficiency"
GTC = "peak all_reduce bus bandwidth in a picture of NVIDIA GTC24 S62129"
SURVEY = "rows of Shi et al. 2020 (32 GPUs, 4 a node), seconds a byte of all-reduce: alpha_beta.csv"

TCP_ALPHA = "10 GbE in MG-WFBP: alpha_beta.csv ab-6, 523 us over 14 ring hops"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """`generation`: whose fit, "" for NCCL's own constants and `bandwidth` with its source."""

    rate: float
    rate_source: str
    generation: str = ""
    bandwidth: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`cluster`: whose fit, "" for that of all Hopper clusters, with `bandwidth` and `alpha` where published."""

    rate: float
    rate_source: str
    cluster: str = ""
    bandwidth: float = 0.0
    alpha: float = 0.0
    alpha_source: str = ""
    source: str = ""
    shared_by_node: bool = False


NODE_LINKS: dict[str, NodeLink] = {
    "nvlink2": NodeLink(
        rate=1.5e11, rate_source="NVIDIA V100 datasheet: 6 links of 25 GB/s each way",
        bandwidth=1.22e11, source=f"{GTC}: DGX-1V 122 GB/s",
    ),
    "nvlink3": NodeLink(
        rate=3e11, rate_source="NVIDIA A100 datasheet: 12 links of 25 GB/s each way", generation="Ampere"
    ),
    "nvlink4": NodeLink(
        rate=4.5e11, rate_source="NVIDIA H100 datasheet: 18 links of 25 GB/s each way", generation="Hopper"
    ),
    "nvlink5": NodeLink(
        rate=9e11, rate_source="NVIDIA HGX B200 specifications: 18 links of 50 GB/s each way", generation="Blackwell"
    ),
    "pcie3": NodeLink(
        rate=1.5754e10, rate_source="PCI Express 3.0, 16 lanes of 8 GT/s, 128b/130b",
        bandwidth=1.2e10, source="half of pcie4's, which is as fast a part of its line rate",
    ),
    "pcie3-host": NodeLink(
        rate=1.5754e10, rate_source="PCI Express 3.0, 16 lanes of 8 GT/s, 128b/130b",
        bandwidth=4.6e9, source=f"through host memory, cards without peer access: {SURVEY} ab-40, P = 4, 3.272e-10",
    ),
    "pcie4": NodeLink(
        rate=3.1508e10, rate_source="PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b",
        bandwidth=2.4e10, source=f"{GTC}: PCIe gen4 node 24 GB/s",
    ),
    "pcie5": NodeLink(
        rate=6.3015e10, rate_source="PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b",
        bandwidth=4.8e10, source=f"{GTC}: PCIe gen5 node 48 GB/s",
    ),
}  # fmt: skip

NETWORKS: dict[str, Network] = {
    "infiniband-edr": Network(rate=1.25e10, rate_source="EDR: 100 Gb/s a port"),
    "infiniband-hdr": Network(
        rate=2.5e10, rate_source="HDR: 200 Gb/s a port", bandwidth=2.4e10, source=f"{GTC}: 200 Gb/s 24 GB/s"
    ),
    "infiniband-ndr": Network(rate=5e10, rate_source="NDR: 400 Gb/s a port", cluster="H100, cluster01"),
    "roce-100": Network(rate=1.25e10, rate_source="100 Gb/s Ethernet a port, RDMA"),
    "roce-200": Network(rate=2.5e10, rate_source="200 Gb/s Ethernet a port, RDMA"),
    "roce-400": Network(rate=5e10, rate_source="400 Gb/s Ethernet a port, RDMA"),
    "slingshot11": Network(
        rate=2.5e10, rate_source="HPE Slingshot 11: 200 Gb/s a port, one a GPU (CSCS Alps)",
        cluster="GH200, nccl-benchmark-on-alps-2025",
    ),
    "tcpxo": Network(
        rate=2.5e10, rate_source="GCP A3 Mega: 8 NICs of 200 Gb/s for 8 GPUs, GPUDirect-TCPXO",
        cluster="H100, stored index file 3252930696",
    ),
    "efa-v4": Network(
        rate=5e10, rate_source="AWS p6-b200: EFA v4, 400 Gb/s a GPU", cluster="B200 SXM, ml-engineering"
    ),
    "10gbe": Network(
        rate=1.25e9, rate_source="10 Gb/s Ethernet, TCP", bandwidth=1.15e9, alpha=3.7e-5, shared_by_node=True,
        source=f"{SURVEY} ab-41 to ab-43 (1.52e-9 to 1.69e-9)", alpha_source=TCP_ALPHA,
    ),
    "100gbe": Network(
        rate=1.25e10, rate_source="100 Gb/s Ethernet, TCP", bandwidth=1e10, alpha=3.7e-5, shared_by_node=True,
        source=f"{GTC}: 100 GbE TCP 10 GB/s (the cluster of Shi et al. 2020 reached 2.3)", alpha_source=TCP_ALPHA,
    ),
}  # fmt: skip


def node_file(name: str, link: NodeLink, measurements: list[Measurement]) -> LinkLevel:
    if link.generation:
        constants = fit_node(measurements, link.generation)
        rows = sum(m.nodes == 1 and m.generation == link.generation for m in measurements)
        origin = (
            f"fitted by benchmarks/interconnects.py on {rows} rows of nccl.csv inside one node of {link.generation}"
        )
        return _sourced(node_level(1, link.rate, constants, constants["nccl-tests"]), link.rate_source, origin, origin)
    constants = _first(NODE) | {"fraction": link.bandwidth / link.rate}
    hop = PCI_HOP if name.startswith("pcie") else NVLINK_HOP
    return _sourced(node_level(1, link.rate, constants, 0.0, hop), link.rate_source, NCCL, link.source)


def network_file(link: Network, measurements: list[Measurement]) -> LinkLevel:
    rates = network_rates(measurements)
    hopper = [m for m in measurements if m.generation == "Hopper" and m.cluster in stated_rates(measurements)]
    chosen = [m for m in measurements if m.cluster == link.cluster] if link.cluster else hopper
    node = fit_node(measurements, chosen[0].generation)
    constants = fit_network(chosen, node, rates)
    whose = (
        f"rows of {link.cluster}" if link.cluster else "rows across nodes of the Hopper clusters with a known line rate"
    )
    origin = f"fitted by benchmarks/interconnects.py on the {whose} in nccl.csv"
    if not any(m.kind == "send_recv" for m in chosen) or not link.cluster:
        del constants["send_fraction"]
    bandwidths = origin if link.cluster else f"its part of the line rate {origin}"
    if link.bandwidth:
        slower = link.bandwidth / link.rate / constants["ring_fraction"]
        constants |= {k: v * min(slower, 1.0) for k, v in constants.items() if k.endswith("_fraction")}
        constants["ring_fraction"] = link.bandwidth / link.rate
        bandwidths = link.source
    if link.alpha:
        constants |= {k: max(v, link.alpha) for k, v in constants.items() if k.endswith("_alpha")}
        constants["ring_alpha"] = link.alpha
        origin = f"alpha not below {link.alpha:g}, of {link.alpha_source}; else {origin}"
    return _sourced(network_level(1, link.rate, constants, 0.0), link.rate_source, origin, bandwidths)


def _first(bounds: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    return {name: first for name, (_, first, _) in bounds.items()}


def _sourced(level: LinkLevel, rate_source: str, latencies: str, bandwidths: str) -> LinkLevel:
    """The level with three digits of each figure, and where it comes from."""
    origin = {"alpha": latencies, "launch": latencies, "bandwidth": bandwidths}
    sources = [("line_rate", rate_source), *origin.items()]
    sources += [(f"lines.{k}.{field}", source) for k in range(len(level.lines)) for field, source in origin.items()]
    sources += [(f"in_network.{field}", source) for field, source in origin.items()] if level.in_network else []
    return replace(
        level,
        alpha=_digits(level.alpha),
        bandwidth=_digits(level.bandwidth),
        launch=_digits(level.launch),
        lines=tuple(_rounded(line) for line in level.lines),
        in_network=_rounded(level.in_network) if level.in_network else None,
        sources=tuple(sources),
    )


def _rounded(line: Line) -> Line:
    return replace(line, alpha=_digits(line.alpha), bandwidth=_digits(line.bandwidth), launch=_digits(line.launch))


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def file_text(name: str, level: LinkLevel, *, shared_by_node: bool = False) -> str:
    """The level's table without a size: top-level keys, as `link_file.link_table` reads them."""
    lines = [line.replace("[[levels.", "[[").replace("[levels.", "[") for line in level_toml(replace(level, name=name))]
    kept = [line for line in lines if not line.startswith(("[[levels]]", "size =", "devices_per_link ="))]
    if shared_by_node:
        kept.insert(1, "shared_by_node = true")
    return (
        f"# {name}: seconds, bytes/s; written by benchmarks/interconnects.py, each figure with its source.\n\n"
        + "\n".join(kept)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--references", type=Path, default=REFERENCES, metavar="DIR")
    measurements = consistent(read_measurements(parser.parse_args().references))
    for name, node in NODE_LINKS.items():
        (FOLDER / f"{name}.toml").write_text(file_text(name, node_file(name, node, measurements)), encoding="utf-8")
    for name, network in NETWORKS.items():
        level = network_file(network, measurements)
        text = file_text(name, level, shared_by_node=network.shared_by_node)
        (FOLDER / f"{name}.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
