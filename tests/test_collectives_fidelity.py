"""Predicted collectives against the published measurements beside the repository (figures that others printed)."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ArgumentError
from autopar.values.link import LinkLevel
from benchmarks.collectives_fidelity import REFERENCES, table
from benchmarks.collectives_fit import NETWORK, NODE, SWITCH, fit_network, fit_node
from benchmarks.collectives_rows import (
    LEAST_BYTES,
    contradictory,
    network_rates,
    read_measurements,
    stated_rates,
)
from benchmarks.interconnects import NETWORKS, NODE_LINKS, file_text, network_file, node_file

measured = pytest.mark.skipif(
    not REFERENCES.is_dir(), reason="no folder of published measurements beside the repository"
)
FILES = Path(__file__).resolve().parents[1] / "cost_models" / "interconnects"


@cache
def error_table() -> dict[str, dict[str, Any]]:
    return {row["source"]: row for row in table()}


@measured
def test_half_of_all_rows_are_within_a_tenth_in_sample_and_by_the_shipped_constants() -> None:
    row = error_table()["all"]
    assert row["rows"] > 600
    assert row["fitted median"] <= 0.10
    assert row["shipped median"] <= 0.10


@measured
def test_a_cluster_that_the_fit_never_saw_is_within_a_quarter() -> None:
    errors = {name: row["left out median"] for name, row in error_table().items() if row["left out median"] is not None}
    assert errors["all"] <= 0.25
    assert max(errors.values()) <= 0.30, "no cluster carries the others"


@measured
def test_contradictory_rows_are_known_and_no_rate_is_exceeded() -> None:
    measurements = read_measurements(REFERENCES)
    assert 8 <= len(contradictory(measurements)) <= 30
    assert all(m.is_scored == (m.nbytes > LEAST_BYTES) for m in measurements)
    rates = network_rates(measurements)
    assert rates.items() >= stated_rates(measurements).items()
    for m in measurements:
        if m.nodes > 1:
            assert m.crossing_bytes / m.seconds <= rates[m.cluster], m.id


@measured
def test_fitted_constants_lie_within_their_physical_range() -> None:
    measurements = read_measurements(REFERENCES)
    node = fit_node(measurements, "Hopper")
    net = fit_network([m for m in measurements if m.cluster == "H100, cluster01"], node, network_rates(measurements))
    for constants, bounds in ((node, NODE | SWITCH), (net, NETWORK)):
        for name, (low, _, high) in bounds.items():
            assert low < constants[name] <= high, name
            if name.endswith("fraction"):
                assert constants[name] <= 1.0, "no faster than the line"


@measured
@pytest.mark.parametrize("name", ["nvlink4", "infiniband-ndr", "pcie4", "10gbe"])
def test_an_interconnect_file_is_what_its_writer_writes(name: str) -> None:
    """The digits that are stored may differ in the last: a fit ends where the machine's arithmetic says."""
    measurements = read_measurements(REFERENCES)
    consistent = [m for m in measurements if m.id not in contradictory(measurements)]
    level: LinkLevel
    if name in NODE_LINKS:
        level = node_file(name, NODE_LINKS[name], consistent)
    else:
        level = network_file(NETWORKS[name], consistent)
    text = file_text(name, level, shared_by_node=name in NETWORKS and NETWORKS[name].shared_by_node)
    stored = (FILES / f"{name}.toml").read_text(encoding="utf-8")
    assert _words(text) == _words(stored)
    assert _numbers(text) == pytest.approx(_numbers(stored), rel=0.02)


def _words(text: str) -> list[str]:
    return [word for word in text.split() if not _is_number(word)]


def _numbers(text: str) -> list[float]:
    return [float(word.rstrip(",")) for word in text.split() if _is_number(word)]


def _is_number(word: str) -> bool:
    try:
        float(word.rstrip(","))
    except ValueError:
        return False
    return True


def test_every_interconnect_has_a_writer() -> None:
    assert {file.stem for file in FILES.glob("*.toml")} == NODE_LINKS.keys() | NETWORKS.keys()


def test_names_of_nccl_tests_are_translated(tmp_path: Path) -> None:
    head = "id,collective,hardware,nodes,gpus_per_node,interconnect,software,size_bytes,time_us,wrong_elements,source\n"
    rows = [
        "a,alltoall,H100,2,8,50 GB/s per GPU,nccl-tests,1000000,100,0,github:x/y@1",
        "b,sendrecv,H100,1,8,NVLink,nccl-tests,1000000,100,0,github:x/y@1",
        "c,all_reduce,H100,1,8,NVLink,nccl-tests,1000000,100,7,github:x/y@1",  # wrong elements
        "d,all_reduce,H100,1,8,NVLink,nccl-tests,1000,100,0,github:x/y@1",  # too small
        "e,all_reduce,H100,1,8,NVLink,nccl-tests,,100,0,github:x/y@1",  # no size
    ]
    (tmp_path / "rows.csv").write_text(head + "\n".join(rows) + "\n")
    (tmp_path / "other.csv").write_text("id,seconds\n1,2\n")
    first, second, small = read_measurements(tmp_path)
    assert [m.is_scored for m in (first, second, small)] == [True, True, False]
    assert (first.kind, second.kind) == ("all_to_all", "send_recv")
    assert first.network_rate == 5e10
    assert first.seconds == pytest.approx(1e-4)
    assert first.generation == "Hopper"
    assert first.cluster == second.cluster == "H100, y"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,gossip,H100,1,8,NVLink,nccl-tests,1000000,100", "row a: collective 'gossip' is none of all_reduce"),
        ("a,all_reduce,H100,one,8,NVLink,nccl-tests,1000000,100", "row a: .*'one'.* correct the number"),
        ("a,all_reduce,H100,1,8,NVLink,nccl-tests,1000000,-3", "row a: 1 nodes of 8 GPUs, .* cannot be"),
    ],
)
def test_a_faulty_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    head = "id,collective,hardware,nodes,gpus_per_node,interconnect,software,size_bytes,time_us"
    (tmp_path / "rows.csv").write_text(f"{head}\n{row}\n")
    with pytest.raises(ArgumentError, match=message):
        read_measurements(tmp_path)


def test_a_listing_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,collective,size_bytes\na,all_reduce,8\n")
    with pytest.raises(ArgumentError, match=r"rows.csv: a listing .* needs the columns gpus_per_node, hardware"):
        read_measurements(tmp_path)
