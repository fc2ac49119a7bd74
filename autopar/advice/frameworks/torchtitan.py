"""torchtitan: FSDP2, HSDP, tensor, context, expert and pipeline parallel ranks, per-op or full recompute.

Keys are those of its config dataclasses (torchtitan 0.3.0, torchtitan/config/configs.py), which its TOML files of
earlier releases had too.
"""

from autopar.advice.config_file import Keys
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.cost_models.training_config import TRUTH, TrainingConfig

HABITS = {"overlap_data": True, "fusion": "norm", "in_place_loss": False}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "zbv": "ZBVZeroBubble"}
RECOMPUTE = {"none": "none", "op": "selective", "full": "full"}
MODES = {text: kind for kind, text in RECOMPUTE.items()}
EVERY = {"op": "op", "1": "full", "2": "alternate"}
STAGED = {text: (kind, 1) for kind, text in SCHEDULES.items()} | {"Interleaved1F1B": ("1f1b", 2)}
RESHARD = {"never": True, "default": False, "always": False}
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
MODELS = {"llama-3-8b": "llama3_8b", "llama-3-70b": "llama3_70b", "llama-3.1-405b": "llama3_405b"}
"""Functions of torchtitan/models/llama3/config_registry.py by our name of the model."""
DEGREES = {
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.expert_parallel_degree": "ep",
    "training.seq_len": "seq",
}


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The command line of a run; `--module` and `--config` choose the model among torchtitan's own."""
    staged = config.pp > 1
    settings: dict[str, object] = {
        "training.local_batch_size": config.micro_batch * (config.num_microbatches if staged else 1),
        "training.global_batch_size": config.global_batch,
        "training.seq_len": config.seq,
        "parallelism.data_parallel_replicate_degree": config.replicate if config.zero else config.dp,
        "parallelism.data_parallel_shard_degree": config.dp // config.replicate if config.zero else 1,
        "parallelism.fsdp_reshard_after_forward": "never" if config.keep_gathered else "default",
        "parallelism.tensor_parallel_degree": config.tp,
        "parallelism.context_parallel_degree": config.cp,
        "parallelism.expert_parallel_degree": config.ep,
        "parallelism.pipeline_parallel_degree": config.pp,
    }
    if staged:
        interleaved = config.virtual_stages > 1
        settings |= {
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B" if interleaved else SCHEDULES[config.schedule],
            "parallelism.pipeline_parallel_microbatch_size": config.micro_batch,
        }
    lines = [f"--{key} {value}" for key, value in settings.items()]
    if config.offload == "all":
        lines.append("--training.enable_cpu_offload")
    lines += ["--compile.enable", f"activation-checkpoint:{RECOMPUTE[config.recompute]}"]
    first = (
        f"torchrun --nnodes {site.nodes} --nproc-per-node {site.devices_per_node} -m torchtitan.train "
        f"--module {'llama3' if site.model in MODELS else 'MODULE'} --config {MODELS.get(site.model, 'CONFIG')}"
    )
    return (ConfigFile(name="torchtitan.sh", text=" \\\n  ".join([first, *lines]), language="bash"),)


def read(keys: Keys, site: Site) -> Fields:
    """Degrees, batch, recompute, schedule and precision of torchtitan's flags or TOML."""
    found: dict[str, object] = {field: n for key, field in DEGREES.items() if (n := keys.whole(key)) is not None}
    tp, pp, cp = (keys.whole(f"parallelism.{axis}_parallel_degree") or 1 for axis in ("tensor", "pipeline", "context"))
    replicate = keys.whole("parallelism.data_parallel_replicate_degree") or 1
    sharded = keys.whole("parallelism.data_parallel_shard_degree", -1)
    dp = site.data_ranks(tp, pp, cp) if sharded in (None, -1) else (sharded or 1) * replicate
    found |= {"dp": dp, "zero": 3, "replicate": replicate, "sequence_parallel": tp > 1}
    if dp == replicate > 1 and cp == 1:
        found |= {"zero": 0, "replicate": 1}
    found["keep_gathered"] = keys.choice("parallelism.fsdp_reshard_after_forward", RESHARD, False)
    local = keys.whole("training.local_batch_size") or keys.whole("training.batch_size") or 8
    given = keys.whole("training.global_batch_size", -1)
    found["global_batch"] = given if given and given > 0 else local * dp
    size = keys.whole("parallelism.pipeline_parallel_microbatch_size") or 1
    schedule, chunks = keys.choice("parallelism.pipeline_parallel_schedule", STAGED, ("1f1b", 1))
    if pp > 1:
        found |= {"schedule": schedule, "virtual_stages": chunks}
    if not keys.choice("compile.enable", TRUTH, True):
        found["fusion"] = "none"
    return found | {
        "micro_batch": size if pp > 1 else local,
        "recompute": _recompute(keys),
        "offload": "all" if keys.truth("training.enable_cpu_offload") else "none",
        "precision": keys.choice("training.mixed_precision_param", PRECISIONS, "bf16"),
    }


def _recompute(keys: Keys) -> str:
    """The subcommand of a command line, `activation_checkpoint.mode` of a TOML file; per-op without either."""
    mode = keys.choice("activation_checkpoint.mode", MODES, "op")
    every = keys.choice("activation_checkpoint.selective_ac_option", EVERY, "op")
    return keys.choice("activation-checkpoint", MODES, every if mode == "op" else mode)


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan 0.3.0",
    habits=HABITS,
    sources="benchmarks/reference_rows.py; float32 reductions and sharded masters: its TrainingConfig's defaults",
    space=FrameworkSpace(
        shardings=(
            Sharding(name="FSDP", zero=3),
            Sharding(name="FSDP, never resharded", zero=3, keep_gathered=True),
            Sharding(name="HSDP", zero=3, hybrid=True),
        ),
        recompute=("none", "op", "full"),
        offload=("none", "all"),
        schedules=("1f1b", "zbv"),
        virtual_stages=(1, 2),
        context=True,
        expert=True,
        sequence_parallel=True,
        precisions=("bf16",),
    ),
    write=write,
    read=read,
    own_models=True,
    notes=("with torch.compile, in bf16 and not float8, without asynchronous tensor parallelism",),
)
