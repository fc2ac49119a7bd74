"""How far are predicted collectives from published measurements? Error tables by cluster, in three ways.

    python -m benchmarks.collectives_fidelity [--references DIR] [--json]

fitted      constants a GPU generation and a network, fitted on all rows (see `collectives_fit`)
left out    the cluster is predicted with constants fitted on the other clusters of its GPU generation: its node's link
from
            their nodes, its network from the fractions that theirs reach of their line rates
shipped     the constants of `cost_models/interconnects`, by name, nothing fitted here

An error is |predicted / measured - 1|. Rows that contradict each other are scored and not fitted.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.cost_models.collectives import algorithms
from autopar.values.link import LinkLevel
from autopar.values.link_file import read_level
from benchmarks.collectives_fit import Constants, batches, fit_network, fit_node, forms_seconds, links_of, predict
from benchmarks.collectives_rows import Measurement, contradictory, network_rates, read_measurements, stated_rates

REFERENCES = Path(__file__).resolve().parents[2] / "shared" / "references"

# Clusters of the references that the shipped interconnects describe: the files of the node's link and of the network.
SHIPPED = {
    "H100, cluster01": ("nvlink4", "infiniband-ndr"),
    "GH200, nccl-benchmark-on-alps-2025": ("nvlink4", "slingshot11"),
    "H100, stored index file 3252930696": ("nvlink4", "tcpxo"),
    "H200 SXM, ml-engineering": ("nvlink4", None),
    "B200 SXM, ml-engineering": ("nvlink5", "efa-v4"),
    "A100 SXM, ml-engineering": ("nvlink3", None),
}

Errors = npt.NDArray[np.float64]


def fitted_errors(measurements: Sequence[Measurement]) -> dict[str, Errors]:
    """Cluster -> errors in sample."""
    known, rates = consistent(measurements), network_rates(list(measurements))
    found = {}
    for generation in sorted({m.generation for m in measurements}):
        node = fit_node(known, generation)
        for cluster in _clusters(measurements, generation):
            net = fit_network([m for m in known if m.cluster == cluster], node, rates)
            found[cluster] = _errors(_of(measurements, cluster), node, net, rates.get(cluster))
    return found


def left_out_errors(measurements: Sequence[Measurement]) -> dict[str, Errors]:
    """Cluster -> errors with constants that never saw it; clusters alone in their generation are not in the answer."""
    known, rates = consistent(measurements), network_rates(list(measurements))
    stated = stated_rates(list(measurements))
    found = {}
    for generation in sorted({m.generation for m in measurements}):
        clusters = _clusters(measurements, generation)
        for cluster in clusters if len(clusters) > 1 else ():
            others = [m for m in known if m.cluster != cluster and m.generation == generation]
            node = fit_node(others, generation)
            # Fractions of a line rate can be learnt only where it is known.
            net = fit_network([m for m in others if m.cluster in stated], node, rates)
            found[cluster] = _errors(_of(measurements, cluster), node, net, rates.get(cluster))
    return found


def shipped_errors(measurements: Sequence[Measurement]) -> dict[str, Errors]:
    """Cluster -> errors of the interconnect files that describe it; they know nothing of a harness's own time."""
    found = {}
    for cluster, (node, network) in SHIPPED.items():
        parts = []
        for batch in batches(_scored(_of(measurements, cluster))):
            levels = [_level("node", node, batch.per_node)]
            if batch.nodes > 1:
                assert network is not None, f"{cluster} has rows across nodes: name its network"
                levels.insert(0, _level("network", network, batch.nodes))
            seconds = forms_seconds(algorithms(batch.kind, links_of(tuple(levels))), batch)
            parts.append(np.abs(seconds / batch.seconds - 1))
        if parts:
            found[cluster] = np.concatenate(parts)
    return found


def table(folder: Path = REFERENCES) -> list[dict[str, Any]]:
    """Rows of the error table, one a cluster and one of all: medians, the mean and the part above 25%."""
    measurements = read_measurements(folder)
    ways = {
        "fitted": fitted_errors(measurements),
        "left out": left_out_errors(measurements),
        "shipped": shipped_errors(measurements),
    }
    rows = []
    for cluster in [*sorted({m.cluster for m in measurements}), "all"]:
        own = _scored(measurements if cluster == "all" else _of(measurements, cluster))
        row: dict[str, Any] = {"subject": "collectives", "source": cluster, "rows": len(own)}
        for way, errors in ways.items():
            found = [e for name, e in errors.items() if cluster in (name, "all")]
            together = np.concatenate(found) if found else None
            row[f"{way} median"] = None if together is None else float(np.median(together))
            row[f"{way} mean"] = None if together is None else float(np.mean(together))
        rows.append(row)
    return rows


def _errors(
    measurements: Sequence[Measurement], node: Constants, net: Constants, rate: float | None
) -> npt.NDArray[np.float64]:
    return np.concatenate([np.abs(predict(b, node, net, rate) / b.seconds - 1) for b in batches(_scored(measurements))])


def _level(name: str, link: str, size: int) -> LinkLevel:
    return read_level({"link": link, "name": name, "size": size}, 1, link, "")


def consistent(measurements: Sequence[Measurement]) -> list[Measurement]:
    wrong = contradictory(list(measurements))
    return [m for m in measurements if m.id not in wrong]


def _scored(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.is_scored]


def _clusters(measurements: Sequence[Measurement], generation: str) -> list[str]:
    return sorted({m.cluster for m in measurements if m.generation == generation})


def _of(measurements: Sequence[Measurement], cluster: str) -> list[Measurement]:
    return [m for m in measurements if m.cluster == cluster]


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    columns = [key for key in rows[0] if key.endswith(("median", "mean"))]
    lines = [f"{'cluster':38}{'rows':>5}" + "".join(f"{column:>17}" for column in columns)]
    for row in rows:
        lines.append(f"{row['source']:38}{row['rows']:5}" + "".join(f"{percent(row[c]):>17}" for c in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--references", type=Path, default=REFERENCES, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = table(arguments.references)
    print(json.dumps(rows, indent=1) if arguments.json else text(rows))


if __name__ == "__main__":
    main()
