"""When does each task of a step start and end, and how long does the step take? An event simulation over arrays.

A task needs `seconds` of one stream (a device's compute, or one of its links) after the tasks that it depends on. A
stream runs one task at a time and never stops one that runs. Whenever it is free it starts, of its tasks that are
ready, the one with the lowest `priority`; of equals the first to become ready, then the first in the list. So equal
priorities are a FIFO queue, and a program order is a chain of dependencies. A long message that urgent ones may
overtake is a chain of partitions.

A stream may be bound to more than the task that runs: as long as those that have not ended take less than its `window`
seconds, it binds itself to one more, and it runs them in that order, whatever becomes ready meanwhile. That is a queue
of messages already handed to the network. Without a window it is bound to what runs.

All tasks that end at one moment end before any other starts. O((tasks + dependencies) log tasks).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.timeline_kernel import longest_paths, run_events
from autopar.errors import ArgumentError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Task k runs `seconds[k]` on stream `stream[k]`; task `after[e]` waits for task `before[e]`.

    `windows`: seconds, a stream each; empty for none.
    """

    num_streams: int
    stream: Ints
    seconds: Floats
    priority: Floats
    before: Ints
    after: Ints
    windows: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.stream) == len(self.seconds) == len(self.priority):
            raise ArgumentError(
                f"a task needs one stream, one duration and one priority: got {len(self.stream)} streams, "
                f"{len(self.seconds)} durations and {len(self.priority)} priorities"
            )
        if len(self.windows) not in (0, self.num_streams) or not all(0 <= w < math.inf for w in self.windows):
            raise ArgumentError(
                f"windows {self.windows} of {self.num_streams} streams: give none, or finite seconds for each"
            )
        if len(self.before) != len(self.after):
            raise ArgumentError(f"dependencies are pairs: got {len(self.before)} befores and {len(self.after)} afters")
        _require_within("stream", self.stream, self.num_streams)
        _require_within("dependency", self.before, len(self.stream))
        _require_within("dependency", self.after, len(self.stream))
        wrong = np.flatnonzero(~(np.isfinite(self.seconds) & (self.seconds >= 0)))
        if len(wrong):
            raise ArgumentError(
                f"task {wrong[0]} takes {self.seconds[wrong[0]]} seconds; give a finite time that is not negative"
            )

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds from the start of the step at which each task starts and ends."""

    start: Floats
    finish: Floats

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended; 0 for no task."""
        return float(self.finish.max(initial=0.0))


def simulate(tasks: Tasks) -> Timeline:
    """Run the tasks.

    Raises:
        ArgumentError: if tasks wait for each other.
    """
    windows = np.array(tasks.windows or [0.0] * tasks.num_streams, dtype=np.float64)
    start, finish, done = run_events(windows, tasks.stream, tasks.seconds, tasks.priority, tasks.before, tasks.after)
    _require_all(done, len(tasks))
    return Timeline(start=start, finish=finish)


def critical_path_seconds(tasks: Tasks) -> float:
    """Seconds of the longest chain of dependencies: what the step would take with a stream for each task.

    Raises:
        ArgumentError: if tasks wait for each other.
    """
    finish, done = longest_paths(tasks.seconds, tasks.before, tasks.after)
    _require_all(done, len(tasks))
    return float(finish.max(initial=0.0))


def busy_seconds(tasks: Tasks) -> Floats:
    """Seconds of work of each stream."""
    busy = np.zeros(tasks.num_streams)
    np.add.at(busy, tasks.stream, tasks.seconds)
    return busy


class TaskList:
    """Collects tasks one at a time, for graphs small enough to be written that way."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._stream: list[int] = []
        self._seconds: list[float] = []
        self._priority: list[float] = []
        self._edges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._stream)

    def add(self, stream: int, seconds: float, after: Iterable[int] = (), priority: float = 0.0) -> int:
        """The new task's number; it waits for the tasks `after`."""
        task = len(self._stream)
        self._stream.append(stream)
        self._seconds.append(seconds)
        self._priority.append(priority)
        self._edges += [(before, task) for before in after]
        return task

    def tasks(self, windows: tuple[float, ...] = ()) -> Tasks:
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 2)
        return Tasks(
            num_streams=self._num_streams,
            stream=np.array(self._stream, dtype=np.int64),
            seconds=np.array(self._seconds, dtype=np.float64),
            priority=np.array(self._priority, dtype=np.float64),
            before=np.ascontiguousarray(edges[:, 0]),
            after=np.ascontiguousarray(edges[:, 1]),
            windows=windows,
        )


def _require_within(what: str, values: Ints, limit: int) -> None:
    wrong = values[(values < 0) | (values >= limit)]
    if len(wrong):
        raise ArgumentError(f"{what} {wrong[0]} does not exist; there are {limit}, counted from 0")


def _require_all(done: int, count: int) -> None:
    if done < count:
        raise ArgumentError(f"{count - done} of {count} tasks wait for each other in a circle; break the circle")
