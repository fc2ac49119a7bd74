"""Which rank is this process, by the launcher that started it? Each launcher's variables, as those of torchrun.

torchrun says RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Others say a part of it under
names of their own:

    Slurm (srun)        SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE   srun(1)
    Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE                          mpirun(1)
    MPICH, Intel MPI    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS                           Hydra
    a rank table        RANK_TABLE_FILE, RANK_ID                                                       HCCL, MindSpore

What the environment says already counts. Processes of one node meet at 127.0.0.1; of several MASTER_ADDR has to be
said, but for a rank table, whose first server it is, and Slurm, whose srun ran on the first node.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import MeshError

PORT = "29500"


def launched(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables that the environment lacks and its launcher says otherwise; none where no other started it.

    Raises:
        MeshError: if a rank table cannot be read, or several nodes have no place to meet.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    found = next((said for read in READERS if (said := read(environment))), None)
    if found is None:
        return {}
    if "MASTER_ADDR" not in environment and "MASTER_ADDR" not in found:
        if int(found["LOCAL_WORLD_SIZE"]) < int(found["WORLD_SIZE"]):
            raise MeshError(
                f"this process is rank {found['RANK']} of {found['WORLD_SIZE']} on several nodes, and nothing says "
                "where they meet; set MASTER_ADDR to the host of rank 0 (with mpirun: -x MASTER_ADDR=HOST)"
            )
        found["MASTER_ADDR"] = "127.0.0.1"
    found.setdefault("MASTER_PORT", PORT)
    return {name: value for name, value in found.items() if name not in environment}


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a task that srun started; the batch file itself is none."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return {}
    counts = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    local = counts[node] if node < len(counts) else 1
    found = _said(environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"], environment["SLURM_LOCALID"], local)
    if len(counts) > 1 and (address := environment.get("SLURM_LAUNCH_NODE_IPADDR")):
        found["MASTER_ADDR"] = address
    return found


def tasks_of_nodes(text: str) -> list[int]:
    """Slurm's `4(x2),3` as [4, 4, 3]."""
    counts = list[int]()
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _open_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _said(*(environment[name] for name in names)) if all(name in environment for name in names) else {}


def _hydra(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _said(*(environment[name] for name in names)) if all(name in environment for name in names) else {}


def _rank_table(environment: Mapping[str, str]) -> dict[str, str]:
    if "RANK_TABLE_FILE" not in environment or "RANK_ID" not in environment:
        return {}
    path, rank = environment["RANK_TABLE_FILE"], environment["RANK_ID"]
    try:
        servers = json.loads(Path(path).read_text(encoding="utf-8"))["server_list"]
        ranks = [[str(device["rank_id"]) for device in server["device"]] for server in servers]
        first = next(str(s["server_id"]) for s, own in zip(servers, ranks, strict=True) if "0" in own)
        own = next((own for own in ranks if rank in own), None)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise MeshError(
            f"RANK_TABLE_FILE {path} cannot be read as a rank table ({type(error).__name__}: {error}); it needs "
            "server_list, each server with server_id and device, each device with rank_id, one of them 0"
        ) from error
    if own is None:
        raise MeshError(f"RANK_ID {rank} is in no server of {path}; it has ranks 0 to {sum(map(len, ranks)) - 1}")
    found = _said(rank, sum(map(len, ranks)), own.index(rank), len(own))
    return found | {"MASTER_ADDR": first if len(servers) > 1 else "127.0.0.1"}


def _said(rank: object, world: object, local: object, local_world: object) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    return {name: str(value) for name, value in values.items()}


READERS = (_open_mpi, _hydra, _slurm, _rank_table)
"""In this order: mpirun inside of a Slurm job starts its daemons by srun, whose variables its processes inherit."""
