"""How long is a step on one device, and how much memory does it take, beside what was predicted and beside torch?

    autopar plan MODEL --cluster 1xh200 --out plans/NAME    (one or more, anywhere)
    python -m benchmarks.device_steps plans --out steps.json [--steps 10] [--profile] [--compile NAME,NAME]

Every folder of `plans` that `autopar plan --out` or `autopar export` wrote trains for some steps of synthetic data on
this process's GPU; and the model of its plan, by itself and (Hugging Face's) with gradient checkpointing, the same way.
Seconds are between events on the device, of steps one behind the other; memory is what torch's allocator gave out at
the peak of a step, against the plan's. With --profile seconds of kernels by kind, of one step.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.api.model_plan import load_plan
from autopar.errors import AutoparError
from autopar.models import load_model
from autopar.runtime import init, load_exported
from autopar.runtime.launch import device as own_device
from autopar.runtime.launch import environment, meeting_place

WARM_UP = 3
KINDS = (
    ("attention", ("flash", "fmha", "attention", "cudnn")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")),
    ("optimizer", ("multi_tensor", "fused_adam")),
    ("", ("optimizer.step",)),
    ("copies", ("memcpy", "memset")),
)
"""What a kernel's name says it is, the first that fits ("": no kernel); the rest is elementwise and reductions."""


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


class Run:
    """One contender: `loss()` runs forward, with what it returns backward begins."""

    def __init__(self, loss: Callable[[], Tensor], parameters: list[Any]) -> None:
        self.loss = loss
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(run: Run, steps: int, profile: Path | None) -> dict[str, Any]:
    for _ in range(WARM_UP):
        run.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run.step()
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "peak_nbytes": torch.cuda.max_memory_allocated(),
        "reserved_nbytes": torch.cuda.max_memory_reserved(),
    }
    gradients, whole, host = [], [], []
    forward_host = []
    for _ in range(steps):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        events[0].record()
        loss = run.loss()
        forward_host.append(time.perf_counter() - began)
        loss.backward()
        events[1].record()
        run.optimizer.step()
        run.optimizer.zero_grad()
        events[2].record()
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        gradients.append(events[0].elapsed_time(events[1]) / 1e3)
        whole.append(events[0].elapsed_time(events[2]) / 1e3)
    # steps one behind the other, as in training: the host may run ahead
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        run.step()
    end.record()
    torch.cuda.synchronize()
    found |= {
        "step_seconds": start.elapsed_time(end) / 1e3 / steps,
        "alone_seconds": statistics.median(whole),
        "gradient_seconds": statistics.median(gradients),
        "host_seconds": statistics.median(host),
        "forward_host_seconds": statistics.median(forward_host),
    }
    if profile is not None:
        found["kernels"] = profiled(run, profile)
    return found


def contended(make: Callable[[], Run], steps: int, profile: Path | None, long: bool) -> dict[str, Any]:
    """What is measured of a contender, which is let go of whatever happens."""
    run = make()
    found = measured(run, steps, profile)
    return found | ({"sustained": sustained(run)} if long else {})


def sustained(run: Run, seconds: float = 25.0) -> list[float]:
    """Mean seconds of a step, over windows of some seconds one after the other."""
    windows: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < 4.0:
            run.step()
            torch.cuda.synchronize()
            steps += 1
        windows.append((time.perf_counter() - began) / steps)
    return windows


def profiled(run: Run, file: Path) -> dict[str, Any]:
    """Seconds and launches by kind of kernel; into `file` by kernel."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run.step()
        torch.cuda.synchronize()
    kinds: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type.name != "CUDA" or not kind_of(event.name):
            continue
        for table, key in ((kinds, kind_of(event.name)), (kernels, event.name[:160])):
            entry = table.setdefault(key, [0.0, 0])
            entry[0] += event.device_time / 1e6
            entry[1] += 1
    operations = {
        row.key: [row.self_device_time_total / 1e6, row.count]
        for row in seen.key_averages()
        if row.self_device_time_total > 0
    }
    text = json.dumps({"kernels": kernels, "operations": operations}, indent=0)
    file.write_text(text)
    return {kind: {"seconds": entry[0], "launches": entry[1]} for kind, entry in sorted(kinds.items())}


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Nothing of this contender is left for the next."""
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def ours(folder: Path, compiled: bool, seed: int) -> Run:
    spec = importlib.util.spec_from_file_location(f"exported_{folder.name.replace('-', '_')}", folder / "model.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    spec.loader.exec_module(code)

    def initial(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if len(shape) < 2:
            return torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
        return torch.randn(shape, dtype=dtype, device=own_device()) * 0.02

    torch.manual_seed(seed)
    module = load_exported(folder, [code.forward], initial)
    if compiled:
        module.compile(backend="inductor")
    batch = batch_of(folder)
    return Run(lambda: module(**batch).loss, list(module.parameters()))


def batch_of(folder: Path) -> dict[str, Tensor]:
    plan = load_plan(folder / "plan.json")
    source = plan.source or {}
    loaded = loaded_model(source, "meta")
    vocabulary = loaded.model.config.vocab_size
    names = [name for name, value in loaded.kwargs.items() if isinstance(value, Tensor)]
    shape = (source["batch"], source["seq"])
    generator = torch.Generator(own_device()).manual_seed(0)
    return {name: torch.randint(vocabulary, shape, generator=generator, device=own_device()) for name in names}


def loaded_model(source: dict[str, Any], device: str, precision: str | None = None) -> Any:
    return load_model(
        source["spec"],
        batch=source["batch"],
        seq=source["seq"],
        precision=precision or source["precision"],
        overrides=source["overrides"],
        device=device,
    )


def plain(folder: Path, checkpointed: bool, compiled: bool) -> Run:
    source = load_plan(folder / "plan.json").source or {}
    loaded = loaded_model(source, str(own_device()))
    model = loaded.model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kwargs = {**loaded.kwargs, **batch_of(folder)}
    call: Any = torch.compile(model) if compiled else model
    return Run(lambda: call(**kwargs).loss, list(model.parameters()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of folders, the others are left out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", default="", help="names of folders whose module is compiled as well")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--sustained", default="", help="names of folders that train for half a minute too")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        store = meeting_place()
        os.environ.update(environment(0, 1, store.port))
    device = init()
    assert device.type == "cuda", "this benchmark is for a GPU"
    names = set(filter(None, arguments.only.split(",")))
    folders = sorted(p.parent for p in arguments.plans.glob("*/plan.json") if not names or p.parent.name in names)
    rows: list[dict[str, Any]] = []
    done: set[str] = set()
    for folder in folders:
        plan = load_plan(folder / "plan.json")
        key = json.dumps(plan.source, sort_keys=True)
        makers: dict[str, Callable[[], Run]] = {"ours": lambda folder=folder: ours(folder, False, 0)}
        if folder.name in arguments.compile.split(","):
            makers["ours, compiled"] = lambda folder=folder: ours(folder, True, 0)
        mixed = (plan.source or {}).get("precision", "").endswith("mixed")
        if key not in done and not arguments.no_torch and not mixed:
            makers["torch"] = lambda folder=folder: plain(folder, False, False)
            makers["torch, checkpointed"] = lambda folder=folder: plain(folder, True, False)
            if folder.name in arguments.compile.split(","):
                makers["torch, compiled"] = lambda folder=folder: plain(folder, False, True)
        done.add(key)
        for contender, make in makers.items():
            row: dict[str, Any] = {"plan": folder.name, "contender": contender, "device": torch.cuda.get_device_name()}
            if contender.startswith("ours") and plan.estimate is not None:
                row["predicted_seconds"] = plan.estimate.step_seconds
                row["predicted_peak"] = plan.estimate.peak_nbytes
            began = time.perf_counter()
            with clean():
                profile = arguments.out.with_suffix(f".{folder.name}.{contender.replace(', ', '-')}.json")
                try:
                    long = contender == "ours" and folder.name in arguments.sustained.split(",")
                    row |= contended(make, arguments.steps, profile if arguments.profile else None, long)
                except (RuntimeError, AutoparError) as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:2000]
            row["took"] = time.perf_counter() - began
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "device"}), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
