"""Hugging Face's Trainer: `TrainingArguments` with FSDP2, or with DDP and gradient checkpointing.

Names are those of transformers 5.23, training_args.py; arguments are written as JSON, which `HfArgumentParser` reads.
"""

import json

from autopar.advice.config_file import flat_keys, truth, whole
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE, FSDP, HYBRID, KEPT
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """`TrainingArguments` as JSON, how they are read, and how the script is started."""
    arguments: dict[str, object] = {
        "output_dir": "out",
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.num_microbatches,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
    }
    if config.zero:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": not config.keep_gathered,
            "activation_checkpointing": config.recompute == "full",
            "cpu_offload": config.offload == "all",
        }
    elif config.recompute == "full":
        arguments["gradient_checkpointing"] = True
    code = (
        "from transformers import HfArgumentParser, TrainingArguments\n\n(args,) = HfArgumentParser(TrainingArguments)"
    )
    code += '.parse_json_file("training_arguments.json")\n'
    if config.tp * config.cp * config.replicate > 1:
        sizes = {
            "dp_replicate_size": config.replicate,
            "dp_shard_size": config.dp // config.replicate,
            "tp_size": config.tp,
            "cp_size": config.cp,
        }
        inner = ", ".join(f"{key}={size}" for key, size in sizes.items())
        code = (
            "from accelerate import ParallelismConfig\n"
            + code
            + f"args.parallelism_config = ParallelismConfig({inner})\n"
        )
    return (
        ConfigFile(name="training_arguments.json", text=json.dumps(arguments, indent=2) + "\n", language="json"),
        ConfigFile(name="in the script", text=code, language="python"),
        ConfigFile(
            name="to start it",
            text=f"torchrun --nnodes {site.nodes} --nproc-per-node {site.devices_per_node} train.py\n",
            language="bash",
        ),
    )


def read(text: str, name: str, site: Site) -> Fields:
    """Batch, accumulation, policy and degrees of `TrainingArguments` as JSON, YAML or flags."""
    keys = flat_keys(text, name)
    if keys.get("deepspeed"):
        raise ArgumentError(f"{name} trains with DeepSpeed; give --for deepspeed and its JSON file")
    fsdp = str(keys.get("fsdp") or "")
    sharded = bool(fsdp) and fsdp not in ("False", "[]")
    found: dict[str, object] = {"zero": 3 if sharded else 0}
    for degree in ("tp", "cp"):
        found[degree] = whole(keys, f"parallelism_config.{degree}_size", name) or 1
    found["replicate"] = whole(keys, "parallelism_config.dp_replicate_size", name) or 1
    dp = site.cluster.num_devices // (int(str(found["tp"])) * int(str(found["cp"])))
    found["dp"] = dp
    reshard = truth(keys, "fsdp_config.reshard_after_forward")
    found["keep_gathered"] = sharded and (reshard is False or "shard_grad_op" in fsdp)
    found["micro_batch"] = size = whole(keys, "per_device_train_batch_size", name) or 8
    found["global_batch"] = size * dp * (whole(keys, "gradient_accumulation_steps", name) or 1)
    found["offload"] = "all" if truth(keys, "fsdp_config.cpu_offload") else "none"
    names = ("gradient_checkpointing", "activation_checkpointing", "fsdp_config.activation_checkpointing")
    found["recompute"] = "full" if any(truth(keys, key) for key in names) else "none"
    return found


TRAINER = Framework(
    name="trainer",
    title="transformers 5.23's Trainer",
    habits={**EAGER, "main_grads": False},
    sources=f"{EAGER_SOURCE}; reductions in bf16, as Accelerate's mixed precision has it",
    space=FrameworkSpace(
        shardings=(FSDP, KEPT, HYBRID, DDP),
        recompute=("none", "full"),
        offload=("none", "all"),
        context=True,
    ),
    write=write,
    read=read,
)
