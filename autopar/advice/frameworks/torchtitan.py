"""torchtitan: FSDP2, HSDP, tensor, context, expert and pipeline parallel ranks, per-op or full recompute.

Keys are those of its config dataclasses (torchtitan 0.3.0, torchtitan/config/configs.py), which its TOML files of
earlier releases had too.
"""

from autopar.advice.config_file import flat_keys, truth, whole
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.cost_models.training_config import TrainingConfig

HABITS = {"overlap_data": True, "fusion": "norm", "in_place_loss": False}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "zbv": "ZBVZeroBubble"}
RECOMPUTE = {"none": "none", "op": "selective", "full": "full"}
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
    return (ConfigFile(name="torchtitan's command line", text=" \\\n  ".join([first, *lines]), language="bash"),)


def read(text: str, name: str, site: Site) -> Fields:
    """Degrees, batch, recompute and schedule of torchtitan's flags or TOML."""
    keys = flat_keys(text, name)
    found: dict[str, object] = {field: n for key, field in DEGREES.items() if (n := whole(keys, key, name)) is not None}
    replicate = whole(keys, "parallelism.data_parallel_replicate_degree", name) or 1
    sharded = whole(keys, "parallelism.data_parallel_shard_degree", name)
    tp, pp, cp = (int(str(found.get(degree, 1))) for degree in ("tp", "pp", "cp"))
    dp = site.cluster.num_devices // (tp * pp * cp) if sharded in (None, -1) else int(str(sharded)) * replicate
    found |= {"dp": dp, "zero": 3, "replicate": replicate, "sequence_parallel": tp > 1}
    if dp == replicate > 1 and cp == 1:
        found |= {"zero": 0, "replicate": 1}
    found["keep_gathered"] = keys.get("parallelism.fsdp_reshard_after_forward") == "never"
    local = whole(keys, "training.local_batch_size", name) or whole(keys, "training.batch_size", name) or 8
    given = whole(keys, "training.global_batch_size", name)
    found["global_batch"] = given if given and given > 0 else local * dp
    size = whole(keys, "parallelism.pipeline_parallel_microbatch_size", name) or 1
    found["micro_batch"] = size if pp > 1 else local
    found["recompute"] = _recompute(keys)
    found["offload"] = "all" if truth(keys, "training.enable_cpu_offload") else "none"
    schedule = str(keys.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    if pp > 1:
        known = {text.lower(): name for name, text in SCHEDULES.items()}
        found["schedule"] = known.get(schedule.lower(), "1f1b")
        found["virtual_stages"] = 2 if schedule.lower() == "interleaved1f1b" else 1
    if truth(keys, "compile.enable") is False:
        found["fusion"] = "none"
    return found


def _recompute(keys: dict[str, object]) -> str:
    """The subcommand of a command line, `activation_checkpoint.mode` of a TOML file; per-op without either."""
    if (chosen := keys.get("activation-checkpoint")) is not None:
        return {text: name for name, text in RECOMPUTE.items()}.get(str(chosen), "op")
    mode = str(keys.get("activation_checkpoint.mode", "selective"))
    every = str(keys.get("activation_checkpoint.selective_ac_option", "op"))
    if mode != "selective":
        return {"none": "none", "full": "full"}.get(mode, "op")
    return "alternate" if every == "2" else "op"


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
    ),
    write=write,
    read=read,
    own_models=True,
    notes=(
        "with torch.compile, without float8 unless --precision says so, and without asynchronous tensor parallelism",
    ),
)
