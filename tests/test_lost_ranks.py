"""A rank that is killed or sleeps during a step: all others raise in time, naming collective and group; none hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_runtime_agreement import free_port

from autopar.mesh import make_mesh

WORLD, LOST = 4, 3
TIMEOUT_SECONDS, LATEST_SECONDS = 6.0, 60.0
"""Of a collective; and until the last rank has raised: each may wait for one that waits itself, on a busy machine."""

STEPS = """
import json, os, signal, sys, time
sys.path.insert(0, "tests")
import runtime_cases as cases
from autopar.errors import RankError
from autopar.runtime import init

how, compiled = sys.argv[1:]
init(timeout_seconds={timeout})
module = cases.distributed(cases.some_plan((2, 2), 1))
if compiled == "compiled":
    module.compile(backend="aot_eager")
module.train_step(cases.batch(0))
lost = os.environ["RANK"] == "{lost}"
if lost and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
if lost:
    time.sleep(2.5 * {timeout})
try:
    for step in range(1000):
        module.train_step(cases.batch(step))
except RankError as error:
    print(json.dumps([time.monotonic() - start, type(error).__name__, str(error)]), flush=True)
os._exit(0)  # threads of a Gloo group that failed abort a process that ends in good order, now and then
"""


@pytest.mark.parametrize(("how", "compiled"), [("asleep", "eager"), ("killed", "compiled")])
def test_the_others_raise_and_name_the_group(how: str, compiled: str) -> None:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(WORLD), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    code = STEPS.format(timeout=TIMEOUT_SECONDS, lost=LOST)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, how, compiled],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).resolve().parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    deadline = time.monotonic() + 240
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if how == "killed":
        assert processes[LOST].returncode == -signal.SIGKILL, outputs[LOST][1]
    mesh = make_mesh((2, 2))
    for rank in range(WORLD):
        if rank == LOST and how == "killed":
            continue
        assert processes[rank].returncode == 0, outputs[rank][1]
        seconds, kind, text = json.loads(outputs[rank][0])
        assert kind == "RankError" and seconds <= LATEST_SECONDS
        found = re.match(rf"rank {rank}: (\w+) over axis ([\w,]+) \(ranks \[([\d, ]+)\]\) failed: ", text)
        assert found is not None, text
        collective, axes, members = found.groups()
        assert collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        fixed = [i for i, name in enumerate(mesh.names) if name not in axes.split(",")]
        own = mesh.coordinate(rank)
        expected = [r for r, place in enumerate(mesh.coordinates()) if all(place[i] == own[i] for i in fixed)]
        assert list(map(int, members.split(", "))) == expected
