"""Accelerate: its config file for `accelerate launch`, with FSDP2's plugin and `parallelism_config`.

Keys are those of accelerate 1.15: commands/config/config_args.py, utils/dataclasses.py, parallelism_config.py.
"""

from autopar.advice.config_file import Keys
from autopar.advice.framework import ConfigFile, Fields, Framework, Sharding, Site
from autopar.advice.frameworks.fsdp2 import (
    DDP,
    EAGER,
    EAGER_SOURCE,
    FSDP,
    HUGGING_FACE,
    POLICIES,
    SDPA,
    SWITCH,
    policy_fields,
)
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError

NEUTRAL = (
    "compute_environment", "debug", "num_machines", "num_processes", "machine_rank", "main_training_function",
    "rdzv_backend", "same_network", "use_cpu", "downcast_bf16", "enable_cpu_affinity", "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_cpu_ram_efficient_loading",
)  # fmt: skip
"""Keys of the file that say where and how it is started, and what is wrapped, not what a step takes."""
KINDS = {kind: kind for kind in ("FSDP", "MULTI_GPU", "DEEPSPEED")} | {"NO": "MULTI_GPU"}
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}  # YAML reads a bare no as false


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The YAML file, and the sizes that a script gives to its data loader and `Accelerator`."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        f"distributed_type: {'FSDP' if config.zero else 'MULTI_GPU'}",
        f"mixed_precision: '{'no' if config.precision == 'fp32' else config.precision}'",
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
            *([f"  fsdp_transformer_layer_cls_to_wrap: {site.layer_class}"] if site.layer_class else []),
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
    if config.cp > 1:
        loop += SDPA
    if config.recompute == "full" and not config.zero:
        loop += SWITCH
    return (
        ConfigFile(name="accelerate.yaml", text="\n".join(lines) + "\n", language="yaml"),
        ConfigFile(name="script.py", text=loop, language="python"),
    )


def read(keys: Keys, site: Site) -> Fields:
    """Degrees, policy and precision of a config file; sizes of batches are the script's, so they are not in it."""
    kind = keys.choice("distributed_type", KINDS, "MULTI_GPU")
    if kind == "DEEPSPEED":
        raise ArgumentError(f"{keys.name} starts DeepSpeed; give --for deepspeed and its JSON file")
    reshard = keys.choice("fsdp_config.fsdp_reshard_after_forward", POLICIES, FSDP)
    strategy = keys.choice("fsdp_config.fsdp_sharding_strategy", POLICIES, reshard)
    found = policy_fields(strategy if kind == "FSDP" else DDP, site)
    sizes = {
        name: keys.whole(f"parallelism_config.parallelism_config_{name}_size")
        for name in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    if sizes["dp_replicate"] is not None:
        found["replicate"] = sizes["dp_replicate"]
    tp, cp = sizes["tp"] or 1, sizes["cp"] or 1
    keys.ignored(*NEUTRAL)
    offload = keys.truth("fsdp_config.fsdp_offload_params")
    recompute = keys.truth("fsdp_config.fsdp_activation_checkpointing")
    return found | {
        "tp": tp,
        "cp": cp,
        "dp": site.data_ranks(tp, cp),
        "offload": "all" if offload else "none",
        "recompute": "full" if recompute else "none",
        "precision": keys.choice("mixed_precision", PRECISIONS, "fp32"),
    }


ACCELERATE = Framework(
    name="accelerate",
    title="Accelerate 1.15",
    habits={**EAGER, "main_grads": False},
    sources=f"{EAGER_SOURCE}; its mixed precision reduces in bf16 (utils/dataclasses.py)",
    space=HUGGING_FACE,
    write=write,
    read=read,
)
