"""Plain torch: `fully_shard`, `parallelize_module` and `checkpoint` around an unmodified model (FSDP2)."""

from autopar.advice.config_file import flat_keys
from autopar.advice.framework import ConfigFile, Fields, Framework, FrameworkSpace, Sharding, Site
from autopar.advice.frameworks.fsdp2 import DDP, EAGER, EAGER_SOURCE, FSDP, HYBRID, KEPT
from autopar.advice.words import read_words
from autopar.cost_models.training_config import TrainingConfig

HEAD = """import torch
from torch.distributed.device_mesh import init_device_mesh
"""
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
    """A function that distributes a model whose layers are `model.layers`, and the loop's sizes."""
    dims = [
        ("replicate", config.replicate if config.zero else config.dp),
        ("shard", config.dp // config.replicate if config.zero else 1),
    ]
    dims.append(("tensor", config.tp))
    used = [(name, size) for name, size in dims if size > 1] or [("shard", 1)]
    lines = [HEAD]
    if config.zero:
        policy = "CPUOffloadPolicy, " if config.offload == "all" else ""
        lines.append(f"from torch.distributed.fsdp import {policy}MixedPrecisionPolicy, fully_shard\n")
    else:
        lines.append("from torch.nn.parallel import DistributedDataParallel\n")
    if config.recompute == "full":
        lines.append("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n")
    if config.tp > 1:
        lines.append(
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
        )
        lines.append(TENSOR)
    sizes, names = tuple(size for _, size in used), tuple(name for name, _ in used)
    lines.append(
        f"\nMICRO_BATCH = {config.micro_batch}  # samples of a rank's forward\n"
        f"ACCUMULATE = {config.num_microbatches}  # forwards a step; global batch {config.global_batch}\n\n\n"
        'def distribute(model: torch.nn.Module, device: str = "cuda") -> torch.nn.Module:\n'
        f"    mesh = init_device_mesh(device, {sizes}, mesh_dim_names={names})\n"
    )
    body: list[str] = []
    if config.tp > 1:
        body += ["for layer in model.model.layers:", '    parallelize_module(layer, mesh["tensor"], plan)']
    if config.recompute == "full":
        body += [
            "for index, layer in enumerate(model.model.layers):",
            "    model.model.layers[index] = checkpoint_wrapper(layer)",
        ]
    if config.zero:
        axes = tuple(name for name in names if name != "tensor")
        part = "mesh" if len(axes) == len(names) else f"mesh[{axes if len(axes) > 1 else repr(axes[0])}]"
        body += [
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            f'options = {{"mesh": {part}, "mp_policy": policy, "reshard_after_forward": {not config.keep_gathered}}}',
            *(['options["offload_policy"] = CPUOffloadPolicy()'] if config.offload == "all" else []),
            "for layer in model.model.layers:",
            "    fully_shard(layer, **options)",
            "return fully_shard(model, **options)",
        ]
    else:
        body += (
            ['return DistributedDataParallel(model.to(device), device_mesh=mesh["replicate"])']
            if config.dp > 1
            else ["return model.to(device)"]
        )
    lines += [f"    {line}\n" for line in body]
    return (ConfigFile(name="distribute.py", text="".join(lines), language="python"),)


def read(text: str, name: str, site: Site) -> Fields:
    """Words: `tp=2, zero=3, micro_batch=1`; Python is not run."""
    return read_words(flat_keys(text, name), name, site)


PLAIN = Framework(
    name="fsdp",
    title="torch's fully_shard and parallelize_module",
    habits=EAGER,
    sources=EAGER_SOURCE,
    space=FrameworkSpace(shardings=(FSDP, KEPT, HYBRID, DDP), recompute=("none", "full"), offload=("none", "all")),
    write=write,
    read=read,
)
