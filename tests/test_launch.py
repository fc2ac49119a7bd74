"""What starts an exported folder: files and commands as their readers parse them, and ranks as launchers say them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import autopar
from autopar.cli.main import main
from autopar.errors import ArgumentError, MeshError
from autopar.launch import (
    job_of,
    job_yaml,
    pytorchjob_yaml,
    rank_table,
    rank_table_script,
    sbatch_script,
    task_yaml,
    torchrun_command,
)
from autopar.launch.job import label
from autopar.launch.kubernetes import Pod
from autopar.launch.skypilot import ACCELERATORS
from autopar.runtime.launchers import launched, tasks_of_nodes
from autopar.values.cluster import preset_devices

WORLD = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PLACE = {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plan for two nodes of two devices, in a path that a shell has to be told to leave alone."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.empty(4, 8)
    plan = autopar.plan(
        model, (x,), cluster="2x2xh100", baseline="ddp", with_baselines=False, loss_fn=lambda out, _: out.sum()
    )
    plan.export(out := tmp_path_factory.mktemp("a b; $(touch x)"))
    return out


@pytest.mark.parametrize("said", [OPEN_MPI, HYDRA, SLURM], ids=["openmpi", "hydra", "slurm"])
def test_ranks_are_read_as_each_launcher_says_them(said: dict[str, str]) -> None:
    assert launched(said | PLACE) == WORLD
    assert launched(said | PLACE | WORLD) == {}, "torchrun's own count"
    assert launched({**OPEN_MPI, **SLURM, "SLURM_PROCID": "0"} | PLACE) == WORLD, "mpirun inside of a Slurm job"


def test_where_ranks_meet() -> None:
    assert launched(SLURM)["MASTER_ADDR"] == "10.0.0.7", "where srun ran: the first node"
    with pytest.raises(MeshError, match="rank 5 of 8 on several nodes, and nothing says where"):
        launched(OPEN_MPI)
    alone = launched({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert alone["MASTER_ADDR"] == "127.0.0.1" and alone["MASTER_PORT"] == "29500"
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == {}, "a batch file is no task"
    assert launched({}) == {}


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("4(x2),3") == [4, 4, 3] and tasks_of_nodes("8") == [8] and tasks_of_nodes("") == []


def test_a_rank_table_says_all(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, python="python")
    (tmp_path / "t.json").write_text(rank_table(job, ("a", "b")))
    table = {"RANK_TABLE_FILE": str(tmp_path / "t.json"), "RANK_ID": "3"}
    assert launched(table) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
    }  # fmt: skip
    with pytest.raises(MeshError, match=r"RANK_ID 9 is in no server of .*; it has ranks 0 to 3"):
        launched({**table, "RANK_ID": "9"})
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(MeshError, match="cannot be read as a rank table"):
        launched(table)


def test_a_job_is_the_plans_cluster(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, python="python", arguments=("--resume",), restarts=2)
    assert (job.nodes, job.per_node, job.gpus, job.device, job.name) == (2, 2, 2, "h100", "autopar-sequential")
    assert torchrun_command(job, hosts=("h0", "h1")) == (
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "python", "-m", "torch.distributed.run",
        "--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=h0:29500", "--rdzv-id=autopar-sequential", "--max-restarts=2",
        f"{job.folder}/train.py", "--resume",
    )  # fmt: skip
    assert job_of(folder, python="python", per_node=4).nodes == 1
    for hosts, found in (((), "none"), (("a",), "a"), (("a", "a"), "a, a"), (("a", ""), "a, ")):
        with pytest.raises(ArgumentError, match=f"the plan is for 2 nodes, --hosts names {found}; name each node once"):
            torchrun_command(job, hosts=hosts)
    with pytest.raises(ArgumentError, match="4 ranks, which 3 a node do not divide"):
        job_of(folder, python="python", per_node=3)
    with pytest.raises(ArgumentError, match=r"is no exported folder: it has no plan\.json"):
        job_of(tmp_path, python="python")
    for name in ("A b", "1 a b"):
        with pytest.raises(ArgumentError, match=r"is no name of a job.*try a-b"):
            job_of(folder, python="python", name=name)
    assert (
        label("Foo_Bar\n#SBATCH --x") == "foo-bar-sbatch-x" and label("…") == "autopar" and len(label("x" * 99)) == 40
    )


def test_the_batch_file_is_quoted_and_parses(folder: Path) -> None:
    job = job_of(folder, python="python", arguments=("--checkpoint", "a b; rm"))
    script = sbatch_script(job, directives=("partition=gpu",))
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=2"} < set(options)
    assert options[-1] == "#SBATCH --partition=gpu"
    stubs = 'scontrol() { printf "h0\\nh1\\n"; }; srun() { pwd; printf "%s\\n" "$MASTER_ADDR:$MASTER_PORT" "$@"; }\n'
    said = {"SLURM_JOB_NODELIST": "h[0-1]", "SLURM_JOB_ID": "10007"}
    done = subprocess.run(["bash"], input=stubs + script, env=os.environ | said, capture_output=True, text=True)
    started = ["--kill-on-bad-exit=1", "python", "train.py", "--checkpoint", "a b; rm"]
    assert done.stdout.splitlines() == [str(job.folder), "h0:20007", *started], done.stderr
    with pytest.raises(ArgumentError, match="write an option of sbatch"):
        sbatch_script(job, directives=("x\nrm -r /",))


@pytest.mark.parametrize("failing", [None, 2])
def test_the_script_of_a_rank_table_starts_one_server(failing: int | None, folder: Path, tmp_path: Path) -> None:
    """Its ranks, all of which end when one fails."""
    (tmp_path / "plan.json").write_text((folder / "plan.json").read_text())
    (tmp_path / "train.py").write_text(
        f"import os, sys, time\nrank = int(os.environ['RANK_ID'])\nif rank == {failing}:\n    sys.exit(7)\n"
        f"if {failing} is not None:\n    time.sleep(60)\nos.write(1, f'{{rank}} {{sys.argv[1]}}\\n'.encode())\n"
    )
    job = job_of(tmp_path, python=sys.executable, arguments=("a b; rm",))
    (tmp_path / "rank_table.json").write_text(rank_table(job, ("a", "b")))

    def started(server: str) -> "subprocess.CompletedProcess[str]":
        words = ["bash", "-s", server]
        return subprocess.run(words, input=rank_table_script(job), capture_output=True, text=True, timeout=30)

    done = started("b")
    if failing is None:
        assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["2 a b; rm", "3 a b; rm"], done.stderr
        assert "has no server c; it has a, b" in started("c").stderr
    else:
        assert done.returncode == 7 and not done.stdout


def _documents(folder: Path) -> list[dict[str, Any]]:
    job = job_of(folder, python="python", arguments=("--note", "$(HOME): {x}"), restarts=1)
    pod = Pod(image="registry/image:1", path="/autopar/out", claim="volume")
    return [*yaml.safe_load_all(job_yaml(job, pod)), yaml.safe_load(pytorchjob_yaml(job, pod))]


def test_kubernetes_starts_a_pod_a_node(folder: Path) -> None:
    service, job, kubeflow = _documents(folder)
    name = job["metadata"]["name"]
    assert (
        job["spec"]["completions"] == 2 and job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    )
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert f"--master-addr={name}-0.{name}" in container["command"], "the pod of index 0, below the Service"
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in container["command"]
    assert container["command"][-1] == "$$(HOME): {x}", "what a user writes is not replaced"
    replicas = kubeflow["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    assert kubeflow["spec"]["nprocPerNode"] == "2"


def test_kubernetes_knows_the_files(folder: Path) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: pip install 'autopar[integrations]'"
    )
    for document in _documents(folder)[:2]:  # Kubeflow's operator brings the schema of its own kind
        validator.validate(document, "1.27.0", strict=True)


def test_skypilot_is_told_nodes_and_devices(folder: Path) -> None:
    assert set(ACCELERATORS) <= set(preset_devices()), "names that no plan has"
    job = job_of(folder, python="python", arguments=("a b",))
    text = task_yaml(job, setup="pip install x")
    table = yaml.safe_load(text)
    assert table["num_nodes"] == 2 and table["resources"] == {"accelerators": "H100:2"}
    other = replace(job, device="mi300x")
    assert "accelerators: MI300X:2" in task_yaml(other, setup="true", accelerator="MI300X")
    with pytest.raises(ArgumentError, match="SkyPilot's name of 'mi300x' is not known here; give --accelerator"):
        task_yaml(other, setup="true")
    assert (
        "'a b'" in table["run"]
        and '--rdzv-endpoint="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29500"' in table["run"]
        and "run: |" in text
    )


def test_skypilot_knows_the_file(folder: Path, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    (tmp_path / "task.yaml").write_text(task_yaml(job_of(folder, python="python"), setup="true"))
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == 2 and "H100" in str(task.resources)


def test_the_command_writes_and_says(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> tuple[Any, dict[str, Any]]:
        with pytest.raises(SystemExit) as stop:
            main(["launch", str(folder), "--json", *words])
        return stop.value.code, json.loads(capsys.readouterr().out)

    monkeypatch.setenv("PATH", "")
    code, said = run("--with", "slurm", "--sbatch", "time=1:00:00", "--", "--resume")
    assert code == 0 and said["command"][0] == "sbatch" and (folder / "launch.sbatch").is_file()
    assert "#SBATCH --time=1:00:00" in (folder / "launch.sbatch").read_text()
    code, said = run("--with", "mpirun", "--hosts", "a,b", "--port", "5000", "--dry-run")
    assert (
        code == 0
        and "MASTER_ADDR=a" in said["command"]
        and (folder / "hostfile").read_text() == ("a slots=2\nb slots=2\n")
    )
    code, said = run("--with", "rank-table", "--hosts", " a , b ")
    assert code == 0 and not said["starts"]
    for words, message in (
        ((), "the plan is for 2 nodes, --hosts names none"),
        (("--hosts", "a,b", "--image", "i"), "--image does nothing under --with torchrun, which takes --hosts, --port"),
        (("--with", "mpirun", "--hosts", "a,b", "--port", "1", "--restarts", "3"), "--restarts does nothing under"),
        (("--with", "mpirun", "--hosts", "a,b", "--port", "1"), "mpirun is not found on this machine; install it"),
        (("--per-node", "4", "--port", "1"), "--port is where several nodes meet"),
        (("--with", "mpirun", "--hosts", "a,b"), "needs --port, a free one of a"),
        (("--with", "skypilot"), "has no autopar-*.whl, which a node installs"),
        (("--cluster", "8xh100"), "has 8 devices; give --cluster, the file that the plan was made for"),
        (("--with", "kubernetes"), "needs --image"),
        (("--with", "kubernetes", "--image", "i"), "--claim NAME"),
        (("--with", "k8s"), "unknown launcher 'k8s'; choose one of torchrun, slurm"),
        (("--port", "0"), "--port"),
    ):
        code, said = run(*words)
        assert code == 2 and message in said["error"], words
