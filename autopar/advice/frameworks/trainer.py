"""Hugging Face's Trainer: `TrainingArguments` with FSDP2, or with DDP and gradient checkpointing.

Names are those of transformers 5.23, training_args.py; arguments are written as JSON, which `HfArgumentParser` reads.
"""

import json

from autopar.advice.config_file import Keys
from autopar.advice.framework import ConfigFile, Fields, Framework, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE, FSDP, HUGGING_FACE, POLICIES, SDPA, policy_fields
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import ArgumentError

OPTIMIZERS: dict[str, int | None] = {
    "adamw_torch": 2, "adamw_torch_fused": 2, "lion_32bit": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0,
}  # fmt: skip
"""Floats a parameter that torch's optimizers keep as the Trainer makes them."""


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
            **({"transformer_layer_cls_to_wrap": [site.layer_class]} if site.layer_class else {}),
        }
    elif config.recompute == "full":
        arguments["gradient_checkpointing"] = True
    code = (
        "from transformers import HfArgumentParser, TrainingArguments\n\n(args,) = HfArgumentParser(TrainingArguments)"
    )
    code += '.parse_json_file("training_arguments.json")\n'
    if config.cp > 1:
        code += SDPA
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
        ConfigFile(name="script.py", text=code, language="python"),
        ConfigFile(
            name="start.sh",
            text=(
                "# train.py: your script, with the lines of script.py\n"
                f"torchrun --nnodes {site.nodes} --nproc-per-node {site.devices_per_node} train.py\n"
            ),
            language="bash",
        ),
    )


def read(keys: Keys, site: Site) -> Fields:
    """Batch, accumulation, policy, degrees and precision of `TrainingArguments` as JSON, YAML or flags."""
    if keys.value("deepspeed"):
        raise ArgumentError(f"{keys.name} trains with DeepSpeed; give --for deepspeed and its JSON file")
    options = _options(keys)
    sharding = next((POLICIES[word] for word in options if word in POLICIES), DDP)
    if sharding is FSDP:
        sharding = keys.choice("fsdp_config.reshard_after_forward", POLICIES, FSDP)
    found = policy_fields(sharding, site)
    sizes = {name: keys.whole(f"parallelism_config.{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    if sizes["dp_replicate"] is not None:
        found["replicate"] = sizes["dp_replicate"]
    tp, cp = sizes["tp"] or 1, sizes["cp"] or 1
    dp = site.data_ranks(tp, cp)
    size = keys.whole("per_device_train_batch_size") or 8
    parts = keys.whole("gradient_accumulation_steps") or 1
    recompute = [keys.truth(key) for key in ("gradient_checkpointing", "fsdp_config.activation_checkpointing")]
    offload = keys.truth("fsdp_config.cpu_offload") or "offload" in options
    keys.ignored("output_dir", "fsdp_config.version", "fsdp_config.transformer_layer_cls_to_wrap")
    states = keys.choice("optim", OPTIMIZERS, None)
    return (
        found
        | {
            "tp": tp,
            "cp": cp,
            "dp": dp,
            "micro_batch": size,
            "global_batch": size * dp * parts,
            "offload": "all" if offload else "none",
            "recompute": "full" if any(recompute) else "none",
            "precision": keys.precision("bf16", "fp16"),
        }
        | ({} if states is None else {"optimizer_states": states})
    )


def _options(keys: Keys) -> list[str]:
    """Words of `fsdp`: true, or a policy of FSDP1 and what is beside it, as a list or in one text."""
    value = keys.value("fsdp")
    words = value if isinstance(value, list) else str("" if value in (None, False) else value).replace(",", " ").split()
    words = [str(word).lower() for word in words]
    for word in words:
        if word not in {*POLICIES, "auto_wrap", "offload"}:
            raise ArgumentError(f"{keys.name}: fsdp {word} is not priced here; what is: {', '.join(POLICIES)}")
    return [word for word in words if word not in ("false", "0")]


TRAINER = Framework(
    name="trainer",
    title="transformers 5.23's Trainer",
    habits={**EAGER, "main_grads": False},
    sources=f"{EAGER_SOURCE}; reductions in bf16, as Accelerate's mixed precision has it",
    space=HUGGING_FACE,
    write=write,
    read=read,
)
