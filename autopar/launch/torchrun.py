"""The command that starts a node's processes under torchrun; ranks of several nodes meet at one of them.

With `restarts` torchrun's agent starts all workers of the job again when one is lost (its elasticity): what a plan
needs is its own number of ranks, so a node that is gone has to be replaced before they begin. The folder's train.py
goes on from its newest checkpoint where it is given `--checkpoint FOLDER --resume`.
"""

from collections.abc import Sequence

from autopar.launch.job import PORT, SCRIPT, Job

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Workers meet at a store of their own life. By default they share the agent's, where a worker that is started again
finds addresses of the life before: Gloo connects to them and fails."""


def torchrun_command(job: Job, *, hosts: Sequence[str] = (), port: int = PORT) -> tuple[str, ...]:
    """Words of the command, the same on every node.

    hosts: the nodes, which meet at the first; none for one node, whose processes meet at a free port of their own.

    Raises:
        ArgumentError: as `Job.hosts`.
    """
    master = job.hosts(hosts)[0]
    words = ["env", OWN_STORE] if job.restarts else []
    words += [job.python, "-m", "torch.distributed.run", f"--nproc-per-node={job.per_node}"]
    if job.nodes == 1:
        words.append("--standalone")
    else:
        words += [f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={master}:{port}"]
        words.append(f"--rdzv-id={job.name}")
    words += [f"--max-restarts={job.restarts}", str(job.folder / SCRIPT)]
    return (*words, *job.arguments)
