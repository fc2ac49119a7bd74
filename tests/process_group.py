"""Real processes for tests: `ranks(4).run(function, *args)` calls a module-level function on 4 ranks that share Gloo.

Processes start once a session and world size, on first use, and keep their process group between calls. An exception
of any rank fails the test with that rank's traceback; a rank that does not answer in time costs the pool, and the next
call starts a new one. Warnings are errors on the ranks too.
"""

import atexit
import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.launch import environment, meeting_place

PRELOADED = [
    *("torch.distributed.tensor", "torch.testing", "pytest", "tests.search_cases", "tests.zoo"),
    *("autopar.runtime", "autopar.runtime.peak_memory", "autopar.verification.run", "autopar.calibration.measure"),
    *("autopar.search.known.baselines", "autopar.search.known.random_plan"),
    "tests.copied",
]
"""Imported once for all ranks: what their functions need takes each of them two seconds, were it to import it."""

GRACE_SECONDS = 3.0
"""How long the other ranks may take to answer once one has failed: they may wait for it in a collective."""


class RankFailure(AssertionError):
    """A rank raised, died or did not answer."""


@cache
def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def begin_copying() -> None:
    """Start the process that all are copies of, those too that are started otherwise than here."""
    _context()
    forkserver.ensure_running()


class Pool:
    """The ranks of one world size."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(world):
                here, there = _context().Pipe()
                process = _context().Process(target=_serve, args=(rank, world, self.store.port, there), daemon=True)
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        message = pickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world and time.monotonic() < deadline:
            waiting = {self.pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            for pipe in mp.connection.wait(list(waiting), timeout=0.2):
                assert isinstance(pipe, Connection)
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    answer = False, "died"
                answers[waiting[pipe]] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        silent = [rank for rank in range(self.world) if rank not in answers]
        failed = [rank for rank, (good, _) in sorted(answers.items()) if not good]
        if silent or "died" in [answers[rank][1] for rank in failed]:
            self.stop()
        if failed or silent:
            texts = [f"rank {rank} of {self.world}: {answers[rank][1]}" for rank in failed]
            raise RankFailure("\n".join([*texts, f"ranks without an answer: {silent}" if silent else ""]))
        return [answers[rank][1] for rank in range(self.world)]

    def stop(self) -> None:
        if _pools.get(self.world) is self:
            del _pools[self.world]
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pools: dict[int, Pool] = {}


class Ranks:
    """`world` processes; the same ones for every test of a session."""

    def __init__(self, world: int) -> None:
        self.world = world

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """`function(*args)` on every rank; results by rank.

        Raises:
            RankFailure: with the traceback of every rank that raised.
        """
        if self.world not in _pools:
            _pools[self.world] = Pool(self.world)
        return _pools[self.world].call(function, args, timeout)


def ranks(world: int) -> Ranks:
    return Ranks(world)


def run_apart(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[tuple[int, Any]]:
    """`function(tell, *args)` in processes of a launcher, which join by themselves and may die: how each ended, and the
    last that it told."""
    store, started = meeting_place(), []
    for rank in range(world):
        here, there = _context().Pipe(duplex=False)
        own = environment(rank, world, store.port) | {"GLOO_SOCKET_IFNAME": "lo"}
        process = _context().Process(target=_apart, args=(own, there, function, args), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    deadline, ended = time.monotonic() + timeout, []
    try:
        for process, here in started:
            process.join(max(1.0, deadline - time.monotonic()))
            told = None
            with contextlib.suppress(EOFError):
                while here.poll():
                    told = here.recv()
            ended.append((process.exitcode, told))
    finally:
        for process, _ in started:
            process.kill()
    return ended


def _apart(own: dict[str, str], pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(own)
    torch.set_num_threads(1)
    function(pipe.send, *args)


@atexit.register
def _stop_all() -> None:
    for pool in list(_pools.values()):
        pool.stop()


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    """A rank's loop."""
    gc.freeze()  # what it shares with the others is not looked through for cycles
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function, args = pickle.loads(message)
                answer = True, function(*args)
            payload = pickle.dumps(answer)
        except BaseException:
            payload = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(payload)
