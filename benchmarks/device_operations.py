"""How long do a device's kernels take, by size? The curves that a roofline's constants stand for, measured.

    python -m benchmarks.device_operations --out h200.csv [--rounds 5] [--dtypes bf16,fp32] [--quick]

One process, one device (a GPU, or the CPU where there is none), random data. A row: one operation of one size, forward
alone and forward with backward, each captured once as a CUDA graph and replayed, so that the device's time is measured
and not Python's; on a CPU called. `host_seconds`: what Python takes to launch it, forward and backward, where the
device waits (rows small enough for that). flops and nbytes as planning counts them. Median over rounds.
"""

import argparse
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.calibration.timing import REPLAYS, replayed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAMPLE_SECONDS = 8e-3

# (rows, inner, columns) of x[rows, inner] times weight[columns, inner]: blocks of small to large models, heads, slices
PRODUCTS = (
    (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
    (8192, 8192, 8192), (512, 4096, 4096), (1024, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096),
    (8192, 4096, 1024), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 4096, 14336), (4096, 14336, 4096),
    (4096, 4096, 128256), (8192, 1024, 1024), (16384, 1024, 1024), (16384, 768, 768), (16384, 768, 3072),
    (16384, 3072, 768), (16384, 768, 50257), (16384, 768, 50304), (2048, 8192, 1024), (8192, 2048, 8192),
    (8192, 512, 512), (32768, 256, 256), (4096, 8192, 8192), (4096, 8192, 28672), (8192, 5120, 1280),
    (8192, 1280, 5120), (1000, 1000, 1000), (4100, 4096, 4096), (4096, 4096, 512), (4096, 512, 4096),
)  # fmt: skip

# whose rows are no multiple of 16 bytes, what tensor cores and wide loads are for
UNALIGNED = (
    (4096, 4096, 4097), (4096, 4096, 4098), (4096, 4096, 4100), (4096, 4097, 4096), (4096, 4098, 4096),
    (4096, 4100, 4096), (4097, 4096, 4096), (16384, 768, 50258), (16384, 768, 50260), (16384, 768, 50264),
)  # fmt: skip

# (batch, heads, rows, head)
ATTENTIONS = (
    (2, 32, 4096, 128), (1, 32, 8192, 128), (8, 32, 1024, 128), (16, 12, 1024, 64), (4, 16, 2048, 64),
    (32, 12, 512, 64), (64, 12, 197, 64), (1, 8, 4096, 128), (1, 32, 16384, 128), (8, 8, 256, 64),
)  # fmt: skip

ELEMENTS = (1024, 65_536, 1_048_576, 4_194_304, 16_777_216, 67_108_864, 268_435_456)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    operation: str
    dtype: str
    sizes: str
    flops: float
    nbytes: float
    backward_nbytes: float
    forward_seconds: float
    both_seconds: float
    host_seconds: float
    temporary_nbytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """`forward()` of inputs with gradients; flops and nbytes: of forward."""

    operation: str
    dtype: str
    sizes: str
    flops: float
    nbytes: float
    backward_nbytes: float
    inputs: tuple[Tensor, ...]
    forward: Callable[[], Tensor]


def works(dtypes: list[str], device: torch.device, scale: int) -> Iterator[Callable[[], Work]]:
    """One maker a row, so that only its tensors are there while it runs."""
    for dtype in dtypes:
        kind = DTYPES[dtype]
        wide = PRODUCTS if dtype == "bf16" else PRODUCTS[:7:2] + PRODUCTS[10:14]
        for m, k, n in (*wide, *UNALIGNED):
            if m * k * n <= scale**3:
                yield lambda m=m, k=k, n=n, kind=kind, dtype=dtype: _product(m, k, n, kind, dtype, device)
        for size in ATTENTIONS:
            if size[2] <= scale and dtype != "fp32":
                for causal in (True, False):
                    yield lambda size=size, causal=causal, kind=kind, dtype=dtype: _attention(
                        size, causal, kind, dtype, device
                    )
        for count in ELEMENTS:
            if count <= scale**3:
                for name in ELEMENTWISE:
                    yield lambda count=count, name=name, kind=kind, dtype=dtype: _elementwise(
                        name, count, kind, dtype, device
                    )


def _made(shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, dtype=torch.float32, device=device) * 0.5).to(kind).requires_grad_()


def _product(m: int, k: int, n: int, kind: torch.dtype, dtype: str, device: torch.device) -> Work:
    x, weight = _made((m, k), kind, device), _made((n, k), kind, device)
    nbytes = float(kind.itemsize * (m * k + n * k + m * n))
    return Work(
        "linear", dtype, f"{m}x{k}x{n}", 2.0 * m * k * n, nbytes, 2 * nbytes, (x, weight), lambda: F.linear(x, weight)
    )


def _attention(size: tuple[int, ...], causal: bool, kind: torch.dtype, dtype: str, device: torch.device) -> Work:
    batch, heads, rows, head = size
    q, k, v = (_made(size, kind, device) for _ in range(3))
    flops = 4.0 * batch * heads * rows * rows * head / (2 if causal else 1)
    nbytes = 4.0 * kind.itemsize * q.numel()
    name = "attention causal" if causal else "attention"
    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    return Work(name, dtype, "x".join(map(str, size)), flops, nbytes, 2 * nbytes, (q, k, v), call)


def _rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


# name -> (inputs, forward, elements moved forward, backward); rows of 4096 where it matters
ELEMENTWISE: dict[str, tuple[int, Callable[..., Tensor], int, int]] = {
    "silu": (1, F.silu, 2, 3),
    "gelu": (1, F.gelu, 2, 3),
    "mul": (2, lambda x, y: x * y, 3, 5),
    "add": (2, lambda x, y: x + y, 3, 0),
    "softmax": (1, lambda x: x.softmax(-1), 4, 3),
    "mean of squares": (1, lambda x: x.pow(2).mean(-1, keepdim=True), 3, 2),
    "layer norm": (1, lambda x: F.layer_norm(x, x.shape[-1:]), 2, 3),
    "transpose": (1, lambda x: x.transpose(0, 1).contiguous(), 2, 2),
    "rotate": (1, _rotate, 4, 4),
    "cast": (1, lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16), 3, 3),
    "cross entropy": (1, lambda x: F.cross_entropy(x.float(), x.new_zeros(x.shape[0], dtype=torch.long)), 4, 4),
}


def _elementwise(name: str, count: int, kind: torch.dtype, dtype: str, device: torch.device) -> Work:
    num, call, forward, backward = ELEMENTWISE[name]
    columns = min(count, 4096)
    inputs = tuple(_made((count // columns, columns), kind, device) for _ in range(num))
    per = float(kind.itemsize * count)
    return Work(name, dtype, str(count), 0.0, forward * per, backward * per, inputs, lambda: call(*inputs))


def measured(work: Work, device: torch.device, rounds: int) -> Row:
    with torch.no_grad():
        gradient = torch.randn_like(work.forward())

    def forward() -> Any:
        with torch.no_grad():
            return work.forward()

    def both() -> Any:
        return torch.autograd.grad(work.forward(), work.inputs, gradient)

    host = _host_seconds(both, device) if work.flops < 1e10 and work.nbytes < 2e7 else 0.0
    temporary = _temporary(both, device)
    forward_seconds, both_seconds = (_device_seconds(call, device, rounds) for call in (forward, both))
    return Row(
        operation=work.operation,
        dtype=work.dtype,
        sizes=work.sizes,
        flops=work.flops,
        nbytes=work.nbytes,
        backward_nbytes=work.backward_nbytes,
        forward_seconds=forward_seconds,
        both_seconds=both_seconds,
        host_seconds=host,
        temporary_nbytes=temporary,
    )


def _host_seconds(call: Callable[[], Any], device: torch.device) -> float:
    for _ in range(3):
        call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(50):
        call()
    seconds = (time.perf_counter() - began) / 50
    _wait(device)
    return seconds


def _temporary(call: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _device_seconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Of one call, launched by the device itself where it can."""
    run = replayed(call, device)
    once = _timed(run, 1, device)
    repeats = max(1, min(1000, round(SAMPLE_SECONDS / max(once, 1e-7))))
    return statistics.median(_timed(run, repeats, device) for _ in range(rounds)) / REPLAYS[device.type]


def _timed(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def optimizer_rows(device: torch.device, rounds: int, scale: int) -> Iterator[Row]:
    """AdamW's step over tensors of a block, bytes as planning counts them: 20 or (fused) 7 tensors."""
    for fused in (False, True):
        for count, number in ((65_536, 32), (1_048_576, 32), (16_777_216, 16), (58_720_256, 8)):
            if count > scale**3:
                continue
            for kind in (torch.bfloat16, torch.float32):
                tensors = [torch.randn(count, device=device).to(kind).requires_grad_() for _ in range(number)]
                for tensor in tensors:
                    tensor.grad = torch.randn_like(tensor)
                optimizer = torch.optim.AdamW(tensors, fused=fused)
                for _ in range(3):
                    optimizer.step()
                _wait(device)
                once = max(_timed(optimizer.step, 1, device), 1e-6)
                repeats = max(1, min(200, round(SAMPLE_SECONDS / once)))
                seconds = statistics.median(_timed(optimizer.step, repeats, device) for _ in range(rounds))
                yield Row(
                    operation="adamw-fused" if fused else "adamw",
                    dtype="bf16" if kind is torch.bfloat16 else "fp32",
                    sizes=f"{number}x{count}",
                    flops=0.0,
                    nbytes=float((7 if fused else 20) * count * number * kind.itemsize),
                    backward_nbytes=0.0,
                    forward_seconds=seconds,
                    both_seconds=0.0,
                    host_seconds=0.0,
                    temporary_nbytes=0,
                )
                del tensors, optimizer


def origin(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, {datetime.date.today().isoformat()}, benchmarks/device_operations.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--quick", action="store_true", help="small sizes alone")
    parser.add_argument("--unaligned", action="store_true", help="products alone, those of odd sizes")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = 256 if arguments.quick else 1 << 14
    torch.manual_seed(0)
    with arguments.out.open("w", newline="") as file:
        file.write(f"# {origin(device)}\n")
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        kinds = arguments.dtypes.split(",")
        made = (
            (lambda m=m, k=k, n=n, kind=kind: _product(m, k, n, DTYPES[kind], kind, device))
            for kind in kinds
            for m, k, n in (*UNALIGNED, (4096, 4096, 4096), (16384, 768, 50304))
        )
        for make in made if arguments.unaligned else works(kinds, device, scale):
            try:
                writer.writerow(asdict(measured(make(), device, arguments.rounds)))
            except RuntimeError as error:  # out of memory, or a capture that the library refuses
                print(f"left out: {str(error).splitlines()[0]}", file=sys.stderr)
            file.flush()
        for row in () if arguments.unaligned else optimizer_rows(device, arguments.rounds, scale):
            writer.writerow(asdict(row))
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
