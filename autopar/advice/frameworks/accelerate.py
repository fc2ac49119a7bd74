"""Accelerate: its config file for `accelerate launch`, with FSDP2's plugin and `parallelism_config`.

Keys are those of accelerate 1.15: commands/config/config_args.py, utils/dataclasses.py, parallelism_config.py.
"""

from autopar.advice.config_file import flat_keys, truth, whole
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE, FSDP, HYBRID, KEPT
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError

DEGREES = {"tp": "tp", "cp": "cp"}


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The YAML file, and the sizes that a script gives to its data loader and `Accelerator`."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        f"distributed_type: {'FSDP' if config.zero else 'MULTI_GPU'}",
        f"mixed_precision: '{'no' if config.precision == 'fp32' else config.precision.partition('-')[0]}'",
        f"num_machines: {site.nodes}",
        f"num_processes: {config.num_devices}",
        "machine_rank: 0",
        "main_training_function: main",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
        "downcast_bf16: 'no'",
        "enable_cpu_affinity: false",
    ]
    if config.zero:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(not config.keep_gathered).lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(config.recompute == 'full').lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            "  fsdp_cpu_ram_efficient_loading: true",
            f"  fsdp_offload_params: {str(config.offload == 'all').lower()}",
        ]
        if config.tp * config.cp * config.replicate > 1:
            lines += [
                "parallelism_config:",
                f"  parallelism_config_dp_replicate_size: {config.replicate}",
                f"  parallelism_config_dp_shard_size: {config.dp // config.replicate}",
                f"  parallelism_config_tp_size: {config.tp}",
                f"  parallelism_config_cp_size: {config.cp}",
            ]
            if config.cp > 1:
                lines.append("  parallelism_config_cp_comm_strategy: allgather")
    loop = (
        f"batch_size = {config.micro_batch}  # of the data loader, a process\n"
        f"accelerator = Accelerator(gradient_accumulation_steps={config.num_microbatches})"
        f"  # global batch {config.global_batch}\n"
    )
    if config.recompute == "full" and not config.zero:
        loop += "model.gradient_checkpointing_enable()\n"
    return (
        ConfigFile(name="accelerate.yaml", text="\n".join(lines) + "\n", language="yaml"),
        ConfigFile(name="in the script", text=loop, language="python"),
    )


def read(text: str, name: str, site: Site) -> Fields:
    """Degrees and policy of a config file; sizes of batches are the script's, so they are not in it."""
    keys = flat_keys(text, name)
    kind = str(keys.get("distributed_type", "MULTI_GPU"))
    if kind == "DEEPSPEED":
        raise ArgumentError(f"{name} starts DeepSpeed; give --for deepspeed and its JSON file")
    found: dict[str, object] = {"zero": 3 if kind == "FSDP" else 0}
    sizes = {
        key: whole(keys, f"parallelism_config.parallelism_config_{key}_size", name)
        for key in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    for key in DEGREES:
        found[key] = sizes[key] or 1
    found["replicate"] = sizes["dp_replicate"] or 1
    found["dp"] = site.cluster.num_devices // (int(str(found["tp"])) * int(str(found["cp"])))
    reshard = str(keys.get("fsdp_config.fsdp_reshard_after_forward", "true")).lower()
    found["keep_gathered"] = kind == "FSDP" and reshard in ("false", "shard_grad_op")
    if str(keys.get("fsdp_config.fsdp_sharding_strategy", "")).upper() in ("2", "SHARD_GRAD_OP"):
        found["keep_gathered"] = True
    found["offload"] = "all" if truth(keys, "fsdp_config.fsdp_offload_params") else "none"
    found["recompute"] = "full" if truth(keys, "fsdp_config.fsdp_activation_checkpointing") else "none"
    return found


ACCELERATE = Framework(
    name="accelerate",
    title="Accelerate 1.15",
    habits={**EAGER, "main_grads": False},
    sources=f"{EAGER_SOURCE}; its mixed precision reduces in bf16 (utils/dataclasses.py)",
    space=FrameworkSpace(
        shardings=(FSDP, KEPT, HYBRID, DDP),
        recompute=("none", "full"),
        offload=("none", "all"),
        context=True,
    ),
    write=write,
    read=read,
)
