"""How long does a call take when all ranks make it? Interquartile mean over rounds of the slowest rank's seconds.

Rounds go through all calls in turn, so that what else the machine does for a while falls on all of them and not on one.
The mean of the middle half forgets outliers as a median does, and like a mean it adds up: where a machine is slow in
half of the rounds, a median is one or the other by chance, and a step is no sum of medians.
Quick calls are repeated within a round. A GPU's time is between events on its stream, a CPU's by its clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist

Call = Callable[[], object]
Tell = Callable[[str], None]

SAMPLE_SECONDS = 40e-3
"""A quick call is repeated until a sample lasts about as long: ranks start at slightly different times. It is some
time slices of a CPU's scheduler: of ranks that share a core, each does less than that undisturbed, one after the other,
and its clock, which starts when it gets the core, would say that it is alone."""

MOST_REPEATS = 5000


class TimedRounds:
    """Calls that all ranks make, as many of them and in the same order; making this warms them up.

    times: how often each does what is measured.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device, tell: Tell, what: str, *, times: int = 1) -> None:
        self.calls, self.device, self.what, self.times = calls, device, what, times
        self.seconds: list[list[float]] = []
        first = []
        for number, call in enumerate(calls):
            tell(f"{what}: warming up {number + 1} of {len(calls)}")
            first.append(_timed(call, 1, device))
        # What is repeated, and how often, must be the same on all ranks, or collectives would not meet.
        slowest = _slowest([first])[0]
        again = [
            min(_timed(calls[k], 1, device) for _ in range(2)) for k, s in enumerate(slowest) if s < SAMPLE_SECONDS
        ]
        quick = iter(_slowest([again])[0] if again else ())
        self.repeats = [1 if s >= SAMPLE_SECONDS else _repeats(next(quick)) for s in slowest]

    def run(self, tell: Tell) -> None:
        """One more round, each in another order, so that no call always follows the same one."""
        tell(f"{self.what}: round {len(self.seconds) + 1}")
        seconds = [0.0] * len(self.calls)
        first = len(self.seconds) * 7 % max(len(self.calls), 1)
        for position in (*range(first, len(self.calls)), *range(first)):
            seconds[position] = _timed(self.calls[position], self.repeats[position], self.device) / self.times
        self.seconds.append(seconds)

    def typical(self) -> list[float]:
        """Seconds of each call; all ranks call this together."""
        return [interquartile_mean(seconds) for seconds in zip(*_slowest(self.seconds), strict=True)]


REPLAYS = {"cpu": 1, "cuda": 8}
"""How often `replayed` does a call: a GPU takes some microseconds to begin."""


def replayed(call: Call, device: torch.device) -> Call:
    """The call `REPLAYS` times, which a GPU does without the host: its kernels one behind the other."""
    if device.type != "cuda":
        return call
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):  # as torch asks: what a first call sets up is no part of a graph
        for _ in range(2):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_keeper(device).pool()):
        for _ in range(REPLAYS["cuda"]):
            call()
    return graph.replay


@cache
def _keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """In whose pool all replayed calls put their results: nobody reads them, and no two calls run at once. A pool that
    no graph is in any more takes no other."""
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper):
        torch.zeros(1, device=device)
    return keeper


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of the values without the lowest and the highest quarter, rounded down."""
    ends = len(values) // 4
    return statistics.fmean(sorted(values)[ends : len(values) - ends])


def _repeats(seconds: float) -> int:
    return min(MOST_REPEATS, max(1, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def _timed(call: Call, repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` calls on this rank, started together with the others."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        _meet()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats
    _meet()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))  # of a CPU tensor: Gloo, whatever serves the GPUs


def _slowest(rounds: list[list[float]]) -> list[list[float]]:
    """Each entry's maximum over ranks."""
    table = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    result: list[list[float]] = table.tolist()
    return result
