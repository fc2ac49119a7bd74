"""A SkyPilot task that starts an exported folder: SkyPilot finds machines, copies the folder there, and runs torchrun.

Source of the form and of the variable SKYPILOT_NODE_IPS: SkyPilot's documentation, "Task YAML" and
"Distributed multi-node jobs".
"""

import shlex

from autopar.errors import ArgumentError
from autopar.launch.job import PORT, SCRIPT, Job
from autopar.launch.torchrun import OWN_STORE
from autopar.launch.yaml_text import yaml_text

ACCELERATORS = {
    "a100": "A100-80GB",
    "a100-40gb": "A100",
    "b200": "B200",
    "h100": "H100",
    "h100-eager": "H100",
    "h100-pcie": "H100",
    "h200": "H200",
    "h200-eager": "H200",
    "v100": "V100",
}
"""SkyPilot's names of the devices that presets name; a device that it does not rent is none."""


def task_yaml(job: Job, *, setup: str, accelerator: str | None = None) -> str:
    """The task's text, for `sky launch`.

    accelerator: SkyPilot's name of a node's device, if it is not that of the plan's device here.
    setup: shell commands that install torch and autopar on a node.

    Raises:
        ArgumentError: for a device whose name is neither known nor given.
    """
    named = accelerator or ACCELERATORS.get(job.device)
    if job.gpus and named is None:
        raise ArgumentError(f"SkyPilot's name of {job.device!r} is not known here; give --accelerator, as in H100")
    command = shlex.join(
        [
            *(("env", OWN_STORE) if job.restarts else ()),
            *(job.python, "-m", "torch.distributed.run"),
            f"--nproc-per-node={job.per_node}",
            f"--nnodes={job.nodes}",
            f"--max-restarts={job.restarts}",
            f"--rdzv-id={job.name}",
            "--rdzv-backend=c10d",
        ]
    )
    where = f'--rdzv-endpoint="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
    table = {
        "name": job.name,
        "workdir": str(job.folder),
        "num_nodes": job.nodes,
        "resources": {"accelerators": f"{named}:{job.gpus}"} if job.gpus else {"cpus": f"{job.per_node}+"},
        "setup": setup + "\n",
        "run": f"{command} {where} {shlex.join([SCRIPT, *job.arguments])}\n",
    }
    return yaml_text(table)
