"""A function run in a process of its own: kernels that take odd shapes badly end that process, not the caller's.

The process is a fork, so that the function is called as it is; what it changes (state of Python, random numbers) is
gone with it.
"""

import faulthandler
import os
import pickle
import resource
import select
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

SECONDS = 20
"""Longest that a function may take, of a processor, and thrice as long on a clock."""


def run_apart(function: Callable[[], T]) -> T:
    """What it returns.

    Raises:
        ChildProcessError: if it raises an error, or the process ends or does not end in time.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks of processes with threads: the child starts none, and is waited for
        child = os.fork()
    if not child:
        _answer(function, writing)
    os.close(writing)
    data, end = b"", time.monotonic() + 3 * SECONDS
    try:
        while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (read := os.read(reading, 1 << 16)):
                break
            data += read
        else:
            os.kill(child, 9)
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    if status:
        raise ChildProcessError(f"the process ended with status {status}")
    answer: T = pickle.loads(data)
    return answer


def _answer(function: Callable[[], T], writing: int) -> None:
    """In the new process: the function's answer is written, and the process ended without a word."""
    status = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        torch.set_num_threads(1)  # threads of the parent's pool are not here
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(function(), pipe)
        status = 0
    finally:
        os._exit(status)
