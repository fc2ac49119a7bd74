"""Megatron-LM: tensor, sequence, pipeline (interleaved), context and expert parallel ranks, the distributed optimizer.

Flags are those of megatron/training/arguments.py (Megatron-LM core_v0.12 and newer).
"""

from autopar.advice.config_file import flat_keys, truth, whole
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.cost_models.training_config import TrainingConfig

HABITS = {"overlap_data": True, "overlap_tensor": "all", "main_grads": True, "fused_grad_sum": True}
DEGREES = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "seq-length": "seq",
}
VIRTUAL = "num-layers-per-virtual-pipeline-stage"


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """Arguments of pretrain_gpt.py, the model's own left to the user."""
    flags: list[str] = [
        f"--{key} {getattr(config, field)}" for key, field in DEGREES.items() if key != "expert-model-parallel-size"
    ]
    if config.ep > 1:
        flags.append(f"--expert-model-parallel-size {config.ep}")
    if config.virtual_stages > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {config.virtual_stages}")
    if config.pp > 1 and site.layers % (config.pp * config.virtual_stages):
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if config.sequence_parallel:
        flags.append("--sequence-parallel")
    if config.tp > 1:
        flags.append("--tp-comm-overlap")
    if config.zero:
        flags += ["--use-distributed-optimizer", "--overlap-param-gather"]
    flags.append("--overlap-grad-reduce")
    if config.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif config.recompute == "selective":
        flags.append("--recompute-granularity selective")
    flags += {"fp16": ["--fp16"], "fp32": [], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(
        config.precision, ["--bf16"]
    )
    first = f"torchrun --nnodes {site.nodes} --nproc-per-node {site.devices_per_node} pretrain_gpt.py"
    return (ConfigFile(name="Megatron-LM's arguments", text=" \\\n  ".join([first, *flags]), language="bash"),)


def read(text: str, name: str, site: Site) -> Fields:
    """Degrees, batch, recompute and optimizer of a script's flags (or the same keys as YAML, JSON or TOML)."""
    keys = {key.replace("_", "-"): value for key, value in flat_keys(text, name).items()}
    found: dict[str, object] = {field: n for key, field in DEGREES.items() if (n := whole(keys, key, name)) is not None}
    tp, pp, cp = (int(str(found.get(degree, 1))) for degree in ("tp", "pp", "cp"))
    found["dp"] = site.cluster.num_devices // (tp * pp * cp)
    found["sequence_parallel"] = truth(keys, "sequence-parallel") or False
    found["zero"] = 1 if truth(keys, "use-distributed-optimizer") else 0
    found["overlap_data"] = truth(keys, "overlap-grad-reduce") or False
    found["overlap_tensor"] = "all" if truth(keys, "tp-comm-overlap") else "backward"
    granularity = keys.get("recompute-granularity")
    found["recompute"] = str(granularity) if granularity in ("full", "selective") else "none"
    if truth(keys, "recompute-activations"):
        found["recompute"] = "selective"
    layers = whole(keys, VIRTUAL, name)
    chunks = whole(keys, "num-virtual-stages-per-pipeline-rank", name)
    if pp > 1:
        found["virtual_stages"] = chunks or (site.layers // pp // layers if layers else 1)
    return found


MEGATRON = Framework(
    name="megatron",
    title="Megatron-LM (core_v0.12)",
    habits=HABITS,
    sources="arXiv:2205.05198; its README's H100 runs, in benchmarks/reference_rows.py",
    space=FrameworkSpace(
        shardings=(
            Sharding(name="distributed optimizer", zero=1),
            Sharding(name="whole optimizer", zero=0),
        ),
        recompute=("none", "selective", "full"),
        schedules=("1f1b",),
        virtual_stages=(1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
        context=True,
        expert=True,
        sequence_parallel=True,
        even_layers=True,
        repeats_keys=True,
    ),
    write=write,
    read=read,
    own_models=True,
)
