"""Launchers that run on one machine start an exported folder, whose losses are those of every other launcher.

They start real processes, mpirun and Slurm's daemons: `make integrations` sets AUTOPAR_INTEGRATIONS=1.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from tests.one_node_slurm import HOW, is_installed, one_node_slurm

pytestmark = pytest.mark.skipif(
    os.environ.get("AUTOPAR_INTEGRATIONS", "") in ("", "0"),
    reason="starts launchers and their daemons: make integrations, or AUTOPAR_INTEGRATIONS=1",
)

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plan for two CPU processes, which send to each other."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = autopar.plan(
        model, (torch.randn(8, 16),), cluster="2xcpu", baseline="fsdp", loss_fn=lambda out, _: out.square().mean()
    )
    plan.export(out := tmp_path_factory.mktemp("an exported folder"))
    return out


def launch(folder: Path, *words: str) -> str:
    """What `autopar launch` and what it starts print."""
    command = [sys.executable, "-m", "autopar.cli", "launch", str(folder), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> Mapping[str, str]:
    return os.environ | {
        "NUM_STEPS": str(STEPS),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def losses(text: str) -> list[str]:
    return re.findall(r"step \d+: loss (\S+)", text)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    found = losses(launch(folder, "--with", "torchrun"))
    assert len(found) == STEPS
    return found


def test_mpirun(folder: Path, expected: list[str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    assert losses(launch(folder, "--with", "mpirun")) == expected


def test_a_rank_table(folder: Path, expected: list[str]) -> None:
    assert losses(launch(folder, "--with", "rank-table")) == expected
    (folder / "rank_table.json").write_text("{}")
    command = ["bash", str(folder / "launch_rank_table.sh"), "127.0.0.1"]
    assert subprocess.run(command, env=environment(), capture_output=True, timeout=120).returncode != 0


def test_slurm(folder: Path, expected: list[str], tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip(HOW)
    launch(folder, "--with", "slurm")
    with one_node_slurm(tmp_path, cpus=os.cpu_count() or 2) as reached:
        command = ["sbatch", "--wait", f"--output={tmp_path}/job.out", str(folder / "launch.sbatch")]
        done = subprocess.run(command, env=environment() | reached, capture_output=True, text=True, timeout=300)
    said = (tmp_path / "job.out").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + said
    assert losses(said) == expected


def test_torchrun_starts_lost_workers_again(folder: Path, tmp_path: Path, expected: list[str]) -> None:
    """A worker that ends in its first life; the second goes on from the checkpoint."""
    script = folder / "train.py"
    whole = script.read_text()
    broken = whole.replace(
        "    for step, batch in enumerate",
        '    ended = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"\n'
        "    for step, batch in enumerate",
    ).replace("        loss = ", "        if ended and step == 3:\n            os._exit(7)\n        loss = ")
    assert broken.count("ended = ") == broken.count("os._exit(7)") == 1, "train.py as it is exported has other lines"
    script.write_text(broken)
    try:
        words = ("--restarts", "1", "--", "--checkpoint", str(tmp_path / "runs"), "--resume", "--every", "1")
        found = losses(launch(folder, "--with", "torchrun", *words))
    finally:
        script.write_text(whole)
    assert found[-1] == expected[-1] and set(found) == set(expected)
