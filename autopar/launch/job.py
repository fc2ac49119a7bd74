"""What is to be started: an exported folder, how many processes on how many nodes, and what its train.py is given.

Nodes and processes of a node are those of the plan's cluster, rank by rank: the planner numbers devices of one node in
a row, and so do all launchers here (`runtime.launchers`).
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ArgumentError, ClusterError, MeshError
from autopar.values.cluster import load_cluster, load_preset
from autopar.values.plan_file import load_saved

SCRIPT = "train.py"
PORT = 29500
"""Where ranks meet unless a launcher gives each job its own port: torchrun's default."""
LONGEST = 40
"""Letters of a name: Kubernetes allows 63 of a label, and adds its own endings."""
HOST = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of an exported folder.

    folder: absolute, with its train.py.
    name: letters, digits and hyphens, fit for a label of Kubernetes and a job's name of Slurm.
    nodes, per_node: processes are numbered node by node.
    gpus: of a node; 0 on CPUs.
    device: of the plan's cluster, as presets name it.
    python: the interpreter that starts train.py there.
    arguments: of train.py.
    restarts: how often a launcher that can starts lost workers again.
    """

    folder: Path
    name: str
    nodes: int
    per_node: int
    gpus: int
    device: str
    python: str
    arguments: tuple[str, ...] = ()
    restarts: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


def job_of(
    folder: Path,
    *,
    python: str,
    cluster: str | None = None,
    per_node: int | None = None,
    name: str | None = None,
    arguments: tuple[str, ...] = (),
    restarts: int = 0,
) -> Job:
    """The job of an exported folder.

    Args:
        folder: as `autopar export` writes it.
        python: the interpreter that starts train.py.
        cluster: the file of the plan's cluster, if it is no preset.
        per_node: processes of a node, if not the devices of a node of the plan's cluster.
        name: of the job; by default the model's.
        arguments: of train.py.
        restarts: how often lost workers are started again, where the launcher can.

    Raises:
        ArgumentError: if the folder is no exported one, or a number does not divide the plan's ranks.
        ClusterError: if the plan's cluster is not known, and neither `cluster` nor `per_node` says.
        PlanFileError: if its plan.json is none.
    """
    root = folder.resolve()
    for needed in ("plan.json", SCRIPT):
        if not (root / needed).is_file():
            raise ArgumentError(
                f"{folder} is no exported folder: it has no {needed}; make one with autopar export plan.json --out DIR"
            )
    plan = load_saved(root / "plan.json").plan
    device, own = _machine(plan.cluster, cluster, per_node, plan.world)
    if plan.world % own:
        raise ArgumentError(
            f"the plan has {plan.world} ranks, which {own} a node do not divide; give another --per-node"
        )
    if name is not None and name != label(name):
        raise ArgumentError(f"{name!r} is no name of a job: lower-case letters, digits and hyphens; try {label(name)}")
    return Job(
        folder=root,
        name=name or label(f"autopar-{plan.model}"),
        nodes=plan.world // own,
        per_node=own,
        gpus=0 if device == HOST else own,
        device=device,
        python=python,
        arguments=arguments,
        restarts=restarts,
    )


def _machine(planned: str, given: str | None, per_node: int | None, world: int) -> tuple[str, int]:
    """The device, and how many of it a node has."""
    try:
        machine = load_cluster(given) if given is not None else load_preset(planned)
    except ClusterError as error:
        if given is not None or per_node is None:
            remedy = "" if given is not None else "; give --cluster, the file that describes it, or --per-node"
            raise ClusterError(
                f"the plan is for cluster {planned!r:.80}: {str(error).splitlines()[0]}{remedy}"
            ) from error
        return "", per_node
    if machine.num_devices != world:
        raise MeshError(f"the plan has {world} ranks, cluster {machine} has {machine.num_devices} devices")
    levels = [level.size for level in machine.levels]
    own = math.prod(levels[1:]) if len(levels) > 1 else levels[0]
    return machine.device.name, per_node or own


def label(text: str) -> str:
    """A text as a label of a host's name: whatever else it has becomes a hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST].strip("-") or "autopar"
