"""DeepSpeed: ZeRO 1 to 3 over data-parallel ranks, tensor parallel ranks (AutoTP), activation checkpointing.

Keys are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py).
"""

import json

from autopar.advice.config_file import Keys
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import EAGER, EAGER_SOURCE, SWITCH
from autopar.cost_models.training_config import TrainingConfig
from autopar.errors import BatchError

OPTIMIZERS: dict[str, int | None] = {"Adam": 2, "AdamW": 2, "FusedAdam": 2, "CPUAdam": 2, "DeepSpeedCPUAdam": 2}
"""Floats a parameter that an optimizer keeps."""
HOST = {"none": False, "cpu": True}


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The JSON file; what is recomputed is the model's switch."""
    zero: dict[str, object] = {
        "stage": config.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    table: dict[str, object] = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.num_microbatches,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    for part, kinds in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        if config.offload in kinds:
            zero[part] = {"device": "cpu", "pin_memory": True}
    if config.precision in ("bf16", "fp16"):
        table[config.precision] = {"enabled": True}
    if config.tp > 1:
        table["tensor_parallel"] = {"autotp_size": config.tp}
    found = [ConfigFile(name="ds_config.json", text=json.dumps(table, indent=2) + "\n", language="json")]
    if config.recompute == "full":
        found.append(ConfigFile(name="script.py", text=SWITCH, language="python"))
    return tuple(found)


def read(keys: Keys, site: Site) -> Fields:
    """ZeRO's stage, what the host holds, batch, tensor parallel ranks and precision of a JSON file."""
    tp = keys.whole("tensor_parallel.autotp_size") or 1
    dp = site.data_ranks(tp)
    size = keys.whole("train_micro_batch_size_per_gpu")
    parts = keys.whole("gradient_accumulation_steps")
    batch = keys.whole("train_batch_size")
    # any two of the three give the third (runtime/config.py, _set_batch_related_parameters)
    if size is None:
        size = max(batch // (dp * (parts or 1)), 1) if batch else 1
    if batch is None:
        batch = size * dp * (parts or 1)
    if parts is not None and batch != size * dp * parts:
        raise BatchError(
            f"{keys.name}: train_batch_size is {batch}, but {dp} data-parallel ranks with {parts} micro-batches "
            f"of {size} make {dp * parts * size}"
        )
    states, params = (
        keys.choice(f"zero_optimization.offload_{part}.device", HOST, False) for part in ("optimizer", "param")
    )
    kept = keys.choice("optimizer.type", OPTIMIZERS, None)
    return {
        "offload": "all" if params else "optimizer" if states else "none",
        "tp": tp,
        "dp": dp,
        "zero": keys.whole("zero_optimization.stage", 0) or 0,
        "micro_batch": size,
        "global_batch": batch,
        "precision": keys.precision("bf16.enabled", "fp16.enabled"),
    } | ({} if kept is None else {"optimizer_states": kept})


DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed 0.19",
    habits={**EAGER, "main_grads": False},
    sources=f"{EAGER_SOURCE}; gradients in the model's 16 bits (runtime/engine.py, communication_data_type)",
    space=FrameworkSpace(
        shardings=tuple(Sharding(name=f"ZeRO-{level}", zero=level) for level in (1, 2, 3, 0)),
        recompute=("none", "full"),
        offload=("none", "optimizer", "all"),
    ),
    write=write,
    read=read,
)
