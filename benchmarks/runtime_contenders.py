"""What the processes of `benchmarks.runtime` do: train pairs of the same sharding in turns, ours and torch's.

A pair is measured alone: its rounds alternate who goes first, so that whatever else the machine does hits both.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.lower.emit import emit
from autopar.runtime import DistributedModule
from autopar.runtime.data import local_samples
from autopar.runtime.peak_memory import PeakMemory
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import load
from benchmarks.llama import LlamaSize, make_llama

LEAST_ROUNDS, MOST_ROUNDS = 7, 400
WARM_UP = 2
PEAKS = 5
"""Of so many steps the least peak counts: Gloo's threads hold what they sent for a moment longer, on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same sharding twice. plan: ours, as JSON, for the dumped graph `captured`; torch: which recipe of torch's.

    split_words, split_loss: whether our plan splits the embedding's words and the classes of the loss over the tensor-
    parallel ranks; torch's side does what ours does.
    """

    label: str
    torch: str
    mesh: tuple[int, ...]
    size: LlamaSize
    captured: bytes
    plan: str
    split_words: bool
    split_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """seconds: of forward and backward, and of the whole step with the optimizer's, a round, the slowest rank's.

    sent: (collective) -> calls and payload bytes of one step on this rank; peak_nbytes: of tensors, the most of any.
    """

    gradients: list[float]
    steps: list[float]
    sent: dict[str, tuple[int, int]]
    peak_nbytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    label: str
    ours: Side
    torch: Side


Step = Callable[[], Tensor]


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """In groups, for torch fuses the updates of one mesh alone."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": found} for found in meshes.values()], lr=1e-4, fused=True)


class Contender:
    """Something that trains: `run` makes gradients, gives the loss. resident: what is held beside parameters."""

    def __init__(self, parameters: list[nn.Parameter], run: Step, resident: list[Tensor]) -> None:
        self.parameters, self.run, self.resident = parameters, run, resident
        self.optimizer = fused_adamw(parameters)
        self.gradients: list[float] = []
        self.steps: list[float] = []

    def round(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        loss = self.run()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        slowest = torch.tensor([middle - start, end - start], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.gradients.append(slowest[0].item())
        self.steps.append(slowest[1].item())
        return float(loss.detach())

    def measured(self) -> Side:
        """What one more step sends, the optimizer's part with it, what some hold, and the times so far.

        torch's sequence-parallel norms leave their gradients partial, and the optimizer's first operation sums them.
        """
        with Sent() as sent:
            loss = self.run()
            self.optimizer.step()
        peak = torch.tensor(float(min(self._peak() for _ in range(PEAKS))), dtype=torch.float64)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.optimizer.zero_grad()
        return Side(
            gradients=self.gradients,
            steps=self.steps,
            sent=sent.sent,
            peak_nbytes=int(peak.item()),
            loss=float(loss.detach()),
        )

    def _peak(self) -> int:
        """Bytes of one more step, with what is there before it; after one that left gradients."""
        buckets = [p.grad for p in self.parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        self.optimizer.zero_grad()
        memory = Peak()
        memory.hold("parameters", self.parameters)
        memory.hold(
            "optimizer", (t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
        )
        memory.hold("resident", self.resident)
        if any(isinstance(p, nn.Parameter) and not isinstance(p, DTensor) for p in self.parameters):
            memory.hold("buckets", buckets)  # DDP made them when it was constructed
        del buckets
        with memory:
            self.run()
        return memory.peak


def race(pairs: list[Pair], seconds: float, tell: Callable[[str], None]) -> list[Outcome]:
    """Every pair for about so many seconds."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    outcomes = []
    for pair in pairs:
        tell(pair.label)
        if pair.mesh not in meshes:
            names = ("data", "model")[-len(pair.mesh) :]
            meshes[pair.mesh] = init_device_mesh("cpu", pair.mesh, mesh_dim_names=names)
        ours, theirs = make_ours(pair), make_torch(pair, meshes[pair.mesh])
        first, *_ = [[side.round() for side in (ours, theirs)] for _ in range(WARM_UP)]
        if abs(first[0] - first[1]) > 1e-4 * abs(first[1]):
            raise AssertionError(f"{pair.label}: the losses of one batch differ: {first[0]} and {first[1]}")
        for side in (ours, theirs):
            side.steps.clear()
            side.gradients.clear()
        start, rounds, going = time.perf_counter(), 0, torch.ones(())
        while going.item() and rounds < MOST_ROUNDS:
            for side in (ours, theirs) if rounds % 2 else (theirs, ours):
                side.round()
            rounds += 1
            going.fill_(float(rounds < LEAST_ROUNDS or time.perf_counter() - start < seconds))
            dist.broadcast(going, src=0)
        outcomes.append(Outcome(label=pair.label, ours=ours.measured(), torch=theirs.measured()))
    return outcomes


def make_ours(pair: Pair) -> Contender:
    """autopar's module of the plan."""
    captured = load(pair.captured)
    model, batch = make_llama(pair.size)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {s.placeholder: state[s.names[0]].detach() for s in (*captured.parameters, *captured.buffers)}
    module = DistributedModule(emit(captured, plan_from_json(pair.plan).single), values, sync=False, seed=0).train()
    own = {s.placeholder: local_samples(module, s, batch[s.path]).clone() for s in captured.inputs}
    resident = [*own.values(), *module.buffers(), *module.state.constants.values()]
    return Contender(list(module.parameters()), lambda: module.step(own, is_local=True), resident)


def make_torch(pair: Pair, mesh: DeviceMesh) -> Contender:
    """torch's recipe: `ddp`, `fsdp`, `tp`, `tp+sp` or `fsdp+tp`."""
    model, batch = make_llama(pair.size)
    data = {"ddp": mesh, "fsdp": mesh, "fsdp+tp": mesh["data"] if mesh.ndim > 1 else mesh}.get(pair.torch)
    if data is not None:
        rows = pair.size.batch // data.size()
        first = rows * data.get_local_rank()
        batch = {name: value[first : first + rows].clone() for name, value in batch.items()}
    if pair.torch.endswith(("tp", "sp")):
        tensor_parallel(model, mesh["model"] if mesh.ndim > 1 else mesh, pair)
    if pair.torch.startswith("fsdp"):
        for layer in model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    run_model: nn.Module = model
    if pair.torch == "ddp":  # buffers are constants here; torch 2.13 renames what keeps them from being sent
        known = inspect.signature(DistributedDataParallel).parameters
        buffers: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        run_model = DistributedDataParallel(model, gradient_as_bucket_view=True, **buffers)

    def run() -> Tensor:
        loss: Tensor = run_model(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def run_loss_parallel() -> Tensor:
        with loss_parallel():
            loss = run()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    chosen = run_loss_parallel if "tp" in pair.torch and pair.split_loss else run

    def averaged() -> Tensor:
        """The loss of the global batch, as ours gives; the step is timed with it on both sides."""
        loss = chosen()
        if data is not None:
            loss = loss.clone()
            dist.all_reduce(loss, group=data.get_group())
            loss /= data.size()
        return loss

    return Contender(list(model.parameters()), averaged, [*batch.values(), *model.buffers()])


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, pair: Pair) -> None:
    """Megatron's tensor parallelism with torch's styles, sequences split between the regions or not."""
    split_sequence = pair.torch == "tp+sp"
    between: Any = Shard(1) if split_sequence else Replicate()
    whole = {} if pair.split_loss else {"output_layouts": Replicate()}
    plan: dict[str, Any] = {
        "output": ColwiseParallel(input_layouts=between, use_local_output=not pair.split_loss, **whole)
    }
    if pair.split_words:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    elif split_sequence:
        plan["tok_embeddings"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    block: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if split_sequence:
        plan["norm"] = SequenceParallel()
        block |= {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    parallelize_module(model, mesh, plan)
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        parallelize_module(layer, mesh, block)


KINDS = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "alltoall", "all_to_all", "broadcast")


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives of torch's own operators, and the bytes of each one's largest tensor list."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((k for k in KINDS if name.startswith((k, f"_{k}"))), None)
            if kind is not None:
                kind = kind.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
                calls, nbytes = self.sent.get(kind, (0, 0))
                most = max((_nbytes(part) for part in (*args, result)), default=0)
                self.sent[kind.replace("alltoall", "all_to_all")] = calls + 1, nbytes + most
        return result


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(part) for part in value) if isinstance(value, tuple | list) else 0


class Peak(PeakMemory):
    """Counts what calls read too, and follows storages that change their size: FSDP2 frees gathered parameters and
    takes them back in storages that it made in the first step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(kind, DTensor) for kind in types):
            for part in args:
                for tensor in part if isinstance(part, tuple | list) else (part,):
                    if isinstance(tensor, Tensor):
                        self._count(tensor, "working", str(func))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.follow()
        return result

    def follow(self) -> None:
        for key, held in list(self._held.items()):  # storages end in between
            reference = self._references.get(key)
            storage = None if reference is None else reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self.live += storage.nbytes() - held.nbytes
                held.nbytes = storage.nbytes()
        self.peak = max(self.peak, self.live)
