"""What Hugging Face, Lightning and plain torch share: an eager model under FSDP2, HSDP or DDP."""

from autopar.advice.framework import FrameworkSpace, Sharding, Site

FSDP = Sharding(name="FSDP", zero=3)
KEPT = Sharding(name="FSDP, not resharded after forward", zero=3, keep_gathered=True)
HYBRID = Sharding(name="HSDP", zero=3, hybrid=True)
DDP = Sharding(name="DDP", zero=0, alone=True)

# Eager modules: norms, rotary embedding and SwiGLU are several kernels each, queries, keys and values three products,
# the loss keeps float32 logits. FSDP2 and autocast keep float32 masters; gradients are summed in float32 by DDP.
EAGER = {
    "overlap_data": True,
    "fusion": "none",
    "in_place_loss": False,
    "fused_products": False,
    "regather_inputs": False,
}
EAGER_SOURCE = "the modules of transformers and torch, read kernel by kernel; compared with no published run"

HUGGING_FACE = FrameworkSpace(
    shardings=(FSDP, KEPT, HYBRID, DDP),
    recompute=("none", "full"),
    offload=("none", "all"),
    context=True,
    tensor_needs_llama=True,
)
"""Of Accelerate and of the Trainer above it."""

SWITCH = "model.gradient_checkpointing_enable()\n"
"""How a model of transformers is told to recompute."""

SDPA = '# context parallel ranks need a model with attn_implementation="sdpa"\n'
"""Context parallel ranks of torch exchange keys inside scaled_dot_product_attention."""

POLICIES = {
    "true": FSDP, "full_shard": FSDP, "1": FSDP,
    "false": KEPT, "shard_grad_op": KEPT, "2": KEPT,
    "no_shard": DDP, "3": DDP,
    "hybrid_shard": HYBRID, "4": HYBRID,
}  # fmt: skip
"""By FSDP2's `reshard_after_forward` and by FSDP1's strategies, their names or numbers. FSDP1 is priced as FSDP2."""


def policy_fields(sharding: Sharding, site: Site) -> dict[str, object]:
    """Fields of `TrainingConfig`; FSDP1's hybrid groups are nodes."""
    return {
        "zero": sharding.zero,
        "keep_gathered": sharding.keep_gathered,
        "replicate": site.nodes if sharding.hybrid else 1,
    }
