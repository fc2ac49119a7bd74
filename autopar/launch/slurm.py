"""The batch file that starts an exported folder under Slurm: a task a device, started by srun on all nodes.

The first host of the allocation is where ranks meet, at a port made from the job's number, for two jobs may share a
host. Ranks are Slurm's (`SLURM_PROCID`), block-wise over nodes; `runtime.launchers` reads them.
"""

import re
import shlex
from collections.abc import Sequence

from autopar.errors import ArgumentError
from autopar.launch.job import SCRIPT, Job

OPTION = re.compile(r"(--)?[a-z][a-z-]*(=[^\s\x00-\x1f]+)?")
"""sbatch reads options up to the end of the line, blanks separate them."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Below what Linux gives to outgoing connections (32768 on), so that none of them holds the port."""


def sbatch_script(job: Job, *, directives: Sequence[str] = ()) -> str:
    """The text of the file for sbatch.

    directives: further options of sbatch, such as `partition=gpu` or `time=02:00:00`.

    Raises:
        ArgumentError: for a directive that is no option on one line.
    """
    own = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        "--distribution=block:block",
        "--output=%x-%j.out",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *(["--requeue"] if job.restarts else []),
    ]
    for directive in directives:
        if not OPTION.fullmatch(directive):
            raise ArgumentError(f"--sbatch {directive!r}: write an option of sbatch, as in --sbatch partition=gpu")
    own += [f"--{directive.lstrip('-')}" for directive in directives]
    options = "\n".join(f"#SBATCH {option}" for option in own)
    threads = 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n' if job.shares_cores else ""
    command = shlex.join([job.python, SCRIPT, *job.arguments])
    return f"""#!/bin/bash
{options}

set -euo pipefail
cd {shlex.quote(str(job.folder))}
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
export MASTER_ADDR MASTER_PORT
{threads}srun --kill-on-bad-exit=1 {command}
"""
