"""What is asked about a plan, and how long: one thing of the machine changed at a time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.search.explanation.what_if import faster_arithmetic, faster_link, faster_memory
from autopar.values.cluster import Cluster

GB = 1e9
FACTOR = 2.0
EACH = 0.15
"""The part of the time that one question may take: a hard one (a limit near the least that would do) leaves some for
the others."""
UNLIMITED = "no memory limit"
LEAST = 1.0
"""Seconds without which no question is begun."""


@dataclass(slots=True, kw_only=True)
class TimedQuestions:
    """Those that are asked while there is time.

    unanswered: what the time given did not suffice for.
    """

    deadline: float
    each: float
    tell: Callable[[str], None]
    unanswered: list[str] = field(default_factory=list)

    def asks(self, what: str) -> bool:
        """Whether there is time for one more question; tells which one."""
        if self.deadline - time.monotonic() < LEAST:
            self.unanswered.append(what)
            return False
        self.tell(f"asking: {what}")
        return True

    def left(self) -> float:
        """Seconds for the next question."""
        return max(min(self.deadline - time.monotonic(), self.each), 0.1)


def questions(seconds: float, tell: Callable[[str], None] | None) -> TimedQuestions:
    """Those that can be asked in so many seconds from now on."""
    return TimedQuestions(deadline=time.monotonic() + seconds, each=seconds * EACH, tell=tell or (lambda _: None))


def changes(cluster: Cluster, limit: float) -> list[tuple[str, Cluster, float]]:
    """What is asked about: a change in words, the machine and the bytes a device under it."""
    out = [
        (UNLIMITED, cluster, math.inf),
        (f"1 GB more a device: {(limit + GB) / GB:.4g} GB", cluster, limit + GB),
        (f"1 GB less a device: {(limit - GB) / GB:.4g} GB", cluster, limit - GB),
    ]
    for depth, level in enumerate(cluster.levels):
        if level.size > 1:
            out.append((f"{level.name} with {FACTOR:g}× the bandwidth", faster_link(cluster, depth, FACTOR), limit))
    out.append((f"{FACTOR:g}× the flop/s", faster_arithmetic(cluster, FACTOR), limit))
    out.append((f"{FACTOR:g}× the bandwidth of device memory", faster_memory(cluster, FACTOR), limit))
    return out
