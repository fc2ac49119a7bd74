"""Two hosts on one machine: network namespaces joined by a link of a given bandwidth, removed again whatever happens.

    with Hosts() as hosts:
        hosts.shape("200mbit")
        process = hosts.start(0, [sys.executable, "-m", "module"], environment)

A host is a namespace with a loopback of its own, one end of a veth pair with an address of 10.213.0.0/24 that no one
else can reach, a host name of its own, and half of the machine's cores, which its processes do not leave (where there
is but one core, both have it). Both ends are shaped alike (`tc ... tbf`, a token bucket of 64 KB), so that
the link has that bandwidth in either direction. The kernel counts what passes (`sent_nbytes`). Needs root, `ip`, `tc`,
`unshare` and `taskset`.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ADDRESSES = ("10.213.0.1", "10.213.0.2")
BURST = "64kb"


class HostsError(RuntimeError):
    """This machine lets nobody make namespaces, or shape their links."""


class Hosts:
    """Names carry this process's id, so that runs side by side do not meet."""

    def __init__(self) -> None:
        self.names = tuple(f"autopar{os.getpid()}-{number}" for number in range(2))
        self.links = tuple(f"ap{os.getpid() % 1_000_000}n{number}" for number in range(2))
        self.processes: list[subprocess.Popen[Any]] = []
        self._before: Any = None

    def __enter__(self) -> "Hosts":
        self._before = signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C, so that what was made is removed
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            first, second = self.links
            _run("ip", "link", "add", first, "netns", self.names[0], "type", "veth",
                 "peer", "name", second, "netns", self.names[1])  # fmt: skip
            for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
                _run("ip", "-n", name, "link", "set", link, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def shape(self, rate: str, latency: str = "50ms") -> None:
        """From now on the link carries `rate` (`100mbit`, `5gbit`) each way; packets queue up to `latency`."""
        for name, link in zip(self.names, self.links, strict=True):
            _run("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", "rate", rate,
                 "burst", BURST, "latency", latency)  # fmt: skip

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process on a host, with pipes to its input and output."""
        named = f'hostname {self.names[host]} && exec "$@"'
        inside = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "taskset", "--cpu-list", cores(host)]
        process = subprocess.Popen(
            [*inside, "sh", "-c", named, "sh", *command],
            env={**environment, "GLOO_SOCKET_IFNAME": self.links[host], "TP_SOCKET_IFNAME": self.links[host]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def remove(self) -> None:
        """Stop what was started here, and take away what was made here."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        for name in self.names:  # its end of the link goes with it
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def cores(host: int) -> str:
    """Numbers of the cores of a host, as `taskset` reads them: its half of those that this process may use."""
    own = sorted(os.sched_getaffinity(0))
    half = max(1, len(own) // 2)
    return ",".join(map(str, own[-half:] if host else own[:half]))


def sent_nbytes(link: str) -> tuple[int, int]:
    """Bytes that the link's end in this process's namespace has sent and received, headers of packets included."""
    folder = Path(f"/sys/class/net/{link}/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
