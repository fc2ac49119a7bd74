"""Plain torch: `fully_shard`, `parallelize_module` and `checkpoint` around an unmodified model (FSDP2)."""

from dataclasses import replace

from autopar.advice.framework import ConfigFile, Framework, Sharding, Site
from autopar.advice.frameworks.fsdp2 import EAGER, EAGER_SOURCE, HUGGING_FACE
from autopar.cost_models.training_config import TrainingConfig

HEAD = """import torch
from torch.distributed.device_mesh import init_device_mesh
"""
EACH = "for layer in itertools.chain(*lists):"
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
TENSOR = """
# Column and row parallel products of a Llama-like model's layers.
plan = {
    **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
"""


def write(site: Site, config: TrainingConfig, sharding: Sharding) -> tuple[ConfigFile, ...]:
    """A function that distributes a model, whose layers are where the site says, and the loop's sizes."""
    dims = [
        ("replicate", config.replicate if config.zero else config.dp),
        ("shard", config.dp // config.replicate if config.zero else 1),
        ("tensor", config.tp),
    ]
    used = [(name, size) for name, size in dims if size > 1] or [("shard", 1)]
    sizes, names = tuple(size for _, size in used), tuple(name for name, _ in used)
    walked = bool(site.layer_paths) and (config.zero > 0 or config.tp > 1)
    lines = ["import itertools\n\n"] * walked + [HEAD]
    if config.zero:
        imported = ["CPUOffloadPolicy"] * (config.offload == "all") + ["MixedPrecisionPolicy"] * (
            config.precision in DTYPES
        )
        lines.append(f"from torch.distributed.fsdp import {', '.join([*imported, 'fully_shard'])}\n")
    else:
        lines.append("from torch.nn.parallel import DistributedDataParallel\n")
    if config.recompute == "full":
        lines.append("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n")
    if config.tp > 1:
        lines.append(
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
        )
        lines.append(TENSOR)
    lines.append(
        f"\nMICRO_BATCH = {config.micro_batch}  # samples of a rank's forward\n"
        f"ACCUMULATE = {config.num_microbatches}  # forwards a step; global batch {config.global_batch}\n\n\n"
        'def distribute(model: torch.nn.Module, device: str = "cuda") -> torch.nn.Module:\n'
        f"    mesh = init_device_mesh(device, {sizes}, mesh_dim_names={names})\n"
    )
    body: list[str] = []
    if walked or config.recompute == "full":
        body.append(f"lists = [model.get_submodule(path) for path in {site.layer_paths}]")
    if config.tp > 1:
        body += [EACH, '    parallelize_module(layer, mesh["tensor"], plan)']
    if config.recompute == "full":
        body += [
            "for layers in lists:",
            "    for index, layer in enumerate(layers):",
            "        layers[index] = checkpoint_wrapper(layer)",
        ]
    body += _sharded(site, config, names) if config.zero else _replicated(config)
    lines += [f"    {line}\n" for line in body]
    return (ConfigFile(name="distribute.py", text="".join(lines), language="python"),)


def _sharded(site: Site, config: TrainingConfig, names: tuple[str, ...]) -> list[str]:
    axes = tuple(name for name in names if name != "tensor")
    part = "mesh" if len(axes) == len(names) else f"mesh[{axes if len(axes) > 1 else repr(axes[0])}]"
    lines = [f'options = {{"mesh": {part}, "reshard_after_forward": {not config.keep_gathered}}}']
    if (dtype := DTYPES.get(config.precision)) is not None:
        policy = f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
        lines.append(f'options["mp_policy"] = {policy}')
    if config.offload == "all":
        lines.append('options["offload_policy"] = CPUOffloadPolicy()')
    if site.layer_paths:
        lines += [EACH, "    fully_shard(layer, **options)"]
    return [*lines, "return fully_shard(model, **options)"]


def _replicated(config: TrainingConfig) -> list[str]:
    dtype = DTYPES.get(config.precision)
    lines = [] if dtype is None else [f"# the loop runs the forward in torch.autocast(device, {dtype})"]
    if config.dp == 1:
        return [*lines, "return model.to(device)"]
    return [*lines, 'return DistributedDataParallel(model.to(device), device_mesh=mesh["replicate"])']


PLAIN = Framework(
    name="fsdp",
    title="torch's fully_shard and parallelize_module",
    habits=EAGER,
    sources=EAGER_SOURCE,
    space=replace(HUGGING_FACE, context=False),
    write=write,
    read=None,
)
