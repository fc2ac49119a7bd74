"""How is a mixed program stopped on time? HiGHS runs in a process of its own, which is killed when it overruns.

HiGHS looks at its time limit between steps only, some of which take long, and MathOpt's interrupter does not reach it.
A worker reads pickled requests from standard input and answers on standard output, so that a second solve pays no
second start (0.5 s of imports).
"""

import math
import os
import pickle
import select
import subprocess
import sys
from contextlib import suppress
from time import monotonic
from typing import IO, Any

from autopar.search.exact.array_model import Answer, ArrayModel

# Before the time is up HiGHS is to stop by itself, so that what it found is not lost.
_LEAD = 0.1  # of the time left, but no more than
_MOST_SECONDS = 5.0


class Worker:
    """A context: `with Worker() as worker: worker.solve(model, seconds=10)`; the process ends with the block.

    `close` may come from another thread while a program is being solved; `solve` then answers None, now and later.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self._process is not None:
            self._end(self._process)

    def solve(self, model: ArrayModel, *, seconds: float, **options: Any) -> Answer | None:
        """`model.solve(**options)`, None where it has not come to an end in so many seconds; in this process where
        these are without end."""
        if seconds == math.inf:
            return model.solve(**options)
        stop = monotonic() + seconds
        if self._closed:
            return None
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, (model, stop, options))
            if select.select([process.stdout], [], [], max(stop - monotonic(), 0.0))[0]:
                answer: Answer = pickle.load(process.stdout)
                return answer
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            if not self._closed:
                raise
        self._end(process)
        return None

    def close(self) -> None:
        """End the process, whatever it is at, and start no other."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # what was still to be written is of no use
                if stream is not None:
                    stream.close()
        self._process = None


def _start() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "autopar.search.exact.array_worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _write(stream: IO[bytes], value: object) -> None:
    pickle.dump(value, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _serve() -> None:
    """Answer until the requests end; HiGHS's own messages do not reach standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            model, stop, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        left = max(stop - monotonic(), 0.0)
        _write(answers, model.solve(seconds=left - min(_LEAD * left, _MOST_SECONDS), **options))


if __name__ == "__main__":
    _serve()
