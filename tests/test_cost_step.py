"""Step time: closed forms of pipelines, the physical floor, and that nothing gets faster when a part gets slower."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.collectives import transfer, wire_bytes
from autopar.cost_models.compute import product_seconds
from autopar.cost_models.data_exchange import data_exchange
from autopar.cost_models.efficiency import RANGES, Efficiency, known_efficiencies, load_efficiency
from autopar.cost_models.gemm import slot_flops
from autopar.cost_models.layer_work import Kind, attention_core, dense_precision
from autopar.cost_models.links import axis_links
from autopar.cost_models.named_shapes import named_shape
from autopar.cost_models.step_time import StepTime, bubble_fraction, pipeline_seconds, simulate_step
from autopar.cost_models.step_work import step_work, tensor_work
from autopar.cost_models.training_config import TrainingConfig, param_nbytes, stage_params
from autopar.cost_models.transformer import TransformerShape, model_flops, product_params
from autopar.errors import ArgumentError, BatchError, ClusterError, MeshError
from autopar.values.cluster import Cluster, load_cluster

PERFECT = {key: high for key, (_, high) in RANGES.items()} | {"kernel_seconds": 0.0}


def perfect(name: str) -> Efficiency:
    """The fastest constants that their physical ranges allow."""
    return replace(load_efficiency(name), **PERFECT)  # type: ignore[arg-type]


def drawn(seed: int) -> tuple[TransformerShape, TrainingConfig, Cluster]:
    """A random configuration that fits a random cluster."""
    rng = random.Random(seed)
    tp, cp, pp, dp = (
        rng.choice([1, 2, 4, 8]),
        rng.choice([1, 1, 2]),
        rng.choice([1, 2, 4, 8]),
        rng.choice([1, 2, 4, 16]),
    )
    head_dim, gated = rng.choice([64, 100, 128]), rng.random() < 0.5
    heads = tp * rng.choice([1, 2, 5])
    kv_heads = heads if rng.random() < 0.5 else math.gcd(heads, tp)
    hidden = heads * head_dim
    moe = rng.random() < 0.3
    shape = TransformerShape(
        layers=rng.randint(8, 40), hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        ffn=tp * rng.randint(16, 900), vocab=rng.randint(100, 90000), gated=gated, norm_vectors=rng.choice([1, 2]),
        dropout=rng.random() < 0.5, experts=8 if moe else 1, experts_per_token=2 if moe else 1,
    )  # fmt: skip
    schedule = rng.choice(["1f1b", "gpipe", "zb-1p", "zb-2p", "zbv"])
    device = rng.choice(["a100", "h100", "h200"])
    micro_batch, zero = rng.choice([1, 2, 3]), rng.randint(0, 3)
    config = TrainingConfig(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=min(dp, 4) if moe and rng.random() < 0.5 else 1,
        micro_batch=micro_batch,
        global_batch=micro_batch * dp * rng.randint(1, 20),
        seq=rng.choice([512, 2048, 4096]),
        zero=zero,
        virtual_stages=rng.choice([1, 2]) if pp > 1 and schedule == "1f1b" else 1,
        schedule=schedule,
        recompute=rng.choice(["none", "selective", "full", "op", "alternate"]),
        sequence_parallel=rng.random() < 0.5,
        precision=rng.choice(["bf16", "fp16", "fp32"] if device == "a100" else ["bf16", "fp8", "fp8-rowwise"]),
        attention=rng.choice(["flash", "flash1", "fused", "unfused"]),
        fusion=rng.choice(["none", "norm", "all"]),
        overlap_data=rng.random() < 0.5,
        overlap_tensor=rng.choice(["none", "backward", "all"]),
        main_grads=rng.random() < 0.5,
        fused_grad_sum=rng.random() < 0.5,
        blocking_launches=rng.random() < 0.2,
        split_pipe_activations=rng.random() < 0.5,
        split_pipe_gradients=rng.random() < 0.5,
        separate_gate=rng.random() < 0.3,
        deepspeed_zero3=zero == 3 and rng.random() < 0.5,
        whole_gradients=zero == 1 and rng.random() < 0.5,
        float32_exchange=rng.random() < 0.3,
    )
    ranks = config.num_devices
    return shape, config, load_cluster(f"{ranks}x{device}" if ranks <= 8 else f"{ranks // 8}x8x{device}")


def simulated(shape: TransformerShape, config: TrainingConfig, cluster: Cluster) -> StepTime:
    return simulate_step(shape, config, cluster, load_efficiency(cluster.device.name))


@pytest.mark.parametrize("seed", range(80))
def test_no_step_is_below_the_physical_floor(seed: int) -> None:
    """Whatever the constants: all flops at the peak, and every parameter read once a pass and micro-batch."""
    shape, config, cluster = drawn(seed)
    device, tokens = cluster.device, config.global_batch * config.seq
    seconds = simulate_step(shape, config, cluster, perfect(device.name)).seconds
    causal = config.attention.startswith("flash")
    in_fp8 = config.precision.startswith("fp8")
    peak = device.peak("fp8" if in_fp8 else config.precision)
    flops = model_flops(shape, tokens, config.seq, causal=causal)
    assert seconds >= flops / peak / config.num_devices
    if in_fp8:  # attention and the head stay in 16 bit
        head = 6 * tokens * shape.vocab * shape.hidden
        layers = 6 * tokens * product_params(shape) - head
        rest = flops - layers
        assert seconds >= (layers / peak + rest / device.peak("bf16")) / config.num_devices
    table = shape.vocab * shape.hidden / config.tp
    size = 1 if in_fp8 else param_nbytes(config)
    weights = min(stage_params(shape, config, stage) for stage in range(config.pp)) - 2 * table
    assert seconds >= 2 * config.num_microbatches * size * weights / device.memory_bandwidth * 0.99
    assert 0 < simulated(shape, config, cluster).mfu < 1


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_faster_when_a_part_is_slower_or_the_work_is_more(seed: int) -> None:
    shape, config, cluster = drawn(seed)
    before = simulated(shape, config, cluster).seconds
    device = cluster.device
    slower = [
        replace(device, memory_bandwidth=device.memory_bandwidth / 2),
        replace(device, peak_flops=tuple((dtype, peak / 2) for dtype, peak in device.peak_flops)),
    ]
    for other in slower:
        assert simulated(shape, config, replace(cluster, device=other)).seconds >= before
    for k, level in enumerate(cluster.levels):
        plain = replace(level, lines=(), in_network=None)
        for change in ({"bandwidth": level.bandwidth / 3}, {"alpha": 3 * level.alpha}):
            levels = [replace(cluster, levels=(*cluster.levels[:k], each, *cluster.levels[k + 1 :]))
                      for each in (plain, replace(plain, **change))]  # type: ignore[arg-type]  # fmt: skip
            fast, slow = (simulated(shape, config, each).seconds for each in levels)
            assert slow >= fast * (1 - 1e-12)
    for more in ({"global_batch": 2 * config.global_batch}, {"seq": 2 * config.seq}, {"recompute": "full"}):
        assert simulated(shape, replace(config, **more), cluster).seconds >= before * (1 - 1e-12), more  # type: ignore[arg-type]
    deeper = replace(shape, layers=shape.layers + config.pp)
    assert simulated(deeper, config, cluster).seconds > before


@pytest.mark.parametrize("p", [1, 2, 4, 16])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_bubbles_of_equal_stages_are_the_closed_forms(p: int, m: int) -> None:
    f, b, w = 1.0, 2.2, 0.9
    forward, backward, weights, stages = (np.array([x]) for x in (f, b, w, float(p)))

    def bubble(schedule: str, v: int = 1) -> float:
        return pipeline_seconds(forward, backward, weights, stages, m, schedule, v) - m * (f + b)

    assert bubble("1f1b") == pytest.approx((p - 1) * (f + b))
    assert bubble("gpipe") == pytest.approx((p - 1) * (f + b))
    assert bubble("1f1b") / (m * (f + b)) == pytest.approx(bubble_fraction(p, m))
    for v in (2, 5):
        assert bubble("1f1b", v) == pytest.approx((p - 1) * (f + b) / v)
        assert bubble("1f1b", v) / (m * (f + b)) == pytest.approx(bubble_fraction(p, m, v))
    assert bubble("zb-1p") == pytest.approx((p - 1) * (f + b - 2 * w)), "T_F + T_B - T_W of Qi et al., b = T_B + T_W"
    assert bubble("zb-2p") == pytest.approx((p - 1) * max(0.0, f + b - 3 * w))


def test_the_slowest_stage_sets_the_pace() -> None:
    f, b, counts = np.array([1.0, 1.5]), np.array([2.0, 2.5]), np.array([3.0, 1.0])
    assert pipeline_seconds(f, b, f, counts, 10, "1f1b", 1) == pytest.approx(10 * 4.0 + 3 * 3.0)


@pytest.mark.parametrize("seed", range(50))
def test_slots_are_never_fewer_than_flops_and_grow_with_the_product(seed: int) -> None:
    rng = random.Random(seed)
    m, n, k = (rng.randint(1, 9000) for _ in range(3))
    slots = slot_flops(m, n, k, 108)
    assert slots >= 2 * m * n * k
    assert slot_flops(m, n, k, 108, batch=3) >= slots
    for bigger in ((m + 77, n, k), (m, n + 77, k), (m, n, k + 77)):
        assert slot_flops(*bigger, 108) >= slots
    assert slot_flops(8192, 8192, 8192, 108) < 1.15 * 2 * 8192**3, "large products lose little"


@pytest.mark.parametrize("seed", range(60))
def test_no_part_of_a_layer_is_below_its_flops_or_its_bytes(seed: int) -> None:
    shape, config, cluster = drawn(seed)
    device = cluster.device
    rng = random.Random(seed)
    m, n, k = rng.choice([1, 8, 4000]), rng.randint(1, 5000), rng.randint(1, 5000)
    peak = device.peak("bf16")
    seconds = product_seconds(m, n, k, 2 * (m * k + k * n + m * n), peak, device, 108)
    assert seconds >= 2 * m * n * k / peak
    assert seconds >= 2 * (m * k + k * n + m * n) / device.memory_bandwidth
    forward, backward = (work.sum() - work[Kind.KERNEL] for work in attention_core(shape, config, device, 108))
    flash = config.attention.startswith("flash")
    flops = 4 * config.tokens * config.seq * shape.query_dim / config.tp * (0.5 if flash else 1.0)
    rate = device.peak(dense_precision(config))
    assert forward >= flops / rate
    assert backward >= (2.5 if flash else 2.0) * flops / rate, "a flash kernel computes the scores again"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_take_the_bytes_that_each_rank_must_receive(zero: int) -> None:
    cluster, shape = load_cluster("8xa100"), named_shape("gpt-1.7b")
    config = TrainingConfig(dp=8, zero=zero, micro_batch=1, global_batch=8, seq=2048, main_grads=False)
    line_rate = cluster.levels[0].line_rate
    assert line_rate is not None
    grads = 2 * stage_params(shape, config, 0)
    received = wire_bytes("reduce_scatter", grads, 8) * {0: 2, 1: 2, 3: 3}[zero]  # gathers are as large
    work = step_work(shape, config, cluster, perfect("a100"))
    sent = work.exchange.seconds(1.0, 1.0)
    assert received / line_rate <= sent <= 3 * received / line_rate
    slow = simulated(shape, config, cluster)
    hidden = simulated(shape, replace(config, overlap_data=True), cluster)
    alone = simulated(shape, replace(config, dp=1, global_batch=1), load_cluster("1xa100"))
    assert slow.data_seconds >= sent > hidden.data_seconds > alone.data_seconds == 0


def test_gradients_summed_whole_in_float32_are_an_all_reduce_and_a_gather() -> None:
    cluster, shape = load_cluster("4x8xa100"), named_shape("gpt-1.7b")
    links = axis_links(cluster, (1, 32, 1, 1), (1, 2))
    base = TrainingConfig(dp=32, zero=1, micro_batch=1, global_batch=32, seq=2048, main_grads=False)
    params = stage_params(shape, base, 0)

    def sent(**habits: bool) -> float:
        return data_exchange(shape, replace(base, **habits), cluster, 0.5).sent.seconds(0.5)

    gathered = transfer("all_gather", 2 * params, links, 0.5).seconds(0.5)
    for size, habits in ((2, {}), (4, {"float32_exchange": True})):
        reduced = transfer("all_reduce", size * params, links, 0.5).seconds(0.5)
        scattered = transfer("reduce_scatter", size * params, links, 0.5).seconds(0.5)
        assert sent(whole_gradients=True, **habits) == pytest.approx(reduced + gathered)
        assert sent(**habits) == pytest.approx(scattered + gathered)


def test_zero3_of_deepspeed_gathers_weights_one_by_one_into_lists() -> None:
    """Four weights a layer of h x (3h, h, 4h, 4h): the last, a third, is gathered twice, the others three times."""
    cluster, shape = load_cluster("4x8xa100"), named_shape("gpt-1.7b")
    config = TrainingConfig(dp=32, zero=3, micro_batch=1, global_batch=32, seq=2048, recompute="full", main_grads=False)
    lists = data_exchange(shape, replace(config, deepspeed_zero3=True), cluster, 1.0)
    whole = data_exchange(shape, config, cluster, 1.0)
    assert whole.copy_seconds == whole.launch_seconds == 0
    gathers, device = 2 + 2 / 3, cluster.device
    launches = 4 * shape.layers * (gathers + 1) * 32
    assert lists.launch_seconds == pytest.approx(launches * device.launch_seconds, rel=1e-3)
    nbytes = 2 * stage_params(shape, config, 0) * (3 * gathers + 2)
    assert lists.copy_seconds == pytest.approx(nbytes / device.memory_bandwidth, rel=1e-3)
    assert lists.sent.wire_seconds / whole.sent.wire_seconds == pytest.approx((gathers + 1) / 3, rel=1e-2)
    assert lists.sent.latency_seconds / whole.sent.latency_seconds == pytest.approx(4 * (gathers + 1) / 3, rel=1e-2)
    assert lists.seconds(0.5, 0.25) == pytest.approx(
        lists.sent.latency_seconds + 2 * lists.sent.wire_seconds + 4 * lists.copy_seconds + lists.launch_seconds
    )
    kept = data_exchange(shape, replace(config, deepspeed_zero3=True, recompute="none"), cluster, 1.0)
    assert kept.launch_seconds == pytest.approx(4 * shape.layers * 3 * 32 * device.launch_seconds)


def test_a_gate_of_its_own_sums_the_gradient_of_its_input_once_more() -> None:
    cluster, shape = load_cluster("8xa100"), named_shape("llama-3-8b")
    config = TrainingConfig(tp=8, micro_batch=1, global_batch=1, seq=2048)
    value = load_efficiency("a100")
    once, again = (tensor_work(shape, replace(config, separate_gate=gate), cluster, value) for gate in (False, True))
    for kind in (Kind.TENSOR, Kind.TENSOR_LATENCY):
        assert again.backward[kind] == pytest.approx(1.5 * once.backward[kind])
        assert again.forward[kind] == once.forward[kind] > 0


def test_constants_outside_their_range_are_refused_and_those_shipped_are_inside() -> None:
    assert {"a100", "h100", "h200"} <= set(known_efficiencies())
    for name in known_efficiencies():
        shipped = load_efficiency(name)
        assert {key for key, source in shipped.sources if source} == {"num_sms", *RANGES}
        for key, (_, high) in RANGES.items():
            with pytest.raises(ClusterError, match=f"{key} .* is outside its physical range"):
                replace(shipped, **{key: high * 1.01})  # type: ignore[arg-type]
    assert load_efficiency("a100-40gb") == load_efficiency("a100")
    with pytest.raises(ClusterError, match="no training constants are known for device 'cpu'"):
        load_efficiency("cpu")


def test_what_does_not_fit_is_refused() -> None:
    shape, cluster = named_shape("llama-3-8b"), load_cluster("8xh100")
    base = {"micro_batch": 1, "global_batch": 16, "seq": 2048}
    with pytest.raises(MeshError, match=r"tp 2 x pp 2 x dp 1 x cp 1 = 4 ranks, but cluster 8xh100 has 8 devices"):
        simulated(shape, TrainingConfig(tp=2, pp=2, **base), cluster)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="tp 5 does not divide 32 heads"):
        simulated(shape, TrainingConfig(tp=5, **base), load_cluster("5xh100"))  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"global batch 16 is not divisible by 3 .* use a multiple of 3"):
        TrainingConfig(dp=3, **base)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no peak flop/s for fp8"):
        simulated(shape, TrainingConfig(dp=8, precision="fp8", **base), load_cluster("8xa100"))  # type: ignore[arg-type]
    for field, zero in (("deepspeed_zero3", 3), ("whole_gradients", 1)):
        with pytest.raises(ArgumentError, match=f"{field} is for zero {zero}, but zero is 2"):
            TrainingConfig(zero=2, **{**base, field: True})  # type: ignore[arg-type]
    for field, value in (
        ("recompute", "some"),
        ("schedule", "x"),
        ("attention", "y"),
        ("zero", 4),
        ("overlap_tensor", "z"),
    ):
        with pytest.raises(ArgumentError, match=f"{field} .* is not one of"):
            TrainingConfig(**{**base, field: value})  # type: ignore[arg-type]
