"""What starts an exported folder on Kubernetes: an Indexed Job with a headless Service, or Kubeflow's PyTorchJob.

A pod a node; what is lost is started again by the Job or the operator, pod by pod. Of a Job the pod of index 0 is
where ranks meet, under the name that the Service gives it; torchrun runs in each pod. A PyTorchJob's operator sets
MASTER_ADDR, PET_NNODES, PET_NODE_RANK and the rest, which torchrun reads. The folder is on a volume that all pods see,
or in the image.

Sources of the forms: the API reference of Kubernetes (batch/v1 Job, v1 Service) and of Kubeflow's training operator
(kubeflow.org/v1 PyTorchJob).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.launch.job import PORT, SCRIPT, Job
from autopar.launch.yaml_text import yaml_text

MOUNT = "/autopar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What a pod is made of.

    image: with Python, torch and autopar.
    path: of the exported folder, in the image or below the volume's mount.
    claim: a PersistentVolumeClaim that holds it; None where the image does.
    gpu: the resource that is asked for, a GPU each.
    """

    image: str
    path: str
    claim: str | None = None
    gpu: str = "nvidia.com/gpu"


def job_yaml(job: Job, pod: Pod) -> str:
    """A Service and an Indexed Job, for kubectl apply."""
    selector = {"job-name": job.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    options = [
        f"--nproc-per-node={job.per_node}",
        f"--nnodes={job.nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={job.name}-0.{job.name}",
        f"--master-port={PORT}",
    ]
    template = {
        "metadata": {"labels": selector},
        "spec": {"subdomain": job.name, "restartPolicy": "Never", **_pod(job, pod, "train", options)},
    }
    table = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": job.restarts * job.nodes,
            "template": template,
        },
    }
    return yaml_text(service, table)


def pytorchjob_yaml(job: Job, pod: Pod) -> str:
    """A PyTorchJob of Kubeflow's training operator, for kubectl apply."""
    template = {"spec": _pod(job, pod, "pytorch", ())}

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "OnFailure" if job.restarts else "Never", "template": template}

    replicas = {"Master": replica(1)} | ({"Worker": replica(job.nodes - 1)} if job.nodes > 1 else {})
    spec: dict[str, Any] = {"nprocPerNode": str(job.per_node), "pytorchReplicaSpecs": replicas}
    if job.restarts:
        spec["runPolicy"] = {"backoffLimit": job.restarts}
    table = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.name}, "spec": spec}
    return yaml_text(table)


def _pod(job: Job, pod: Pod, name: str, options: Sequence[str]) -> dict[str, Any]:
    """Containers and volumes.

    options: of torchrun. In other words a dollar is doubled, for Kubernetes replaces $(NAME).
    """
    own = [word.replace("$(", "$$(") for word in (f"{pod.path}/{SCRIPT}", *job.arguments)]
    command = [job.python, "-m", "torch.distributed.run", *options, *own]
    container: dict[str, Any] = {"name": name, "image": pod.image, "command": command}
    if job.gpus:
        container["resources"] = {"limits": {pod.gpu: job.gpus}}
    mounts, volumes = [{"name": "shm", "mountPath": "/dev/shm"}], [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if pod.claim is not None:
        mounts.append({"name": "folder", "mountPath": MOUNT})
        volumes.append({"name": "folder", "persistentVolumeClaim": {"claimName": pod.claim}})
    return {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
