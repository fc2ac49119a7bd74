"""How does a process join the others? From its launcher's environment, with a bound on how long it waits for them."""

import atexit
import multiprocessing as mp
import os
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import MeshError
from autopar.runtime.allocator import keep_freed_memory
from autopar.runtime.launchers import launched
from autopar.runtime.lost_ranks import among_ranks
from autopar.values.domains import TIMEOUT, checked_number

DEFAULT_TIMEOUT_SECONDS = 300.0
EXIT_SECONDS = 0.2
"""How long a process waits before its interpreter ends. Gloo's threads put down the tensors of the last collectives
after those have returned, for which they take the interpreter's lock: one that asks for it while the interpreter ends
makes it "terminate called without an active exception". With those threads at idle priority on a busy machine two of
four runs of two processes ended so, and none of three with this wait."""

_timeout_seconds = DEFAULT_TIMEOUT_SECONDS
_shares_gpu = False


def init(
    *, backend: str | None = None, share_gpus: bool = False, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> torch.device:
    """Join the processes that torchrun, srun, mpirun or a rank table's script started, unless this process has joined
    already; returns its device.

    backend: "nccl" or "gloo"; by default NCCL where every local process has a GPU of its own, Gloo otherwise.
    share_gpus: with Gloo compute on GPUs all the same, several processes on one: slow, for a look at what a plan does
        on a GPU where there are too few for NCCL.
    timeout_seconds: a collective or a missing rank that takes longer is an error on the ranks that wait for it.

    Raises:
        RankError: if the others do not come in time.
        MeshError: if no launcher set RANK, WORLD_SIZE and MASTER_ADDR, or GPUs are to be shared and there is none.
    """
    global _timeout_seconds, _shares_gpu
    checked_number("timeout_seconds", timeout_seconds, TIMEOUT)
    if dist.is_initialized():
        return _ready()
    os.environ.update(launched(os.environ))
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise MeshError(
            f"this process was not started as one of several ({', '.join(missing)} not set); "
            "start it with torchrun --nproc-per-node N, or an exported folder with autopar launch"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if share_gpus and not torch.cuda.is_available():
        raise MeshError("processes are to share GPUs, and torch sees none; leave share_gpus out to compute on the CPU")
    if backend is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= max(local_world, local_rank + 1)
        backend = "nccl" if enough else "gloo"
    _timeout_seconds = timeout_seconds
    timeout = timedelta(seconds=timeout_seconds)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        own = torch.device("cuda", local_rank)
        with among_ranks("joining the other processes"):
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=own)
    else:
        _shares_gpu = share_gpus
        if share_gpus:
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        with among_ranks("joining the other processes"):
            dist.init_process_group(backend, timeout=timeout)
    return _ready()


def meeting_place() -> Any:
    """A TCPStore of this process, at a port that is bound already, where new processes of this machine meet while it is
    held: a free port that is only named may be another's when a rank binds it."""
    untyped: Any = dist
    return untyped.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def new_processes(module: str) -> Any:
    """How `multiprocessing` starts processes for this machine's CPU: as copies of one that has imported this module
    where there can be any, for torch takes each some seconds. They are to be told what the environment is by now."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Of one of `world` new processes on this machine that meet at a store served at this port: this one's, and what
    torchrun sets."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    served = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {**os.environ, **{name: str(value) for name, value in (ranks | store | served).items()}}


def _ready() -> torch.device:
    own = device()
    if "gloo" in str(dist.get_backend_config()):
        _wait_at_exit()
    if own.type == "cpu":
        keep_freed_memory()
    return own


@cache
def _wait_at_exit() -> None:
    """Once a process."""
    atexit.register(time.sleep, EXIT_SECONDS)


def device() -> torch.device:
    """Where this process computes: its GPU if the default group speaks NCCL or GPUs are shared, the CPU otherwise."""
    if "nccl" in str(dist.get_backend_config()) or _shares_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def collective_timeout() -> float:
    """Seconds after which a group's collective is an error."""
    return _timeout_seconds
