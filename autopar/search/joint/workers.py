"""How does a search use other cores? Python processes beside it answer questions, each one after another."""

import gc
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

WORKER = "autopar.search.joint.worker"
MOST = 3
"""Processes beside this one: each imports torch and builds graphs of its own, up to a gigabyte."""

LARGE = 8
"""Devices from which on a search over all meshes mostly has enough problems for processes beside it."""
Told = dict[str, Any]
"""What a process was told, for those who ask to note."""


class Workers:
    """A context: `count` processes that run `python -m module`, which `serve`s, and for each a thread that waits.

    Questions queue in the threads, and may be cancelled until they are sent.
    """

    def __init__(self, module: str, count: int) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            for _ in range(count)
        ]
        self._threads = ThreadPoolExecutor(count)
        self._idle: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Told]] = queue.SimpleQueue()
        for process in self.processes:
            self._idle.put((process, {}))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, question: Callable[[Told], Any]) -> Future[Any]:
        """The answer to what `question` makes for a process when its turn comes; what answering raised is raised."""

        def answer() -> Any:
            process, told = self._idle.get()
            try:
                assert process.stdin is not None and process.stdout is not None
                pickle.dump(question(told), process.stdin, pickle.HIGHEST_PROTOCOL)
                process.stdin.flush()
                found = pickle.load(process.stdout)
            finally:
                self._idle.put((process, told))
            if isinstance(found, Exception):
                raise found
            return found

        return self._threads.submit(answer)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()


_ready: list[Workers] = []


@contextmanager
def started(devices: int) -> Iterator[None]:
    """A search over all meshes of so many devices follows: what helps it starts now, while a model is loaded, for to
    import all that they need takes longer than that. What it did not take ends behind."""
    if devices >= LARGE and not _ready and (count := spare_cores()):
        _ready.append(Workers(WORKER, count))
    try:
        yield
    finally:
        while _ready:
            _ready.pop().close()


def spare_workers() -> Workers | None:
    """Those that were started, or new ones; None where no core is free for any."""
    if _ready:
        return _ready.pop()
    return Workers(WORKER, spare_cores()) if spare_cores() else None


def spare_cores() -> int:
    """How many processes beside this one have a core each."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST + 1) - 1


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer until the questions end; what libraries print does not reach standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found: Any
        try:
            found = answer(question)
        except Exception as error:  # the one who asked decides what to make of it
            found = error
        pickle.dump(found, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
