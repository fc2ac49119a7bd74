"""How does one command run a function on several Gloo processes of this machine, and learn that one of them failed?

Each process joins the others over the loopback and keeps to one thread, as ranks that share cores do. The first that
fails ends the run: its error is raised here and the others are stopped.
"""

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RankError
from autopar.runtime.launch import environment, init, meeting_place, new_processes

Tell = Callable[[str], None]
"""Told what is being done; silent on all ranks but the first."""


def on_processes(
    function: Callable[..., Any], *args: Any, num_processes: int, timeout_seconds: float, tell: Tell = lambda _: None
) -> list[Any]:
    """`function(*args, tell)` on every rank of `num_processes` new Gloo processes; results by rank.

    Raises:
        AutoparError: of the same type as a rank raised.
        RankError: if a rank dies, raises any other error, or `timeout_seconds` are over.
    """
    context = new_processes(__name__)
    store = meeting_place()
    pipes, processes = [], []
    try:
        for rank in range(num_processes):
            here, there = context.Pipe(duplex=False)
            own = environment(rank, num_processes, store.port)
            process = context.Process(target=_serve, args=(own, timeout_seconds, function, args, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        return _answers(pipes, time.monotonic() + timeout_seconds, timeout_seconds, tell)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _answers(pipes: list[Connection], deadline: float, timeout_seconds: float, tell: Tell) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in waiting.values())
            raise RankError(
                f"ranks {late} of {len(pipes)} took longer than {timeout_seconds:.0f} s; give them more time"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                what, value = pipe.recv()
            except EOFError as error:
                raise RankError(f"rank {rank} of {len(pipes)} died; see its output above") from error
            if what == "told":
                tell(value)
            elif what == "failed":
                raise value
            else:
                answers[rank] = value
    return [answers[rank] for rank in range(len(pipes))]


def _serve(
    own: dict[str, str],
    timeout_seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    """One rank."""
    os.environ.update(own)
    rank = int(own["RANK"])
    torch.set_num_threads(1)
    try:
        init(backend="gloo", timeout_seconds=timeout_seconds)
        value = function(*args, (lambda text: pipe.send(("told", text))) if rank == 0 else (lambda _: None))
        dist.barrier()
        dist.destroy_process_group()
    except RankError as error:  # perhaps only because another rank failed, whose own error says more
        time.sleep(1.0)
        pipe.send(("failed", error))
    except AutoparError as error:
        pipe.send(("failed", error))
    except Exception:
        pipe.send(("failed", RankError(f"rank {rank} failed:\n{traceback.format_exc()}")))
    else:
        pipe.send(("done", value))
    pipe.close()
