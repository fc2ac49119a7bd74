"""What Hugging Face, Lightning and plain torch share: an eager model under FSDP2, HSDP or DDP."""

from autopar.advice.framework import Sharding

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
EAGER_SOURCE = "the modules of transformers and torch, read kernel by kernel (cost_models/layer_work.py); not fitted"
