"""Does a plan do what it says? Loss, gradients and state of one process on every rank, the bytes it sends and holds.

The processes are started here, live for many plans, and receive the captured model as bytes. They are the CPU's (Gloo,
loopback) or this machine's GPUs', by NCCL where every rank has a GPU of its own, else by Gloo, ranks sharing GPUs. They
run several steps on different inputs. What is right is told by who calls (the module itself, run eagerly: `oracle`), or
is the captured graph on one process, on the global batch, which rank 0 runs on the same device. Relative error of a
gradient: largest difference over the largest entry, with a floor of `oracle.compare.floor_of` times the model's largest
gradient entry for gradients that are zero in truth (key biases under softmax).
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from autopar.errors import ArgumentError, AutoparError, MeshError, RankError
from autopar.oracle import TrainedStep
from autopar.runtime import init
from autopar.runtime.launch import environment, meeting_place, new_processes
from autopar.values.choices import check_choice
from autopar.values.domains import MOST_PROCESSES
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan
from autopar.values.plan_file import plan_from_json
from autopar.values.serialize import dump, load
from autopar.verification.check import PlanCheck, merge
from autopar.verification.one_process import draws, reference_steps
from autopar.verification.rank_check import DEVICES, check_rank


def verify_plans(
    captured: CapturedModel,
    values: Mapping[str, Tensor],
    inputs: Sequence[Mapping[str, Tensor]],
    plans: Mapping[str, Plan],
    *,
    wanted: Sequence[TrainedStep] | None = None,
    reference: CapturedModel | None = None,
    device: str = "cpu",
    timeout_seconds: float = 120.0,
) -> Iterator[PlanCheck]:
    """Checks of `plans` (label -> plan, all for one number of ranks), in order, as they are made.

    Args:
        captured: the graph that is planned.
        values: parameters and buffers by placeholder.
        inputs: of each step the global batch, by placeholder.
        plans: by label, all for one number of ranks.
        wanted: what is right, a step each; None for what the graph does on one process.
        reference: the graph of the global batch, if `captured` is that of a micro-batch.
        device: one of `DEVICES`.
        timeout_seconds: of one plan.

    Raises:
        ArgumentError: if there is no such `device`.
        MeshError: if it is "cuda" and torch sees no GPU.
        RankError: if a process dies or a plan takes longer than `timeout_seconds`.
    """
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise MeshError("plans are to be verified on cuda, and torch sees no GPU on this machine; leave device out")
    sizes = {plan.world for plan in plans.values()}
    if len(sizes) != 1 or max(sizes) > MOST_PROCESSES:
        said = " and ".join(map(str, sorted(sizes))) or "no"
        raise ArgumentError(f"plans for {said} ranks: give plans for one number of ranks, at most {MOST_PROCESSES}")
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        (folder / "captured").write_bytes(dump(captured))
        (folder / "reference").write_bytes(dump(captured if reference is None else reference))
        torch.save({"values": dict(values), "inputs": [dict(step) for step in inputs]}, folder / "tensors.pt")
        if wanted is not None:
            torch.save([asdict(step) for step in wanted], folder / "wanted.pt")
        (folder / "plans").write_bytes(pickle.dumps({label: plan.to_json() for label, plan in plans.items()}))
        world = sizes.pop()
        context = new_processes(__name__) if device == "cpu" else mp.get_context("spawn")  # no GPU survives a copy
        store = meeting_place()
        with _quiet_threads():
            processes = [
                context.Process(
                    target=_worker, args=(environment(rank, world, store.port), str(folder), device), daemon=True
                )
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
    folder: Path, plans: Mapping[str, Plan], processes: list[Any], timeout_seconds: float
) -> Iterator[PlanCheck]:
    for number, label in enumerate(plans):
        deadline = time.monotonic() + timeout_seconds + (60 if number == 0 else 0)
        file = folder / f"result{number}"
        while not file.exists():
            dead = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if dead and not file.exists():
                raise _failure(folder, label, dead, processes)
            if time.monotonic() > deadline:
                raise RankError(f"plan {label} took longer than {timeout_seconds:.0f} s on {len(processes)} processes")
            time.sleep(0.01)
        yield pickle.loads(file.read_bytes())


def _failure(folder: Path, label: str, dead: list[int], processes: list[Any]) -> RankError:
    """What the first rank said that failed by itself; its traceback is a note of the error, for who asks for it."""
    found = sorted(folder.glob("failed*"), key=lambda file: file.stat().st_mtime_ns)
    if not found:
        codes = ", ".join(f"rank {rank} with exit code {processes[rank].exitcode}" for rank in dead)
        return RankError(f"plan {label}: {len(dead)} of {len(processes)} processes died: {codes}")
    rank, said, trace = pickle.loads(found[0].read_bytes())
    error = RankError(f"plan {label} failed on rank {rank}: {said}")
    error.add_note(trace)
    return error


def _worker(environment: Mapping[str, str], folder_name: str, device: str) -> None:
    """One rank, which leaves what failed in the folder."""
    try:
        _check_plans(environment, folder_name, device)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        said = str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {first}"
        rank, folder = int(environment["RANK"]), Path(folder_name)
        part = folder / f"part-failed{rank}"
        part.write_bytes(pickle.dumps((rank, said, traceback.format_exc())))
        part.rename(folder / f"failed{rank}")
        os._exit(1)


def _check_plans(environment: Mapping[str, str], folder_name: str, device: str) -> None:
    """One rank: checks plan after plan; rank 0 writes the results."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions would be off by more than float32 is
    os.environ.update(environment)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda" and torch.cuda.device_count() >= world:
        own = init(backend="nccl", timeout_seconds=100)
    else:
        own = init(backend="gloo", share_gpus=device == "cuda", timeout_seconds=100)
    folder = Path(folder_name)
    captured = load((folder / "captured").read_bytes())
    tensors = torch.load(folder / "tensors.pt", weights_only=True, mmap=True)
    texts = pickle.loads((folder / "plans").read_bytes())
    if rank == 0 and not (folder / "wanted.pt").exists():
        whole = captured if draws(captured) else load((folder / "reference").read_bytes())
        torch.save([asdict(step) for step in reference_steps(whole, tensors, own)], folder / "wanted.pt")
    dist.barrier()
    wanted = [TrainedStep(**step) for step in torch.load(folder / "wanted.pt", weights_only=True, mmap=True)]
    for number, (label, text) in enumerate(texts.items()):
        check = check_rank(label, plan_from_json(text), captured, tensors, wanted)
        gathered: list[PlanCheck] = [check] * world
        dist.all_gather_object(gathered, check)
        if rank == 0:
            part = folder / f"part{number}"
            part.write_bytes(pickle.dumps(merge(gathered)))
            part.rename(folder / f"result{number}")
    dist.destroy_process_group()
