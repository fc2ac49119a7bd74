"""DeepSpeed: ZeRO 1 to 3 over data-parallel ranks, tensor parallel ranks (AutoTP), activation checkpointing.

Keys are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py).
"""

import json

from autopar.advice.config_file import flat_keys, whole
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import EAGER, EAGER_SOURCE
from autopar.cost_models.training_config import TrainingConfig


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
        text = "model.gradient_checkpointing_enable()\n"
        found.append(ConfigFile(name="in the script", text=text, language="python"))
    return tuple(found)


def read(text: str, name: str, site: Site) -> Fields:
    """ZeRO's stage, batch and tensor parallel ranks of a JSON file."""
    keys = flat_keys(text, name)
    tp = whole(keys, "tensor_parallel.autotp_size", name) or 1
    dp = site.cluster.num_devices // max(tp, 1)
    size = whole(keys, "train_micro_batch_size_per_gpu", name)
    parts = whole(keys, "gradient_accumulation_steps", name)
    batch = whole(keys, "train_batch_size", name)
    # any two of the three give the third (runtime/config.py, _set_batch_related_parameters)
    if size is None:
        size = batch // dp // (parts or 1) if batch else 1
    if batch is None:
        batch = size * dp * (parts or 1)
    devices = [keys.get(f"zero_optimization.{part}.device") for part in ("offload_param", "offload_optimizer")]
    return {
        "offload": "all" if devices[0] == "cpu" else "optimizer" if devices[1] == "cpu" else "none",
        "tp": tp,
        "dp": dp,
        "zero": whole(keys, "zero_optimization.stage", name) or 0,
        "micro_batch": size,
        "global_batch": batch,
    }


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
