"""`autopar launch`: start an exported folder, or write what starts it."""

import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.ending import console_of, one_answer
from autopar.cli.options import check_options
from autopar.cli.parameters import MACHINE, OUTPUT, Json, option
from autopar.errors import ArgumentError
from autopar.values.choices import check_choice

if TYPE_CHECKING:  # the command line is there before torch is
    from autopar.launch import Job

TAKEN = {
    "torchrun": ("hosts", "port", "restarts"),
    "slurm": ("sbatch", "restarts"),
    "mpirun": ("hosts", "port"),
    "rank-table": ("hosts",),
    "kubernetes": ("image", "claim", "path", "restarts"),
    "pytorchjob": ("image", "claim", "path", "restarts"),
    "skypilot": ("setup", "accelerator", "restarts"),
}
"""Options of each launcher beside those that describe the job."""
CONTAINERS = "Kubernetes and SkyPilot"
SETUP = "pip install torch ./autopar-*.whl"
"""autopar is on no package index: its wheel is in the folder, which SkyPilot copies to every node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What is said beside the job: hosts for several nodes, and what containers and batch systems need."""

    kind: str
    hosts: tuple[str, ...]
    port: int | None
    restarts: int
    sbatch: tuple[str, ...]
    image: str | None
    claim: str | None
    path: str | None
    setup: str | None
    accelerator: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAnswer:
    """Files by name, to be written into the folder, and the command that starts it all.

    starts: the command runs here; else it is for a person.
    """

    command: tuple[str, ...]
    files: dict[str, str]
    starts: bool


def launch(
    folder: Annotated[Path, typer.Argument(help="an exported folder, as autopar export writes it")],
    kind: Annotated[str, option(MACHINE, "--with", help=", ".join(TAKEN))] = "torchrun",
    hosts: Annotated[
        str | None, option(MACHINE, help="the nodes' names, separated by commas; ranks meet at the first")
    ] = None,
    per_node: Annotated[int | None, option(MACHINE, help="processes a node; by default the plan's cluster's")] = None,
    cluster: Annotated[str | None, option(MACHINE, help="the plan's cluster file, if it is no preset")] = None,
    port: Annotated[int | None, option(MACHINE, help="of the first node, where ranks meet")] = None,
    restarts: Annotated[int, option(MACHINE, help="how often lost workers start again (not mpirun, rank-table)")] = 0,
    sbatch: Annotated[
        list[str] | None,
        option(MACHINE, metavar="NAME=VALUE", help="of sbatch: partition=gpu; may be given several times"),
    ] = None,
    image: Annotated[str | None, option(CONTAINERS, help="a container image with torch and autopar")] = None,
    claim: Annotated[str | None, option(CONTAINERS, help="the PersistentVolumeClaim that holds the folder")] = None,
    path: Annotated[str | None, option(CONTAINERS, help="of the folder, in the image or the volume")] = None,
    setup: Annotated[
        str | None,
        option(CONTAINERS, help="shell commands that install a SkyPilot node, in the folder", show_default=SETUP),
    ] = None,
    accelerator: Annotated[
        str | None, option(CONTAINERS, help="SkyPilot's name of the device, if the plan's is not known to it")
    ] = None,
    name: Annotated[str | None, option(OUTPUT, help="of the job; by default the model's")] = None,
    dry_run: Annotated[
        bool, option(OUTPUT, "--dry-run", help="write files and print the command, and start nothing")
    ] = False,
    as_json: Json = False,
    arguments: Annotated[list[str] | None, typer.Argument(help="after --: for the folder's train.py")] = None,
) -> None:
    """Start an exported folder, or write what starts it: torchrun and mpirun run here, other launchers get a file."""
    check_choice("launcher", kind, TAKEN)
    check_options(per_node=per_node, port=port, restarts=restarts)
    asked = LaunchRequest(
        kind=kind,
        hosts=tuple(host.strip() for host in hosts.split(",")) if hosts is not None else (),
        port=port,
        restarts=restarts,
        sbatch=tuple(sbatch or ()),
        image=image,
        claim=claim,
        path=path,
        setup=setup,
        accelerator=accelerator,
    )
    _check_taken(asked)
    console = console_of(as_json)
    with one_answer(as_json) as answer:
        from autopar.launch import job_of

        job = job_of(
            folder,
            python=sys.executable if kind not in ("kubernetes", "pytorchjob", "skypilot") else "python",
            cluster=cluster,
            per_node=per_node,
            name=name,
            arguments=tuple(arguments or ()),
            restarts=asked.restarts,
        )
        found = answered(job, asked)
        written = _written(job.folder, found.files)
        starts = found.starts and not dry_run
        if starts and shutil.which(found.command[0]) is None:
            raise ArgumentError(
                f"{found.command[0]} is not found on this machine; install it, start the folder by --with torchrun, or "
                "give --dry-run to write and print what starts it"
            )
        answer.update(nodes=job.nodes, per_node=job.per_node, files=written, command=list(found.command), starts=starts)
    if not as_json:
        said = f"{job.world} processes: {job.nodes} node{'s' * (job.nodes > 1)} of {job.per_node}"
        for file in written:
            said += f"\nwritten: {file}"
        verb = "running" if starts else "start it with"
        console.print(f"{said}\n{verb}: {shlex.join(found.command)}", soft_wrap=True)
    if starts:
        sys.stdout.flush()
        raise typer.Exit(subprocess.run(found.command, stdout=sys.stderr if as_json else None).returncode)


def answered(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    """What the launcher of `asked` needs.

    Raises:
        ArgumentError: if something that it needs is not said.
    """
    return {
        "torchrun": _torchrun,
        "slurm": _slurm,
        "mpirun": _mpirun,
        "rank-table": _rank_table,
        "kubernetes": _kubernetes,
        "pytorchjob": _kubernetes,
        "skypilot": _skypilot,
    }[asked.kind](job, asked)


def _torchrun(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import torchrun_command
    from autopar.launch.job import PORT

    if asked.port is not None and job.nodes == 1:
        raise ArgumentError("--port is where several nodes meet, and the plan is for one; leave it out")
    command = torchrun_command(job, hosts=asked.hosts, port=asked.port or PORT)
    return LaunchAnswer(command=command, files={}, starts=True)


def _slurm(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import sbatch_script

    script = sbatch_script(job, directives=asked.sbatch)
    return LaunchAnswer(
        command=("sbatch", str(job.folder / "launch.sbatch")), files={"launch.sbatch": script}, starts=False
    )


def _mpirun(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import mpirun_command

    hosts = job.hosts(asked.hosts)
    if not asked.hosts:
        command = mpirun_command(job, master=hosts[0], port=asked.port or _free_port())
        return LaunchAnswer(command=command, files={}, starts=True)
    text = "".join(f"{host} slots={job.per_node}\n" for host in hosts)
    if asked.port is None:
        raise ArgumentError(f"mpirun on named hosts needs --port, a free one of {hosts[0]}")
    command = mpirun_command(job, master=hosts[0], port=asked.port, hostfile=job.folder / "hostfile")
    return LaunchAnswer(command=command, files={"hostfile": text}, starts=True)


def _rank_table(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import rank_table, rank_table_script
    from autopar.launch.rank_table import SCRIPT_NAME, TABLE

    files = {TABLE: rank_table(job, asked.hosts), SCRIPT_NAME: rank_table_script(job)}
    command = ("bash", str(job.folder / SCRIPT_NAME), job.hosts(asked.hosts)[0])
    return LaunchAnswer(command=command, files=files, starts=job.nodes == 1)


def _kubernetes(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import job_yaml, pytorchjob_yaml
    from autopar.launch.kubernetes import MOUNT, Pod

    if asked.image is None:
        raise ArgumentError(f"--with {asked.kind} needs --image, a container image with torch and autopar")
    if asked.path is None and asked.claim is None:
        raise ArgumentError(
            f"--with {asked.kind} needs the folder in the pods: --claim NAME (a PersistentVolumeClaim), or --path, "
            "where it is in the image"
        )
    inside = asked.path or job.folder.name
    pod = Pod(image=asked.image, path=f"{MOUNT}/{inside.strip('/')}" if asked.claim else inside, claim=asked.claim)
    text = job_yaml(job, pod) if asked.kind == "kubernetes" else pytorchjob_yaml(job, pod)
    file = f"{asked.kind}.yaml"
    return LaunchAnswer(command=("kubectl", "apply", "-f", str(job.folder / file)), files={file: text}, starts=False)


def _skypilot(job: "Job", asked: LaunchRequest) -> LaunchAnswer:
    from autopar.launch import task_yaml

    if asked.setup is None and not [*job.folder.glob("autopar-*.whl")]:
        raise ArgumentError(
            f"{job.folder} has no autopar-*.whl, which a node installs as autopar is on no package index; put one "
            "there (pip wheel --no-deps REPOSITORY), or give --setup, the shell commands that install torch and autopar"
        )
    text = task_yaml(job, accelerator=asked.accelerator, setup=asked.setup or SETUP)
    return LaunchAnswer(
        command=("sky", "launch", str(job.folder / "skypilot.yaml")), files={"skypilot.yaml": text}, starts=False
    )


def _check_taken(asked: LaunchRequest) -> None:
    """Raises ArgumentError for an option that would do nothing."""
    names, taken = (field.name for field in fields(asked)), ("kind", *TAKEN[asked.kind])
    if idle := [name for name in names if name not in taken and getattr(asked, name)]:
        known = ", ".join(f"--{name}" for name in taken[1:])
        raise ArgumentError(f"--{idle[0]} does nothing under --with {asked.kind}, which takes {known}; leave it out")


def _written(folder: Path, files: dict[str, str]) -> list[str]:
    from autopar.values.whole_file import write_whole

    try:
        for file, text in files.items():
            write_whole(folder / file, text)
    except OSError as error:
        raise ArgumentError(f"{folder} cannot be written: {error.strerror}") from error
    return [str(folder / file) for file in files]


def _free_port() -> int:
    """One of this machine that nobody listened at just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
