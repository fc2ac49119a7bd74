"""How long do operations take, forward and backward, while all ranks compute? Matrix products, elementwise, tiny ones,
and attention.

Ranks of one machine share its cores and its memory, so each is measured with all of them at work. Autograd's part is
in the measured time, as it is in a training step, where Python computes itself; a GPU replays what it was given once
(a CUDA graph), and the time is the device's alone. Data is random: a GPU's clock depends on the bits that it flips.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.calibration.samples import WorkSample
from autopar.calibration.timing import REPLAYS, Tell, TimedRounds, replayed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# (rows, inner, columns): square, tall, wide and small, as layers, heads and their slices have them
PRODUCTS = {
    "cpu": (
        (512, 256, 256), (128, 256, 256), (512, 256, 1024), (512, 1024, 256), (2048, 64, 256),
        (2048, 256, 64), (64, 64, 64), (512, 512, 512),
    ),
    "cuda": (
        (4096, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 1024, 1024), (2048, 8192, 1024),
        (512, 4096, 4096), (128, 128, 128), (8192, 8192, 8192),
    ),
}  # fmt: skip

# (batch, heads, rows, head) of causal attention
ATTENTIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "cpu": (
        (8, 8, 32, 16),
        (8, 8, 64, 16),
        (8, 4, 64, 32),
        (4, 4, 128, 64),
        (2, 4, 256, 64),
        (2, 4, 128, 128),
    ),
    "cuda": (
        (1, 32, 8192, 128),
        (2, 32, 4096, 128),
        (8, 32, 1024, 128),
        (16, 12, 1024, 64),
        (4, 16, 2048, 64),
        (32, 12, 512, 64),
    ),
}

ATTENTION_DTYPE = {"cpu": "fp32", "cuda": "bf16"}

# elements of memory-bound operations, the least of them a launch and no more
ELEMENTS = {"cpu": (16, 32_768, 262_144, 1_048_576), "cuda": (16, 1_048_576, 16_777_216, 67_108_864)}


class MeasuredWork(NamedTuple):
    name: str
    dtype: str
    product: tuple[int, ...]
    nbytes: float
    backward_nbytes: float
    call: Callable[[], object]
    attention: tuple[int, ...] = ()


class WorkRounds:
    """Products in `dtypes`, attention and, in fp32, memory-bound operations, round by round; all ranks together."""

    def __init__(self, dtypes: Sequence[str], *, device: torch.device, tell: Tell) -> None:
        self.works = [_product(shape, name, device) for name in dtypes for shape in PRODUCTS[device.type]]
        own = ATTENTION_DTYPE[device.type]
        self.works += [_attention(size, own, device) for size in ATTENTIONS[device.type] if own in dtypes]
        self.works += [
            make(count, device) for count in ELEMENTS[device.type] for make in (_silu, _product_of_two, _softmax)
        ]
        calls = [replayed(work.call, device) for work in self.works]
        self.rounds = TimedRounds(calls, device, tell, "operations", times=REPLAYS[device.type])

    def run(self, tell: Tell) -> None:
        self.rounds.run(tell)

    def samples(self) -> tuple[WorkSample, ...]:
        return tuple(
            WorkSample(
                name=work.name,
                dtype=work.dtype,
                product=work.product,
                attention=work.attention,
                nbytes=work.nbytes,
                backward_nbytes=work.backward_nbytes,
                seconds=seconds,
            )
            for work, seconds in zip(self.works, self.rounds.typical(), strict=True)
        )


def _product(shape: tuple[int, int, int], dtype: str, device: torch.device) -> MeasuredWork:
    rows, inner, columns = shape
    x = torch.randn(rows, inner, dtype=DTYPES[dtype], device=device, requires_grad=True)
    weight = torch.randn(columns, inner, dtype=DTYPES[dtype], device=device, requires_grad=True)
    elements = rows * inner + inner * columns + rows * columns
    call = _both_ways(lambda: F.linear(x, weight), (x, weight))
    name = f"{rows} x {inner} x {columns}"
    nbytes = elements * x.element_size()
    return MeasuredWork(name, dtype, (rows, columns, inner), nbytes, 2 * nbytes, call)


def _attention(size: tuple[int, ...], dtype: str, device: torch.device) -> MeasuredWork:
    q, k, v = (torch.randn(size, dtype=DTYPES[dtype], device=device, requires_grad=True) for _ in range(3))
    call = _both_ways(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))
    nbytes = float(q.numel() * q.element_size())
    return MeasuredWork(f"{' x '.join(map(str, size))}, causal", dtype, (), 4 * nbytes, 8 * nbytes, call, size)


def _silu(count: int, device: torch.device) -> MeasuredWork:
    x = torch.randn(count, device=device, requires_grad=True)
    return _memory_bound(f"silu of {count}", count, (2, 3), _both_ways(lambda: F.silu(x), (x,)))


def _product_of_two(count: int, device: torch.device) -> MeasuredWork:
    x, y = (torch.randn(count, device=device, requires_grad=True) for _ in range(2))
    return _memory_bound(f"mul of {count}", count, (3, 5), _both_ways(lambda: x * y, (x, y)))


def _softmax(count: int, device: torch.device) -> MeasuredWork:
    x = torch.randn(max(1, count // 128), min(128, count), device=device, requires_grad=True)
    return _memory_bound(f"softmax of {count}", count, (2, 3), _both_ways(lambda: x.softmax(-1), (x,)))


def _memory_bound(name: str, count: int, times: tuple[int, int], call: Callable[[], object]) -> MeasuredWork:
    """`times` that planning counts an element as read or written, forward and backward."""
    return MeasuredWork(name, "fp32", (), 4.0 * times[0] * count, 4.0 * times[1] * count, call)


def _both_ways(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    gradient = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, gradient)
