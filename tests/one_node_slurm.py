"""Slurm of one node on this machine, from Debian's slurm-wlm and munge: daemons of a folder's own, ended with it."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
HOW = "needs Slurm: apt-get install slurm-wlm munge (and to be root)"
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
SECONDS = 60.0


def is_installed() -> bool:
    return os.geteuid() == 0 and all(_where(name) for name in NEEDED)


def _where(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def one_node_slurm(folder: Path, cpus: int) -> Iterator[Mapping[str, str]]:
    """The environment in which sbatch and srun reach a Slurm that runs below `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    controller, daemon = _free_ports(2)
    conf.write_text(
        CONF.format(host=socket.gethostname(), controller=controller, daemon=daemon, folder=folder, cpus=cpus)
    )
    environment = os.environ | {"SLURM_CONF": str(conf)}
    munge = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"]
    munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", "--foreground", "--force"]
    commands = [["munged", *munge], ["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)]]
    processes = []
    try:
        for name, *words in commands:
            with (folder / f"{name}.out").open("wb") as out:
                processes.append(subprocess.Popen([str(_where(name)), *words], env=environment, stdout=out, stderr=out))
            time.sleep(1)
        _wait(environment, folder)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(environment: Mapping[str, str], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if done.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(file.read_text(errors="replace")[-1500:] for file in sorted(folder.glob("*.out")))
    raise TimeoutError(f"Slurm was not ready in {SECONDS:.0f} s: {done.stdout}{done.stderr}\n{logs}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
