"""How does a search use a second core? Another Python process answers questions, one after another, as they come."""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


class SecondProcess:
    """A context: `python -m module`, which `serve`s, and a thread that waits for it.

    Questions queue in the thread, and may be cancelled until they are sent.
    """

    def __init__(self, module: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "SecondProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        """The answer to what `question` makes when its turn comes; an exception that answering raised is raised."""

        def answer() -> Any:
            assert self._process.stdin is not None and self._process.stdout is not None
            pickle.dump(question(), self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            found = pickle.load(self._process.stdout)
            if isinstance(found, Exception):
                raise found
            return found

        return self._thread.submit(answer)

    def close(self) -> None:
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


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
