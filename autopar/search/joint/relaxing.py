"""What does a mesh take at least if memory has no limit? Asked ahead, so that a second process answers in the meantime.

The bounds of the joint search are strategy graphs without a limit, some seconds each on three axes, and which of them
come next is known. `foresee` hands them to a process of its own, `of` takes what it has found, waits for what it is
at, and finds the rest here. Values are the same whoever finds them.
"""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.plan import TrainConfig
from autopar.search.costs.pricing import Pricer
from autopar.search.costs.program import Program, make_program
from autopar.search.exact.relaxation import least_seconds
from autopar.search.graph.build import build
from autopar.search.meshes import Arrangement
from autopar.serialize import dump, load

RECENT = 8
QUEUED = 2
"""How many may wait for the other process: those asked for later are known better."""

Asked = tuple[Arrangement, int, int]
"""Mesh, number of micro-batches, and how many of them are paid for."""


def relaxed_seconds(program: Program, pricer: Pricer, times: int, fold: bool) -> float:
    """The least that `times` micro-batches and what is paid once take on the pricer's mesh, memory aside (a bound)."""
    accumulation, known = program.captured.accumulation, program.made
    if accumulation is not None and times != accumulation.microbatches:
        again = replace(program.captured, accumulation=replace(accumulation, microbatches=times))
        program = replace(program, captured=again)
        program.made.update(known)
    graph = build(program, pricer, limit=None, fold=fold).graph
    known.update(program.made)
    return least_seconds(graph)


@dataclass(slots=True)
class Pricers:
    """Prices by mesh and number of micro-batches; what ops and strategy graphs take space for is known of the `RECENT`
    last alone, links and parameters of each mesh."""

    config: TrainConfig
    _links: dict[Arrangement, Pricer] = field(default_factory=dict)
    _recent: dict[tuple[Arrangement, int], Pricer] = field(default_factory=dict)

    def of(self, arrangement: Arrangement, microbatches: int) -> Pricer:
        if arrangement not in self._links:
            self._links[arrangement] = Pricer(mesh=arrangement.mesh, cluster=arrangement.cluster, config=self.config)
        key = (arrangement, microbatches)
        found = self._recent.pop(key, None) or self._links[arrangement].for_another()
        self._recent[key] = found
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found


@dataclass(slots=True, kw_only=True)
class Relaxations:
    """A context. `program`: of one of so many micro-batches; beside: whether a second process may help."""

    program: Callable[[int], Program]
    pricer: Callable[[Arrangement, int], Pricer]
    fold: bool
    beside: bool = False
    _found: dict[Asked, float] = field(default_factory=dict)
    _asked: dict[Asked, Future[float]] = field(default_factory=dict)
    _other: "_Other | None" = None

    def __enter__(self) -> "Relaxations":
        return self

    def __exit__(self, *error: object) -> None:
        if self._other is not None:
            self._other.close()

    def of(self, asked: Asked) -> float:
        """Seconds; those of a whole step on a pipeline's part of the cluster are for all of its stages."""
        if asked not in self._found:
            future = self._asked.pop(asked, None)
            if future is None or future.cancel():
                self._found[asked] = self._here(asked)
            else:
                if not future.done():  # while the other process is at it, what comes next
                    waiting = next((one for one, other in self._asked.items() if other.cancel()), None)
                    if waiting is not None:
                        del self._asked[waiting]
                        self._found[waiting] = self._here(waiting)
                found = _answer(future)
                self._found[asked] = self._here(asked) if found is None else found
        return self._found[asked]

    def _here(self, asked: Asked) -> float:
        arrangement, microbatches, times = asked
        return relaxed_seconds(self.program(microbatches), self.pricer(arrangement, microbatches), times, self.fold)

    def foresee(self, asked: Iterator[Asked]) -> None:
        """These will probably be asked for, in this order."""
        while self.beside and sum(not future.done() for future in self._asked.values()) < QUEUED:
            one = next((a for a in asked if a not in self._found and a not in self._asked), None)
            if one is None:
                return
            self._other = self._other or _Other()
            arrangement, microbatches, times = one
            program, config = self.program(microbatches), self.pricer(arrangement, microbatches).config
            self._asked[one] = self._other.ask(program, config, arrangement, microbatches, times, self.fold)


def _answer(future: Future[float]) -> float | None:
    """What the other process found, None where it failed: asked here, the question raises what is to be raised."""
    with suppress(Exception):
        return future.result()
    return None


class _Other:
    """The second process, and a thread that waits for it: requests queue there, and may be cancelled until sent."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autopar.search.joint.relaxing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._thread = ThreadPoolExecutor(1)
        self._known: set[int] = set()

    def ask(
        self,
        program: Program,
        config: TrainConfig,
        arrangement: Arrangement,
        microbatches: int,
        times: int,
        fold: bool,
    ) -> Future[float]:
        def answer() -> float:
            assert self._process.stdin is not None and self._process.stdout is not None
            graph = None if microbatches in self._known else dump(program.captured)
            self._known.add(microbatches)
            request = graph, config, arrangement, microbatches, times, fold
            pickle.dump(request, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            found: float | Exception = pickle.load(self._process.stdout)
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


def _serve() -> None:
    """Answer until the requests end; what libraries print does not reach standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()
    programs: dict[int, Program] = {}
    pricers: Pricers | None = None
    while True:
        try:
            graph, config, arrangement, microbatches, times, fold = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found: Any
        try:
            if graph is not None:
                programs[microbatches] = make_program(load(graph))
            pricers = pricers or Pricers(config)
            found = relaxed_seconds(programs[microbatches], pricers.of(arrangement, microbatches), times, fold)
        except Exception as error:  # the one who asked decides what to make of it
            found = error
        pickle.dump(found, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _serve()
