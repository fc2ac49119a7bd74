"""Compute: the roofline and its two slopes."""

import pytest

from autopar.cluster import load_cluster
from autopar.cost_models.compute import compute_seconds
from autopar.errors import ArgumentError

DEVICE = load_cluster("8xh100").device


def test_an_operation_is_bound_by_flops_or_by_bytes() -> None:
    rate = DEVICE.peak("bf16") * DEVICE.efficiency
    ridge = rate / DEVICE.memory_bandwidth  # flops a byte at which both take as long
    nbytes = 1e9
    assert compute_seconds(2 * ridge * nbytes, nbytes, "bf16", DEVICE) == pytest.approx(
        2 * ridge * nbytes / rate + DEVICE.launch_seconds
    )
    assert compute_seconds(0.5 * ridge * nbytes, nbytes, "bf16", DEVICE) == pytest.approx(
        nbytes / DEVICE.memory_bandwidth + DEVICE.launch_seconds
    )


def test_no_operation_is_shorter_than_its_launch() -> None:
    assert compute_seconds(0, 0, "int64", DEVICE) == DEVICE.launch_seconds


def test_flops_in_a_dtype_without_peak_are_refused_bytes_are_not() -> None:
    assert compute_seconds(0, 8e9, "int64", DEVICE) == pytest.approx(
        8e9 / DEVICE.memory_bandwidth + DEVICE.launch_seconds
    )
    with pytest.raises(ArgumentError, match="h100 has no peak flop/s for int64"):
        compute_seconds(1, 0, "int64", DEVICE)
