"""Does a plan do what it says? Loss and gradients of one process on every rank, the bytes it sends and holds.

The processes are started here, live for many plans, and receive the captured model as bytes. They are the CPU's (Gloo,
loopback) or this machine's GPUs', by NCCL where every rank has a GPU of its own, else by Gloo, ranks sharing GPUs. Rank
0 computes the reference on the same device: the captured graph on one process, on the global batch. Relative error of a
gradient: largest difference over the largest entry, with a floor of `FLOOR` times the model's largest gradient entry
for gradients that are zero in truth (key biases under softmax).
"""

import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from autopar.errors import ArgumentError, MeshError, RankError
from autopar.graph import Accumulation, CapturedModel
from autopar.ops.random import Draws, use_draws
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.predict import Sent, predicted_messages
from autopar.passes.predict_stages import predicted_rank_messages
from autopar.passes.split_stages import split_stages
from autopar.placement import local_ranges
from autopar.plan import Plan, plan_from_json
from autopar.runtime.launch import environment, meeting_place
from autopar.serialize import dump, load
from autopar.staged_plan import StagedPlan, is_staged, staged_plan_from_json

FLOOR = 1e-6
DRAWS = Draws(seed=1, step=0, exact=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One plan against one process: largest relative errors over all ranks, and messages predicted and counted.

    Peaks are bytes of tensors that a rank holds at once, without optimizer state: of the rank that is farthest off.
    """

    plan: str
    loss: float
    loss_error: float
    gradient_error: float
    worst_gradient: str
    predicted: Sent
    counted: Sent
    predicted_peak: float
    measured_peak: int

    @property
    def bytes_match(self) -> bool:
        return self.predicted == self.counted

    @property
    def peak_error(self) -> float:
        """How far the prediction is from what was measured, relative to that; negative: too low."""
        return self.predicted_peak / self.measured_peak - 1

    def wrong(self, loss_tolerance: float, gradient_tolerance: float) -> tuple[str, ...]:
        """What is not as it should be: some of loss, gradients, bytes sent and peak memory."""
        good = {
            "loss": self.loss_error <= loss_tolerance,
            "gradients": self.gradient_error <= gradient_tolerance,
            "bytes sent": self.bytes_match,
            "peak memory": abs(self.peak_error) <= PEAK_TOLERANCE,
        }
        return tuple(name for name, is_good in good.items() if not is_good)


PEAK_TOLERANCE = 0.05
"""Largest relative error of a rank's predicted peak."""

STEPS = 3
"""In how many steps at most a peak is measured; the least counts, for Gloo's threads hold what they sent a while."""

TOLERANCES = {
    "fp64": (1e-10, 1e-8),
    "fp32": (1e-5, 1e-3),
    "bf16": (2e-2, 1e-1),
    "bf16-mixed": (2e-2, 1e-1),
    "fp32-mixed": (1e-5, 1e-3),
}
"""Largest relative error of the loss and of any gradient that rounding explains, by precision."""

DEVICES = {"cpu": "cpu", "cuda": "h100"}
"""What plans can be run on, and a preset device that holds as much: of GPUs it is the same on every one."""


def verify_plans(
    captured: CapturedModel,
    values: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    plans: Mapping[str, Plan | StagedPlan],
    *,
    reference: CapturedModel | None = None,
    device: str = "cpu",
    timeout_seconds: float = 120.0,
) -> Iterator[Check]:
    """Checks of `plans` (label -> plan, all for one number of ranks), in order, as they are made.

    values: parameters and buffers by placeholder; inputs: by placeholder, the global batch. reference: the graph of the
    global batch, if `captured` is that of a micro-batch. device: one of `DEVICES`.

    Raises:
        ArgumentError: if there is no such `device`.
        MeshError: if it is "cuda" and torch sees no GPU.
        RankError: if a process dies or a plan takes longer than `timeout_seconds`.
    """
    if device not in DEVICES:
        raise ArgumentError(f"plans are to be verified on {device!r}: choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MeshError("plans are to be verified on cuda, and torch sees no GPU on this machine; leave device out")
    sizes = {num_ranks(plan) for plan in plans.values()}
    assert len(sizes) == 1, f"plans for one number of ranks at a time, got {sizes}"
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        (folder / "captured").write_bytes(dump(captured))
        (folder / "reference").write_bytes(dump(captured if reference is None else reference))
        torch.save({"values": dict(values), "inputs": dict(inputs)}, folder / "tensors.pt")
        (folder / "plans").write_bytes(pickle.dumps({label: plan.to_json() for label, plan in plans.items()}))
        world = sizes.pop()
        context = mp.get_context("spawn")
        store = meeting_place()
        with _quiet_threads():
            processes = [
                context.Process(target=_worker, args=(rank, world, str(folder), store.port, device), daemon=True)
                for rank in range(world)
            ]
            for process in processes:
                process.start()
        try:
            yield from _results(folder, plans, processes, timeout_seconds)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
            del store


def num_ranks(plan: Plan | StagedPlan) -> int:
    """Processes that a plan runs on."""
    return plan.world if isinstance(plan, StagedPlan) else plan.mesh.size


class _quiet_threads:
    """One thread a process: many ranks share few cores."""

    def __enter__(self) -> None:
        self.before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = self.before


def _results(
    folder: Path, plans: Mapping[str, Plan | StagedPlan], processes: list[Any], timeout_seconds: float
) -> Iterator[Check]:
    for number, label in enumerate(plans):
        deadline = time.monotonic() + timeout_seconds + (60 if number == 0 else 0)
        file = folder / f"result{number}"
        while not file.exists():
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            if dead and not file.exists():
                raise RankError(f"plan {label}: {len(dead)} of {len(processes)} processes died; see their output above")
            if time.monotonic() > deadline:
                raise RankError(f"plan {label} took longer than {timeout_seconds:.0f} s on {len(processes)} processes")
            time.sleep(0.01)
        yield pickle.loads(file.read_bytes())


def _worker(rank: int, world: int, folder_name: str, port: int, device: str) -> None:
    """One rank: checks plan after plan; rank 0 writes the results."""
    import torch.distributed as dist

    from autopar.reference import run_captured
    from autopar.runtime import init

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions would be off by more than float32 is
    os.environ.update(environment(rank, world, port))
    if device == "cuda" and torch.cuda.device_count() >= world:
        own = init(backend="nccl", timeout_seconds=100)
    else:
        own = init(backend="gloo", share_gpus=device == "cuda", timeout_seconds=100)
    folder = Path(folder_name)
    captured = load((folder / "captured").read_bytes())
    tensors = torch.load(folder / "tensors.pt", weights_only=True, mmap=True)
    texts = pickle.loads((folder / "plans").read_bytes())
    if rank == 0:
        whole = load((folder / "reference").read_bytes())
        torch.save(_reference(whole, tensors, own, run_captured), folder / "reference.pt")
    dist.barrier()
    reference = torch.load(folder / "reference.pt", weights_only=True, mmap=True)
    for number, (label, text) in enumerate(texts.items()):
        plan = staged_plan_from_json(text) if is_staged(text) else plan_from_json(text)
        check = _check(label, plan, captured, tensors, reference)
        gathered: list[Check] = [check] * world
        dist.all_gather_object(gathered, check)
        if rank == 0:
            part = folder / f"part{number}"
            part.write_bytes(pickle.dumps(_merge(gathered)))
            part.rename(folder / f"result{number}")
    dist.destroy_process_group()


def _reference(captured: CapturedModel, tensors: Mapping[str, Any], device: torch.device, run: Any) -> dict[str, Any]:
    """Loss and gradients of one process, on the CPU again."""
    values, inputs = ({name: t.to(device) for name, t in tensors[key].items()} for key in ("values", "inputs"))
    loss, gradients = reference_gradients(captured, values, inputs, run)
    return {"loss": loss.cpu(), "gradients": {name: gradient.cpu() for name, gradient in gradients.items()}}


def reference_gradients(
    captured: CapturedModel,
    values: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    run: Callable[..., tuple[Tensor, Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradient of every trainable parameter (by placeholder) on one process.

    Of a micro-batch's graph: of the step, its micro-batches one after the other.
    """
    trainable = {p.placeholder for p in captured.parameters if p.trainable}
    parameters = {p.placeholder: values[p.placeholder].detach().clone() for p in captured.parameters}
    for name in trainable:
        parameters[name].requires_grad_()
    buffers = {b.placeholder: values[b.placeholder].clone() for b in captured.buffers}
    accumulation = captured.accumulation or Accumulation(microbatches=1, weight=1.0)
    losses, counts = [], []
    for part in _parts(inputs, accumulation.microbatches):
        with use_draws(DRAWS):
            loss, results = run(captured, parameters, buffers, part)
        losses.append(loss)
        counts += [] if accumulation.count is None else [results[accumulation.count]]
        buffers.update({name: value for name, value in results.items() if name in buffers})
    from autopar.runtime.accumulate import total_loss

    loss = losses[0] if captured.accumulation is None else total_loss(accumulation, losses, counts)
    torch.autograd.backward(loss)
    gradients = {
        name: torch.zeros_like(parameters[name]) if (grad := parameters[name].grad) is None else grad
        for name in sorted(trainable)
    }
    return loss.detach(), gradients


def _parts(inputs: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    pieces = {name: value.chunk(count) if value.dim() else (value,) * count for name, value in inputs.items()}
    for i in range(count):
        yield {name: values[i] for name, values in pieces.items()}


def _check(
    label: str,
    plan: Plan | StagedPlan,
    captured: CapturedModel,
    tensors: Mapping[str, Any],
    reference: Mapping[str, Any],
) -> Check:
    """This rank's view of one plan."""
    from autopar.runtime import count_messages
    from autopar.runtime.peak_memory import watch

    made = _staged_module if isinstance(plan, StagedPlan) else _module
    module, inputs, predicted, predicted_peak = made(captured, plan, tensors)
    with count_messages(module) as counted, watch(module, inputs) as memory:
        loss = module.step(inputs)
    error, worst = _gradient_error(module, reference["gradients"])
    peak = _least_peak(module, inputs, predicted_peak, memory.peak)
    loss, whole = loss.detach().cpu(), reference["loss"]
    return Check(
        plan=label,
        loss=float(loss),
        loss_error=float((loss - whole).abs() / whole.abs().clamp_min(1e-30)),
        gradient_error=error,
        worst_gradient=worst,
        predicted=predicted,
        counted=dict(counted),
        predicted_peak=predicted_peak,
        measured_peak=peak,
    )


def _least_peak(module: Any, inputs: Mapping[str, Tensor], predicted: float, peak: int) -> int:
    """The peak of the first step or, where any rank's is not as predicted, the least of some steps."""
    import torch.distributed as dist

    from autopar.runtime.peak_memory import watch

    for _ in range(STEPS - 1):
        is_off = torch.tensor(abs(predicted / peak - 1) > PEAK_TOLERANCE, dtype=torch.int32)
        dist.all_reduce(is_off)
        if not is_off:
            break
        module.zero_grad(set_to_none=True)
        with watch(module, inputs) as memory:
            module.step(inputs)
        peak = min(peak, memory.peak)
    return peak


Prepared = tuple[Any, Mapping[str, Tensor], Sent, float]
"""A module, what a rank gives it, what it should send, and its predicted peak."""


def _module(captured: CapturedModel, plan: Any, tensors: Mapping[str, Any]) -> Prepared:
    """Of a plan without stages."""
    from autopar.cluster import load_cluster
    from autopar.runtime import DistributedModule
    from autopar.runtime.data import local_samples
    from autopar.search.costs.evaluate import peak_without_optimizer

    local = insert_collectives(captured, plan)
    module = DistributedModule(local, tensors["values"], sync=False, seed=DRAWS.seed, exact_random=True)
    whole = tensors["inputs"]
    own = {s.placeholder: local_samples(module, s, whole[s.placeholder]).clone() for s in captured.inputs}
    peak = peak_without_optimizer(plan, captured, load_cluster(f"{plan.mesh.size}x{DEVICES[module.device.type]}"))
    return module, own, predicted_messages(local, by_processor=module.device.type == "cpu"), peak


def _staged_module(captured: CapturedModel, plan: Any, tensors: Mapping[str, Any]) -> Prepared:
    """Of a plan with stages, on this rank's."""
    from autopar.cluster import load_cluster
    from autopar.runtime import PipelinedModule
    from autopar.search.staged.staged_memory import peaks_without_optimizer

    stages = split_stages(captured, plan.cuts)
    module = PipelinedModule(captured, stages, plan, tensors["values"], sync=False, seed=DRAWS.seed, exact_random=True)
    locals_ = {stage.number: stage.local for stage in module.stages}
    sent = predicted_rank_messages(stages, plan, locals_, module.groups.rank)
    cluster = load_cluster(f"{plan.mesh.size}x{DEVICES[module.device.type]}")
    peaks = peaks_without_optimizer(plan, stages, cluster)
    return module, tensors["inputs"], sent, peaks[module.pipeline_rank]


def _gradient_error(module: Any, gradients: Mapping[str, Tensor]) -> tuple[float, str]:
    floor = FLOOR * max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    worst, name = 0.0, ""
    for state in module.states:
        for parameter in state.specs.values():
            if not parameter.trainable:
                continue
            whole = gradients[parameter.placeholder]
            got = state.gradient(parameter.placeholder)
            ranges = local_ranges(parameter.shape, state.layout(parameter.placeholder), state.mesh, state.coordinate)
            part = whole[tuple(slice(start, start + length) for start, length in ranges)]
            if part.numel() == 0:
                continue
            if got is None or got.shape != part.shape:
                return float("inf"), parameter.names[0]
            error = float((got.cpu() - part).abs().max()) / max(float(whole.abs().max()), floor, 1e-300)
            if not error <= worst:
                worst, name = error, parameter.names[0]
    return worst, name


def _merge(checks: list[Check]) -> Check:
    """The worst rank's errors; messages must agree on all ranks, or the first that differs is shown."""
    worst = max(checks, key=lambda c: (c.gradient_error != c.gradient_error, c.gradient_error))
    odd = next((c for c in checks if not c.bytes_match), checks[0])
    farthest = max(checks, key=lambda c: abs(c.peak_error))
    return Check(
        plan=checks[0].plan,
        loss=checks[0].loss,
        loss_error=max(c.loss_error for c in checks),
        gradient_error=worst.gradient_error,
        worst_gradient=worst.worst_gradient,
        predicted=odd.predicted,
        counted=odd.counted,
        predicted_peak=farthest.predicted_peak,
        measured_peak=farthest.measured_peak,
    )


def sent_as_json(sent: Sent) -> str:
    """Messages as JSON text: `{"all_reduce data,model": [calls, bytes]}`."""
    return json.dumps({f"{kind} {','.join(axes)}": list(value) for (kind, axes), value in sorted(sent.items())})
