"""Megatron-LM: tensor, sequence, pipeline (interleaved), context and expert parallel ranks, the distributed optimizer.

Flags are those of megatron/training/arguments.py (Megatron-LM core_v0.12 and newer).
"""

from autopar.advice.config_file import Keys
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
GRANULARITY = {kind: kind for kind in ("selective", "full")}
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
    return (ConfigFile(name="megatron.sh", text=" \\\n  ".join([first, *flags]), language="bash"),)


def read(keys: Keys, site: Site) -> Fields:
    """Degrees, batch, recompute, optimizer and precision of a script's flags (or the same keys as YAML, JSON or
    TOML)."""
    found: dict[str, object] = {field: n for key, field in DEGREES.items() if (n := keys.whole(key)) is not None}
    tp, pp, cp = (keys.whole(f"{axis}-parallel-size") or 1 for axis in ("tensor-model", "pipeline-model", "context"))
    selective = keys.truth("recompute-activations")
    layers, chunks = keys.whole(VIRTUAL), keys.whole("num-virtual-stages-per-pipeline-rank")
    if pp > 1:
        found["virtual_stages"] = chunks or (max(site.layers // pp // layers, 1) if layers else 1)
    precision = keys.precision("bf16", "fp16")
    return found | {
        "dp": site.data_ranks(tp, pp, cp),
        "sequence_parallel": keys.truth("sequence-parallel"),
        "zero": 1 if keys.truth("use-distributed-optimizer") else 0,
        "overlap_data": keys.truth("overlap-grad-reduce"),
        "overlap_tensor": "all" if keys.truth("tp-comm-overlap") else "backward",
        "recompute": keys.choice("recompute-granularity", GRANULARITY, "selective" if selective else "none"),
        "precision": precision if keys.value("fp8-format") is None else "fp8",
    }


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
        precisions=("bf16", "fp16", "fp32", "fp8"),
    ),
    write=write,
    read=read,
    own_models=True,
)
