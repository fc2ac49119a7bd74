"""How do ranks start that may die? As children of a process that has imported everything; they end as programs do.

    python -m benchmarks.fault_ranks

reads jobs from its input, one a line, starts the ranks of each and answers with how each ended. No launcher watches
them: what ends a survivor is its own error. Its output is in a file, with the traceback that a user would see.
"""

import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_cases import Job, load_cases
from benchmarks.fault_training import train

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 120.0
"""After which a rank that has not ended is killed, and the row says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank: its exit code (negative: the signal), when it ended, whether it was killed for not ending, output."""

    code: int
    at: float
    hung: bool
    text: str

    @property
    def error(self) -> str:
        """What the process ended with, that nobody caught; empty if there was none."""
        lines = (re.sub(r"^\[rank\d+\]: ?", "", line) for line in self.text.splitlines())
        found = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
        return found[-1] if found else ""

    @property
    def kind(self) -> str:
        """The error's class."""
        return self.error.split(":")[0].split(".")[-1]


class Ranks:
    """The process that starts ranks."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fault_ranks"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )

    def run(self, job: Job) -> list[Ended]:
        """Train in new processes until all of them ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        return [Ended(**one) for one in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher on one machine would set; rank 0 serves the store."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in found.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _serve() -> tuple[Job, int] | None:
    """Start ranks as asked; in each of them, what it is to do. None when there are no more jobs."""
    for line in sys.stdin:
        job = Job.of(json.loads(line))
        port, pids = _free_port(), []
        for rank in range(job.world):
            pid = os.fork()
            if pid == 0:
                _become(job, rank, port)
                return job, rank
            pids.append(pid)
        print(json.dumps(_all_ended(job, pids)), flush=True)
    return None


def _become(job: Job, rank: int, port: int) -> None:
    os.environ.update(_environment(rank, job.world, port))
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    empty = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, empty), (1, output), (2, output)):
        os.dup2(source, number)


def _all_ended(job: Job, pids: list[int]) -> list[dict[str, Any]]:
    """How each process ended. One that is stopped goes on when the others have ended."""
    begun = time.monotonic()
    found: dict[int, dict[str, Any]] = {}
    stopped: set[int] = set()
    hung: set[int] = set()
    while len(found) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        now = time.monotonic()
        if pid and os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid:
            rank = pids.index(pid)
            code, text = os.waitstatus_to_exitcode(status), Path(job.output(rank)).read_text(errors="replace")
            found[rank] = {"code": code, "at": now, "hung": pid in hung, "text": text}
            stopped.discard(pid)
        elif stopped and len(found) == len(pids) - len(stopped):
            for other in stopped:
                os.kill(other, signal.SIGCONT)
            stopped.clear()
        elif now - begun > PATIENCE_SECONDS:
            for rank, other in enumerate(pids):
                if rank not in found:
                    hung.add(other)
                    os.kill(other, signal.SIGKILL)
        else:
            select.select([], [], [], 0.02)
    return [found[rank] for rank in range(len(pids))]


def main() -> int:
    load_cases()
    gc.freeze()  # what ranks share is not looked through for cycles when they end
    mine = _serve()
    if mine is not None:
        train(*mine)  # what it raises ends this process as it would end a user's program
    return 0


if __name__ == "__main__":
    sys.exit(main())
