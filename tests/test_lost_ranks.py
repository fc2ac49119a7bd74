"""A rank that is killed or sleeps during a step: all others raise in time, naming collective and group; none hangs."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

import tests.runtime_cases as cases
from autopar.errors import RankError
from autopar.runtime import init
from autopar.values.mesh import make_mesh
from tests.process_group import run_apart

WORLD, LOST = 4, 3
TIMEOUT_SECONDS, LATEST_SECONDS = 6.0, 60.0
"""Of a collective; and until the last rank has raised: each may wait for one that waits itself, on a busy machine."""

Tell = Callable[[tuple[float, str, str]], None]


def steps(tell: Tell, how: str, compiled: str) -> None:
    """Of one rank."""
    init(timeout_seconds=TIMEOUT_SECONDS)
    module = cases.distributed(cases.some_plan((2, 2), 1))
    if compiled == "compiled":
        module.compile(backend="aot_eager")
    module.train_step(cases.batch(0))
    lost = int(os.environ["RANK"]) == LOST
    if lost and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if lost:
        time.sleep(2.5 * TIMEOUT_SECONDS)
    try:
        for step in range(1000):
            module.train_step(cases.batch(step))
    except RankError as error:
        tell((time.monotonic() - start, type(error).__name__, str(error)))
    os._exit(0)  # threads of a Gloo group that failed abort a process that ends in good order, now and then


@pytest.mark.parametrize(("how", "compiled"), [("asleep", "eager"), ("killed", "compiled")])
def test_the_others_raise_and_name_the_group(how: str, compiled: str) -> None:
    ended = run_apart(WORLD, steps, how, compiled)
    if how == "killed":
        assert ended[LOST] == (-signal.SIGKILL, None)
    mesh = make_mesh((2, 2))
    for rank in range(WORLD):
        if rank == LOST and how == "killed":
            continue
        code, told = ended[rank]
        assert code == 0 and told is not None
        seconds, kind, text = told
        assert kind == "RankError" and seconds <= LATEST_SECONDS
        found = re.match(rf"rank {rank}: (\w+) over axis ([\w,]+) \(ranks \[([\d, ]+)\]\) failed: ", text)
        assert found is not None, text
        collective, axes, members = found.groups()
        assert collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        fixed = [i for i, name in enumerate(mesh.names) if name not in axes.split(",")]
        own = mesh.coordinate(rank)
        expected = [r for r, place in enumerate(mesh.coordinates()) if all(place[i] == own[i] for i in fixed)]
        assert list(map(int, members.split(", "))) == expected
