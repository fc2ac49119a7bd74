"""How is another batch size captured on another core? In a copy of this process, which has the model at hand.

What was asked is a convenience: where processes cannot be forked, or the copy fails or takes too long (threads and
devices of the parent do not survive in it), there is no answer, and the caller does the work itself.
"""

import logging
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)

NICE = 3
"""Of a copy that is not waited for yet: at 10 it was not done after 25 s beside two busy processes."""
SIZE = 8
"""Bytes of the length of an answer."""


class Forked:
    """`work()` in a copy of this process, begun at once; `answer` waits for its bytes. nice: others come first."""

    def __init__(self, work: Callable[[], bytes], *, nice: bool = False) -> None:
        self._child, self._pipe = 0, -1
        if not can_fork():
            return
        self._pipe, end = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads in the parent: see above
                self._child = os.fork()
        except OSError as error:  # no memory for another one
            logger.info("no process to capture in: %s", error)
            os.close(end)
            self._pipe = _closed(self._pipe)
            return
        if self._child == 0:
            _run(work, end, NICE if nice else 0)
        os.close(end)

    def answer(self, seconds: float) -> bytes | None:
        """What came, None where nothing did in so many seconds from now on."""
        if self._pipe < 0:
            return None
        try:
            return _read(self._pipe, time.monotonic() + seconds)
        finally:
            self.close()

    def close(self) -> None:
        """End it, done or not."""
        if self._pipe >= 0:
            self._pipe = _closed(self._pipe)
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._child, 0)


def can_fork() -> bool:
    """Whether a copy of this process would work: on Linux, with a core for it, before a GPU was touched."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _closed(pipe: int) -> int:
    os.close(pipe)
    return -1


def _run(work: Callable[[], bytes], end: int, nice: int) -> None:
    """In the copy: nothing of what is open here is written to or closed."""
    try:
        os.nice(nice)
        torch.set_num_threads(1)  # threads that the parent's kernels ran in are waited for in vain
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        answer = work()
        found = memoryview(len(answer).to_bytes(SIZE, "big") + answer)
        while found:
            found = found[os.write(end, found) :]
    finally:
        os._exit(0)


def _read(pipe: int, deadline: float) -> bytes | None:
    """All that comes before the end, without the length that comes first; None if less than that came, or too late."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            part = os.read(pipe, 1 << 20)
            if not part:
                whole = b"".join(parts)
                size, found = int.from_bytes(whole[:SIZE], "big"), whole[SIZE:]
                if whole and len(found) == size:
                    return found
                logger.info("a capture in another process failed; it is done here")
                return None
            parts.append(part)
    logger.info("a capture in another process took too long; it is done here")
    return None
