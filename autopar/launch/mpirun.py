"""The command that starts all processes under Open MPI's mpirun, which only starts them: they talk by NCCL or Gloo.

`--map-by ppr:N:node` fills nodes one after the other, as the plan numbers its devices. MASTER_ADDR and MASTER_PORT say
where rank 0 listens; the rest of the environment is Open MPI's, and `runtime.launchers` reads it.
"""

from pathlib import Path

from autopar.launch.job import SCRIPT, Job


def mpirun_command(job: Job, *, master: str, port: int, hostfile: Path | None = None) -> tuple[str, ...]:
    """Words of the command.

    master: the host of rank 0, which is the first of the host file.
    port: a free one of it.
    hostfile: Open MPI's, a line `HOST slots=N` a node; None for this machine.
    """
    words = ["mpirun", "--map-by", f"ppr:{job.per_node}:node:oversubscribe", "--bind-to", "none", "-np", str(job.world)]
    if hostfile is not None:
        words += ["--hostfile", str(hostfile)]
    threads = ("OMP_NUM_THREADS=1",) if job.shares_cores else ()
    for variable in (f"MASTER_ADDR={master}", f"MASTER_PORT={port}", *threads):
        words += ["-x", variable]
    return (*words, job.python, str(job.folder / SCRIPT), *job.arguments)
