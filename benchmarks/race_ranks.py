"""What every rank of `benchmarks.race` does: calibrate, and train contenders in turns, as the race tells it to.

A rank reads jobs from its input, one name of a pickled `Calibrate` or `Race` a line, until the input ends. All ranks
get the same jobs in the same order; rank 0 writes what came out beside the job and says so.
"""

import math
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autopar.calibration.measure import Effort, measure
from autopar.lower.emit import emit
from autopar.runtime import DistributedModule, init
from autopar.runtime.data import local_samples
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import load
from benchmarks.race_hosts import sent_nbytes
from benchmarks.race_models import make
from benchmarks.runtime_contenders import fused_adamw

DONE = "@done"
LLAMA = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    **{f"layers.*.attention.w{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.attention.wo": RowwiseParallel(),
    **{f"layers.*.feed_forward.w{number}": ColwiseParallel() for number in (1, 3)},
    "layers.*.feed_forward.w2": RowwiseParallel(),
}
"""Megatron's tensor parallelism in torch's styles."""

COUNTED_STEPS = 3
TIMED_STEPS, TURN_SECONDS = 3, 0.2
"""Least steps of a turn, and how long one takes if more are needed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """contenders: label -> a plan as JSON for the dumped graph `captured`, or one of torch's: `ddp`, `fsdp`, `tp`.

    graphs: label -> its graph, where that is another.
    """

    model: str
    captured: bytes
    contenders: dict[str, str]
    rounds: int
    graphs: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """seconds: of a whole step, of some in a row, a round, the slowest rank's. crossed: bytes a step that left
    the first host by the link, packets' headers included, those of the barriers around them taken off."""

    seconds: list[float]
    loss: float
    crossed: float


class Contender:
    """Something that trains; `run` makes gradients and gives the loss."""

    def __init__(self, parameters: list[nn.Parameter], run: Callable[[], Tensor]) -> None:
        self.run, self.optimizer = run, fused_adamw(parameters)
        self.seconds: list[float] = []
        self.steps = TIMED_STEPS

    def step(self) -> Tensor:
        loss = self.run()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def round(self) -> float:
        """The loss before it. Other contenders have taken the caches; the first step has them back, as training has."""
        loss = self.step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        slowest = torch.tensor((time.perf_counter() - start) / self.steps, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds.append(slowest.item())
        return float(loss.detach())


def race(job: Race) -> dict[str, Ran]:
    """Rounds of all contenders in turn, each in an order of its own, so that none has always the same one before it."""
    contenders = {
        label: contender(replace(job, captured=job.graphs.get(label, job.captured)), text)
        for label, text in job.contenders.items()
    }
    labels = list(contenders)
    losses = {label: contenders[label].round() for label in labels}  # allocator, optimizer state, buckets
    for label in labels:
        own = contenders[label]
        own.round()
        own.steps = max(TIMED_STEPS, math.ceil(TURN_SECONDS / own.seconds.pop()))
        own.seconds.clear()
    order = random.Random(0)  # the same on every rank
    for _ in range(job.rounds):
        for label in order.sample(labels, len(labels)):
            contenders[label].round()
    idle = counted(lambda: None)
    return {
        label: Ran(seconds=own.seconds, loss=losses[label], crossed=(counted(own.run) - idle) / COUNTED_STEPS)
        for label, own in contenders.items()
    }


def counted(step: Callable[[], Any]) -> int:
    """Bytes that the first host sends during `COUNTED_STEPS` steps, and a barrier."""
    dist.barrier()
    time.sleep(0.2)  # for what is on its way
    before, _ = sent_nbytes(os.environ["GLOO_SOCKET_IFNAME"])
    dist.barrier()
    for _ in range(COUNTED_STEPS):
        step()
    dist.barrier()
    time.sleep(0.2)
    after, _ = sent_nbytes(os.environ["GLOO_SOCKET_IFNAME"])
    return after - before


def contender(job: Race, text: str) -> Contender:
    model, batch = make(job.model)
    if text not in ("ddp", "fsdp", "tp"):
        captured = load(job.captured)
        state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        values = {s.placeholder: state[s.names[0]].detach() for s in (*captured.parameters, *captured.buffers)}
        local = emit(captured, plan_from_json(text).single)
        module = DistributedModule(local, values, sync=False, seed=0).train()
        own = {s.placeholder: local_samples(module, s, batch[s.path]).clone() for s in captured.inputs}
        return Contender(list(module.parameters()), lambda: module.step(own, is_local=True))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    run_model: nn.Module = model
    if text == "tp":
        parallelize_module(model, mesh, LLAMA)
    else:
        rows = len(next(v for v in batch.values() if isinstance(v, Tensor))) // mesh.size()
        first = rows * mesh.get_local_rank()
        batch = {k: v[first : first + rows].clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
    if text == "ddp":
        run_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if text == "fsdp":
        blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: (len(m), _numel(m)))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def run() -> Tensor:
        output = run_model(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()  # type: ignore[no-untyped-call]
        if text == "tp":
            return loss.detach()
        mean = loss.detach().clone()  # ours gives the loss of the global batch too
        dist.all_reduce(mean)
        return mean / mesh.size()

    def run_loss_parallel() -> Tensor:
        with loss_parallel():
            return run()

    return Contender(list(model.parameters()), run_loss_parallel if text == "tp" else run)


def _numel(blocks: nn.ModuleList) -> int:
    return sum(p.numel() for p in blocks.parameters())


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of a view that nobody writes to
    init(backend="gloo", timeout_seconds=300.0)
    print(DONE, "started", flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        job = pickle.loads(path.read_bytes())
        result = measure(job.effort, lambda _: None) if isinstance(job, Calibrate) else race(job)
        if dist.get_rank() == 0:
            path.with_suffix(".result").write_bytes(pickle.dumps(result))
        dist.barrier()
        print(DONE, path.name, flush=True)
    dist.destroy_process_group()
