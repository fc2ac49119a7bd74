"""Lightning: `DDPStrategy`, `FSDPStrategy` and `ModelParallelStrategy` (FSDP2 with tensor parallel ranks).

Names are those of lightning 2.6.
"""

from autopar.advice.framework import ConfigFile, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE
from autopar.cost_models.training_config import TrainingConfig

STRATEGIES = {(3, False, False): "FULL_SHARD", (3, True, False): "SHARD_GRAD_OP", (3, False, True): "HYBRID_SHARD"}


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The strategy and the `Trainer`, and what a module's `configure_model` does for tensor parallel ranks."""
    precision = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}[config.precision]
    imports, note = ["import lightning as L"], ""
    if config.zero == 0:
        imports.append("from lightning.pytorch.strategies import DDPStrategy")
        strategy = "DDPStrategy()"
        if config.recompute == "full":
            note = "# the module calls self.model.gradient_checkpointing_enable()\n"
    elif config.tp > 1:
        imports.append("from lightning.pytorch.strategies import ModelParallelStrategy")
        strategy = f"ModelParallelStrategy(data_parallel_size={config.dp}, tensor_parallel_size={config.tp})"
        note = "# the module's configure_model() distributes its layers: `autopar advise --for fsdp` writes that\n"
        precision = precision.replace("mixed", "true")
    else:
        imports.append("from lightning.pytorch.strategies import FSDPStrategy")
        kind = STRATEGIES[config.zero, config.keep_gathered, config.replicate > 1]
        mesh = f", device_mesh=({config.replicate}, {config.dp // config.replicate})" if config.replicate > 1 else ""
        layers = ", activation_checkpointing_policy=LAYERS" if config.recompute == "full" else ""
        strategy = f'FSDPStrategy(auto_wrap_policy=LAYERS, sharding_strategy="{kind}"{mesh}{layers})'
        note = f"LAYERS = {{{site.layer_class or 'DecoderLayer'}}}  # the class of the model's layers, imported\n"
    lines = [
        *imports,
        "",
        f"{note}BATCH_SIZE = {config.micro_batch}  # of the data loader, a process; global batch {config.global_batch}",
        "trainer = L.Trainer(",
        f"    strategy={strategy},",
        f'    precision="{precision}",',
        f"    devices={site.devices_per_node},",
        f"    num_nodes={site.nodes},",
        f"    accumulate_grad_batches={config.num_microbatches},",
        ")",
    ]
    code = "\n".join(lines) + "\n"
    return (ConfigFile(name="trainer.py", text=code, language="python"),)


LIGHTNING = Framework(
    name="lightning",
    title="Lightning 2.6",
    habits=EAGER,
    sources=EAGER_SOURCE,
    space=FrameworkSpace(
        shardings=(
            Sharding(name="FSDP", zero=3),
            Sharding(name="FSDP, SHARD_GRAD_OP", zero=3, keep_gathered=True, alone=True),
            Sharding(name="FSDP, HYBRID_SHARD", zero=3, hybrid=True, alone=True),
            DDP,
        ),
        recompute=("none", "full"),
        tensor_needs_llama=True,
    ),
    write=write,
    read=None,
)
