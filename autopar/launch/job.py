"""What is to be started: an exported folder, how many processes on how many nodes, and what its train.py is given.

Nodes and processes of a node are those of the plan's cluster, rank by rank: the planner numbers devices of one node in
a row, and so do all launchers here (`runtime.launchers`).
"""

import math
import re
from collections.abc import Sequence
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
    name: a letter, then letters, digits and hyphens, as Kubernetes names a Service.
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

    @property
    def shares_cores(self) -> bool:
        """Whether processes compute on one node's cores, each with one thread then, as torchrun sets it."""
        return not self.gpus and self.per_node > 1

    def hosts(self, named: Sequence[str]) -> tuple[str, ...]:
        """The nodes in the order of their ranks; of one node this machine, where none is named.

        Raises:
            ArgumentError: if these are not as many as the job has nodes, or one is empty or named twice.
        """
        if not named and self.nodes == 1:
            return ("127.0.0.1",)
        if len(named) != self.nodes or len({*named, ""}) != len(named) + 1:
            nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
            raise ArgumentError(
                f"the plan is for {nodes}, --hosts names {', '.join(named) or 'none'}; name each node once, as in "
                "--hosts a,b, the one where ranks meet first"
            )
        return tuple(named)


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
        ClusterError: if the plan's cluster is not known, or `cluster` is none.
        MeshError: if the cluster has not as many devices as the plan has ranks.
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
        raise ArgumentError(
            f"{name!r} is no name of a job: a lower-case letter, then letters, digits and hyphens; try {label(name)}"
        )
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
        if given is not None:
            raise
        raise ClusterError(
            f"the plan is for cluster {planned!r:.80}, which is no preset; give --cluster, the file that describes it"
        ) from error
    if machine.num_devices != world:
        raise MeshError(
            f"the plan has {world} ranks, cluster {machine} has {machine.num_devices} devices; give --cluster, the "
            "file that the plan was made for"
        )
    levels = [level.size for level in machine.levels]
    own = math.prod(levels[1:]) if len(levels) > 1 else levels[0]
    return machine.device.name, per_node or own


def label(text: str) -> str:
    """A text as a label of a host's name, from its first letter on: whatever else it has becomes a hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:LONGEST].strip("-") or "autopar"
