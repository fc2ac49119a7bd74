"""Lightning: `DDPStrategy`, `FSDPStrategy` and `ModelParallelStrategy` (FSDP2 with tensor parallel ranks).

Names are those of lightning 2.6.
"""

from autopar.advice.config_file import flat_keys
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE
from autopar.advice.words import read_words
from autopar.cost_models.training_config import TrainingConfig

STRATEGIES = {(3, False, False): "FULL_SHARD", (3, True, False): "SHARD_GRAD_OP", (3, False, True): "HYBRID_SHARD"}


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """The strategy and the `Trainer`, and what a module's `configure_model` does for tensor parallel ranks."""
    precision = {"fp32": "32-true", "fp16": "16-mixed"}.get(config.precision, "bf16-mixed")
    imports, note = ["import lightning as L"], ""
    if config.zero == 0:
        imports.append("from lightning.pytorch.strategies import DDPStrategy")
        strategy = "DDPStrategy(static_graph=True)"
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
        note = "LAYERS = {DecoderLayer}  # the class of the model's layers\n"
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


def read(text: str, name: str, site: Site) -> Fields:
    """Words: `zero=3, mbs=1, recompute=full`; Python is not run."""
    return read_words(flat_keys(text, name), name, site)


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
    ),
    write=write,
    read=read,
)
