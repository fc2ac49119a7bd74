"""How much work is one layer, forward and backward, and the head? By kind, on one rank and for one micro-batch.

A unit of each kind is a second on the device at its nominal rate; `Efficiency.seconds_per_unit` says what it costs. So
a step's work is a vector that depends on model, configuration and cluster, its price a product with a dozen constants.

Bytes of memory-bound operations count every read and write of a kernel. A fused LayerNorm or RMSNorm reads and writes
two bytes an element (4), its backward reads two and writes one (6); an RMSNorm of torch operations in float32 moves 34
and 60. Residual sums, dropout (a byte of mask), GELU, SwiGLU and rotary embedding likewise, `_elementwise`.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from autopar.cost_models.collectives import Transfer
from autopar.cost_models.compute import attention_seconds, product_seconds
from autopar.cost_models.gemm import slot_flops
from autopar.cost_models.training_config import TrainingConfig, param_nbytes
from autopar.cost_models.transformer import TransformerShape
from autopar.values.device import Device

Work = npt.NDArray[np.float64]


class Kind(IntEnum):
    GEMM = 0
    GEMM_FP8 = 1
    ATTENTION = 2
    SCORES = 3
    MEMORY = 4
    KERNEL = 5
    TENSOR = 6
    TENSOR_OVERLAPPED = 7
    PIPE = 8
    BLOCKING = 9  # in seconds: launches that the host waits for
    TENSOR_LATENCY = 10  # of the messages whose bytes are TENSOR, TENSOR_OVERLAPPED, PIPE
    TENSOR_OVERLAPPED_LATENCY = 11
    PIPE_LATENCY = 12


BLOCKING_LAUNCH_SECONDS = 25e-6  # assumed: an eager operation's dispatch, its launch and the return from it
# Bytes an element cast to fp8: read for its maximum, read again, written in two layouts; fused, read and written once.
# A scale for each row and column takes both twice, and its matrix products are assumed to run at 0.65 of the rate with
# one scale a tensor: Llama-3-8B on 8 H100 then gains 6% over bf16 and 29% with one scale, where pytorch/torchtitan
# commit 7a04053 measured 11% and 25%.
FP8_CAST = {"all": 4, "norm": 6, "none": 6}
ROWWISE_CAST = 2
ROWWISE_RATE = 0.65
FLASH1 = 0.6  # rate of version 1, of version 2: Dao 2023, arXiv:2307.08691, figures 5 and 6, causal, head dim 128
# Bytes a score between its two matrix products: one fused kernel (scale, mask, softmax) or torch's (scale, mask, cast
# up, softmax, cast down); then dropout with a byte of mask.
SCORE_BYTES = {"fused": (4, 6), "unfused": (28, 32)}
DROPOUT_SCORE_BYTES = (5, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Work of a layer: `forward`, `backward` to inputs, `weight` gradients, and what `recompute` runs again."""

    forward: Work
    backward: Work
    weight: Work
    recompute: Work

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            weight=self.weight + other.weight,
            recompute=self.recompute + other.recompute,
        )

    def times(self, count: float) -> "PassWork":
        return PassWork(
            forward=self.forward * count,
            backward=self.backward * count,
            weight=self.weight * count,
            recompute=self.recompute * count,
        )


def dense_precision(config: TrainingConfig) -> str:
    """Of what stays out of fp8: attention and the head."""
    return "bf16" if config.precision.startswith("fp8") else config.precision


def no_work() -> Work:
    return np.zeros(len(Kind))


LATENCY_OF = {
    Kind.TENSOR: Kind.TENSOR_LATENCY,
    Kind.TENSOR_OVERLAPPED: Kind.TENSOR_OVERLAPPED_LATENCY,
    Kind.PIPE: Kind.PIPE_LATENCY,
}


def send(work: Work, kind: Kind, sent: Transfer) -> None:
    """Add messages to `work`."""
    work[kind] += sent.wire_seconds
    work[LATENCY_OF[kind]] += sent.latency_seconds


def products_of_layer(shape: TransformerShape, config: TrainingConfig) -> list[tuple[float, float, float]]:
    """(m, n, k) of each forward matrix product with weights of one layer, on one rank; experts see balanced tokens."""
    rows, tp = config.tokens, config.tp
    qkv = (shape.query_dim + 2 * max(shape.kv_dim, shape.head_dim * tp)) / tp
    queries = shape.query_dim / tp
    inputs = [qkv] if config.fused_products else [queries, (qkv - queries) / 2, (qkv - queries) / 2]
    found: list[tuple[float, float, float]] = [(rows, n, shape.hidden) for n in inputs] + [
        (rows, shape.hidden, queries)
    ]
    width = shape.ffn / tp
    wide = 2 if shape.gated else 1
    up = [wide * width] if config.fused_products and not config.separate_gate else [width] * wide
    local_experts = shape.experts / config.ep
    rows_mlp = rows * shape.experts_per_token * config.ep / shape.experts
    mlp: list[tuple[float, float, float]] = [(rows_mlp, n, shape.hidden) for n in up] + [
        (rows_mlp, shape.hidden, width)
    ]
    return found + mlp * int(local_experts)


def _product(
    m: float, n: float, k: float, peak: float, device: Device, num_sms: int, size: int, sum_nbytes: int = 0
) -> float:
    """`product_seconds` of `size` bytes an element; the result is not written in fp8 and, with `sum_nbytes`, added to a
    sum."""
    nbytes = size * (m * k + k * n) + max(2, size, sum_nbytes) * m * n
    return product_seconds(m, n, k, nbytes, peak, device, num_sms)


def _fused_sum(config: TrainingConfig) -> int:
    return 8 if config.fused_grad_sum else 0


def layer_work(shape: TransformerShape, config: TrainingConfig, device: Device, num_sms: int) -> PassWork:
    """One layer, its communication not included."""
    forward, backward, weight, again = no_work(), no_work(), no_work(), no_work()
    products = products_of_layer(shape, config)
    fp8, rowwise = config.precision.startswith("fp8"), config.precision == "fp8-rowwise"
    kind = Kind.GEMM_FP8 if fp8 else Kind.GEMM
    peak = device.peak("fp8" if fp8 else config.precision) * (ROWWISE_RATE if rowwise else 1.0)
    cast = FP8_CAST[config.fusion] * (ROWWISE_CAST if rowwise else 1)
    size = 1 if fp8 else 4 if config.precision == "fp32" else 2
    for index, (m, n, k) in enumerate(products):
        seconds = _product(m, n, k, peak, device, num_sms, size)
        forward[kind] += seconds
        # torchtitan's per-op policy keeps every second matrix product's result
        again[kind] += seconds * (index % 2) if config.recompute == "op" else 0.0
        backward[kind] += _product(m, k, n, peak, device, num_sms, size)
        weight[kind] += _product(k, n, m, peak, device, num_sms, size, sum_nbytes=_fused_sum(config))
        if fp8:
            forward[Kind.MEMORY] += cast * (m * k + k * n) / device.memory_bandwidth
            backward[Kind.MEMORY] += cast * m * n / device.memory_bandwidth
    core = attention_core(shape, config, device, num_sms)
    elementwise = _elementwise(shape, config)
    forward[Kind.MEMORY] += elementwise[0] / device.memory_bandwidth
    backward[Kind.MEMORY] += elementwise[1] / device.memory_bandwidth
    forward[Kind.KERNEL] += len(products) + 16
    backward[Kind.KERNEL] += 2 * len(products) + 32
    if config.recompute == "op":
        again[Kind.MEMORY] += elementwise[0] / device.memory_bandwidth
    forward, backward = forward + core[0], backward + core[1]
    if config.recompute == "selective":
        again = core[0]
    elif config.recompute in ("full", "alternate"):
        again = forward * (1.0 if config.recompute == "full" else 0.5)
    if config.blocking_launches:
        for work in (forward, backward, again):
            work[Kind.BLOCKING] = BLOCKING_LAUNCH_SECONDS * work[Kind.KERNEL]
    return PassWork(forward=forward, backward=backward, weight=weight, recompute=again)


def attention_core(shape: TransformerShape, config: TrainingConfig, device: Device, num_sms: int) -> tuple[Work, Work]:
    """Scores, softmax and weighted values of one layer: forward and backward. Context parallel ranks share evenly."""
    forward, backward = no_work(), no_work()
    heads = shape.heads / config.tp
    peak = device.peak(dense_precision(config))
    flops = 4 * config.tokens * config.seq * heads * shape.head_dim
    if config.attention in ("flash", "flash1"):
        rate = peak * (FLASH1 if config.attention == "flash1" else 1.0)
        keys = max(shape.kv_dim / config.tp, shape.head_dim)
        # queries, keys, values and results; backward their gradients too; a float32 a row
        tensors = 2 * config.tokens * (heads * shape.head_dim + config.cp * keys) * param_nbytes(config)
        rows = 4 * config.tokens * heads
        forward[Kind.ATTENTION] = attention_seconds(0.5 * flops, tensors + rows, rate, device, backward=False)
        backward[Kind.ATTENTION] = attention_seconds(1.25 * flops, 2 * tensors + rows, rate, device, backward=True)
        return forward, backward
    rows, seq, batch = config.seq / config.cp, config.seq, config.micro_batch * heads
    # Tensor cores want rows of 16 bytes; head dims that are no multiple of 8 run on the float32 units.
    misfit = 1.0 if shape.head_dim % 8 == 0 else max(1.0, peak / device.peak("fp32"))
    scores = batch * rows * seq / device.memory_bandwidth
    product = max(misfit * slot_flops(rows, seq, shape.head_dim, num_sms, batch) / peak, 2 * scores)
    value = max(misfit * slot_flops(rows, shape.head_dim, seq, num_sms, batch) / peak, 2 * scores)
    forward[Kind.SCORES] = product + value
    backward[Kind.SCORES] = 2 * (product + value)
    dropout = DROPOUT_SCORE_BYTES if shape.dropout else (0, 0)
    forward[Kind.MEMORY] = (SCORE_BYTES[config.attention][0] + dropout[0]) * scores
    backward[Kind.MEMORY] = (SCORE_BYTES[config.attention][1] + dropout[1]) * scores
    forward[Kind.KERNEL], backward[Kind.KERNEL] = 4, 8
    return forward, backward


def head_work(shape: TransformerShape, config: TrainingConfig, device: Device, num_sms: int) -> PassWork:
    """Final norm, vocabulary product and cross-entropy in float32 over the logits that a rank holds."""
    forward, backward, weight = no_work(), no_work(), no_work()
    peak = device.peak(dense_precision(config))
    m, n, k = config.tokens, shape.vocab / config.tp, shape.hidden
    size = 4 if config.precision == "fp32" else 2
    forward[Kind.GEMM] = _product(m, n, k, peak, device, num_sms, size)
    backward[Kind.GEMM] = _product(m, k, n, peak, device, num_sms, size)
    weight[Kind.GEMM] = _product(k, n, m, peak, device, num_sms, size, sum_nbytes=_fused_sum(config))
    # cast to float32 (6), maximum (4), subtract and exponentiate (8), sum (4); backward scales (8) and casts (6)
    gathered = config.gathered_logits and config.tp > 1
    held = m * (shape.vocab if gathered else n)
    forward[Kind.MEMORY] = (22 + (4 if gathered else 0)) * held / device.memory_bandwidth
    backward[Kind.MEMORY] = 14 * held / device.memory_bandwidth
    forward[Kind.KERNEL], backward[Kind.KERNEL] = 8, 8
    return PassWork(forward=forward, backward=backward, weight=weight, recompute=no_work())


def embedding_work(shape: TransformerShape, config: TrainingConfig, device: Device) -> PassWork:
    """Rows looked up and summed; backward adds them into the table's gradient."""
    forward, backward = no_work(), no_work()
    elements = config.tokens * shape.hidden
    forward[Kind.MEMORY] = (8 + (5 if shape.dropout else 0)) * elements / device.memory_bandwidth
    backward[Kind.MEMORY] = (14 + (5 if shape.dropout else 0)) * elements / device.memory_bandwidth
    return PassWork(forward=forward, backward=backward, weight=no_work(), recompute=no_work())


def _elementwise(shape: TransformerShape, config: TrainingConfig) -> tuple[float, float]:
    """Bytes of one layer's memory-bound operations but the attention core: forward, backward."""
    rows, tp = config.tokens, config.tp
    split = tp if config.sequence_parallel else 1  # what tensor parallelism leaves whole, sequence parallelism splits
    norm = (4, 6) if config.fusion != "none" or shape.norm_vectors == 2 else (34, 60)
    residual = (6, 6) if not shape.dropout else (7, 11)
    hidden = rows * shape.hidden / split
    wide = rows * shape.ffn * shape.experts_per_token / tp
    rotary = rows * (shape.query_dim + shape.kv_dim) / tp if shape.positions == 0 and shape.norm_vectors == 1 else 0.0
    fused = config.fusion == "all"
    activation = ((6, 10) if fused else (10, 18)) if shape.gated else (4, 6)
    turn = (4, 4) if fused else (18, 22)
    forward = 2 * (norm[0] + residual[0]) * hidden + activation[0] * wide + turn[0] * rotary
    backward = 2 * (norm[1] + residual[1]) * hidden + activation[1] * wide + turn[1] * rotary
    return forward, backward
