"""Compute: the roofline and its two slopes; fitted constants never below the physical floor."""

import random
from dataclasses import replace

import pytest

from autopar.cost_models.compute import CACHED, HOST, compute_seconds, moved_seconds, rates_of
from autopar.cost_models.efficiency import RANGES, load_efficiency
from autopar.errors import ArgumentError, ClusterError
from autopar.values.cluster import load_cluster

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


def test_launches_and_bytes_within_a_step_take_their_factors_and_flops_none() -> None:
    alone = replace(DEVICE, launch_seconds=0.25)
    own = replace(alone, launch_in_step=2.0, bytes_in_step=3.0)
    assert compute_seconds(0, 1e12, "bf16", own) == pytest.approx(3e12 / DEVICE.memory_bandwidth + 0.5)
    assert compute_seconds(1e18, 1, "bf16", own) == pytest.approx(compute_seconds(1e18, 1, "bf16", alone) + 0.25)
    worked = compute_seconds(1e18, 1, "bf16", own) - 0.5
    assert compute_seconds(1e18, 1, "bf16", replace(own, flops_in_step=1.5)) == pytest.approx(1.5 * worked + 0.5)
    in_place = replace(own, optimizer_bytes=0.5)
    assert compute_seconds(0, 1e12, "bf16", in_place) == compute_seconds(0, 1e12, "bf16", own)
    moved = 3e6 / DEVICE.memory_bandwidth
    for kernels, launches in ((1, 0.5), (2, 2.0), (9, 9.0)):
        other, host = (rates_of(replace(in_place, name=name)) for name in ("own", "cpu"))
        assert other.update(1e6, kernels) == pytest.approx(moved + 0.5)
        assert host.update(1e6, kernels) == pytest.approx(moved / 2 + launches * 0.5)
    for launches in (0.0, 2.0, 3.5):
        host = rates_of(replace(own, name="cpu", replay_launches=launches))
        assert host.replay_seconds == pytest.approx(launches * 0.5)
    processor = replace(own, name="cpu")
    for nbytes, times in ((1e6, 3.0), (CACHED, 3.0), (3 * CACHED, 5 / 3)):
        assert moved_seconds(nbytes, processor) == pytest.approx(times * nbytes / DEVICE.memory_bandwidth)
        assert moved_seconds(nbytes, own) == pytest.approx(3.0 * nbytes / DEVICE.memory_bandwidth)
    for field in ("launch_in_step", "bytes_in_step", "flops_in_step", "optimizer_bytes"):
        with pytest.raises(ClusterError, match=f"h100: {field}"):
            replace(DEVICE, **{field: 0.0})
    with pytest.raises(ClusterError, match="h100: replay_launches -1"):
        replace(DEVICE, replay_launches=-1.0)


def test_calibrated_attention_takes_longer_than_products_the_shorter_its_heads() -> None:
    own = replace(
        DEVICE, name="calibrated", launch_seconds=0.0, attention=0.8, attention_per_head=64.0, attention_per_key=100.0
    )
    rates = rates_of(own)
    products = compute_seconds(1e15, 0.0, "bf16", own)
    for head, times in ((64, 1.9), (128, 1.4), (256, 1.15)):
        for backward in (False, True):
            assert rates.attention(
                1e15, 0.0, "bf16", head=head, keys=1000, every=1000, backward=backward
            ) == pytest.approx(times * products)
        assert rates.least(1e15, 0.0, "bf16", attention=True) <= times * products
    with pytest.raises(ClusterError, match=r"attention 0\.0 must be positive"):
        replace(own, attention=0.0)


def test_attention_on_a_host_works_at_whole_blocks_of_keys_in_any_dtype() -> None:
    """A causal query sees half of the keys; up to a block all are worked at, of more half a block too many."""
    host = replace(
        DEVICE, name=HOST, launch_seconds=0.0, attention=0.8, attention_per_head=16.0, attention_per_key=64.0
    )
    rates, per_pair = rates_of(host), 4.0 * 32
    for every, worked in ((64, 64), (512, 512), (1024, 768), (8192, 4352)):
        flops = every / 2 * per_pair * 1e6
        products = compute_seconds(worked * per_pair * 1e6, 0.0, "fp32", host)
        found = rates.attention(flops, 0.0, "fp32", head=32, keys=every / 2, every=every)
        assert found == pytest.approx((0.8 + 16 / 32 + 64 / worked) * products)
        seen = rates.attention(2 * flops, 0.0, "fp32", head=32, keys=every, every=every)
        assert found <= seen * (1 + 1e-12) and (every > 512 or found == pytest.approx(seen))
        assert rates.least(flops, 0.0, "fp32", attention=True) <= found
    device = replace(host, name="calibrated")
    own = rates_of(device).attention(1e12, 0.0, "fp32", head=32, keys=32, every=64)
    assert own == pytest.approx(compute_seconds(1e12, 0.0, "fp32", device)), "elsewhere in 16 bits alone"


def test_rows_of_an_odd_length_take_longer_in_16_bits_on_a_gpu() -> None:
    """A linear of 50257 words, and of 50304, which is whole pieces of 16 bytes."""
    for device in (DEVICE, replace(DEVICE, name="calibrated")):
        rates = rates_of(device)
        for columns, longer in ((50304, 1.0), (50260, 2.7), (50258, 2.7), (50257, 6.0)):
            sizes, nbytes = [(1, 16384, columns, 768)], 1e6
            own = rates.products(sizes, nbytes, "bf16", rows=(columns, 768))
            assert own == pytest.approx(longer * rates.products(sizes, nbytes, "bf16"), rel=1e-2)
            assert rates.products(sizes, nbytes, "fp32", rows=(columns, 768)) == rates.products(sizes, nbytes, "fp32")
    host = rates_of(load_cluster("1xcpu").device)
    assert host.products([(1, 8, 7, 8)], 1.0, "bf16", rows=(7, 8)) == host.products([(1, 8, 7, 8)], 1.0, "bf16")


def test_no_operation_is_shorter_than_its_launch() -> None:
    assert compute_seconds(0, 0, "int64", DEVICE) == DEVICE.launch_seconds


def test_flops_in_a_dtype_without_peak_are_refused_bytes_are_not() -> None:
    assert compute_seconds(0, 8e9, "int64", DEVICE) == pytest.approx(
        8e9 / DEVICE.memory_bandwidth + DEVICE.launch_seconds
    )
    with pytest.raises(ArgumentError, match="h100 has no peak flop/s for int64"):
        compute_seconds(1, 0, "int64", DEVICE)


@pytest.mark.parametrize("gpu", ["h100", "a100", "h200", "v100", "rtx2080ti", "b200"])
def test_no_price_is_below_flops_at_the_peak_or_bytes_at_the_bandwidth(gpu: str) -> None:
    device = load_cluster(f"1x{gpu}").device
    rates, rng = rates_of(device), random.Random(0)
    peak = device.peak("fp16")
    for _ in range(200):
        batch, m, n, k = rng.choice([1, 1, 7]), *(int(10 ** rng.uniform(0, 4)) for _ in range(3))
        flops, nbytes = 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n)
        floor = max(flops / peak, nbytes / device.memory_bandwidth)
        prices = [
            rates.products([(batch, m, n, k)], nbytes, "fp16"),
            rates.attention(flops, nbytes, "fp16", head=128, keys=64, every=64),
            rates.attention(flops, nbytes, "fp16", head=128, keys=64, every=64, backward=True),
            rates.other(flops, nbytes, "fp16"),
        ]
        assert min(prices) >= floor
        assert rates.least(flops, nbytes, "fp16", products=True) <= prices[0] * (1 + 1e-12)
        assert rates.least(flops, nbytes, "fp16", attention=True) <= prices[1] * (1 + 1e-12)
        assert rates.products([(batch, 2 * m, n, k)], nbytes, "fp16") >= prices[0]


def test_a_device_is_priced_by_fitted_constants_unless_it_was_calibrated_or_nobody_fitted_any() -> None:
    assert rates_of(DEVICE).name == "fitted constants of h100"
    assert rates_of(replace(DEVICE, memory_bytes=1)).name == "fitted constants of h100"
    assert rates_of(load_cluster("8xa100-40gb").device).name == "fitted constants of a100"
    calibrated = replace(DEVICE, efficiency=0.9, sources=(("efficiency", "measured"),))
    assert rates_of(calibrated).name == "roofline of h100"
    assert rates_of(load_cluster("1xcpu").device).name == "roofline of cpu"


@pytest.mark.parametrize(("gpu", "lender"), [("v100", "a100"), ("rtx2080ti", "a100"), ("b200", "h100")])
def test_a_gpu_of_which_no_step_was_measured_borrows_parts_and_says_so(gpu: str, lender: str) -> None:
    own, lent = load_efficiency(gpu), load_efficiency(lender)
    assert (own.borrowed, lent.borrowed) == (lender, "")
    assert rates_of(load_cluster(f"1x{gpu}").device).name == f"constants borrowed from {lender} for {gpu}"
    assert all(getattr(own, key) == getattr(lent, key) for key in RANGES)
    assert all("borrowed" in source for key, source in own.sources if key != "num_sms")
