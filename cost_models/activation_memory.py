"""How many bytes does one layer keep for its backward pass, for one micro-batch and on one rank? Tensor by tensor.

Korthikanti et al. 2022, arXiv:2205.05198, section 4 and table 2, which these equal for a GPT in 16 bit with dropout:

    none s b h (34 + 5 a s/h)    tensor s b h (10 + 24/t + 5 a s/(h t))    tensor + sequence s b h/t (34 + 5 a s/h)
    selective recompute leaves 5 a s/h out; full keeps 2 s b h, the layer's input

and which they extend to gated MLPs, grouped-query attention, flash kernels and norms of torch operations.
"""

from autopar.cost_models.training_config import TrainingConfig, param_nbytes
from autopar.cost_models.transformer import TransformerShape


def layer_tensors(shape: TransformerShape, config: TrainingConfig) -> dict[str, float]:
    """Bytes of everything that a layer's backward reads, if nothing is recomputed."""
    e, rows, tp = param_nbytes(config), config.tokens, config.tp
    split = tp if config.sequence_parallel else 1
    hidden = rows * shape.hidden / split
    query, keys = rows * shape.query_dim / tp, rows * max(shape.kv_dim / tp, shape.head_dim)
    wide = rows * shape.ffn * shape.experts_per_token / tp
    # SwiGLU keeps gate, up and their product, and silu(gate) too unless one kernel computes it
    kept_wide = (3 if config.fusion == "all" else 4) if shape.gated else 2
    tensors = {
        "norm inputs": 2 * e * hidden,
        "product inputs": 2 * e * (hidden if config.regather_inputs else rows * shape.hidden),
        "dropout masks": 2 * hidden if shape.dropout else 0.0,
        "queries, keys, values": e * (query + 2 * keys),
        "attention output": e * query,
        "mlp": kept_wide * e * wide,
    }
    if shape.norm_vectors == 1 and config.fusion == "none":
        tensors["norms in float32"] = 2 * (4 + 4) * hidden
    return tensors | attention_tensors(shape, config)


def attention_tensors(shape: TransformerShape, config: TrainingConfig) -> dict[str, float]:
    """What selective recompute drops: scores in memory; of a flash kernel only a float32 a row and head."""
    e, heads = param_nbytes(config), shape.heads / config.tp
    if config.attention.startswith("flash"):
        return {"row sums": 4 * config.tokens * heads}
    scores = config.tokens * config.seq * heads
    # an unfused softmax keeps its float32 result beside the 16-bit one
    softmax = e if config.attention == "fused" else e + 4
    dropout = 1 + e if shape.dropout else 0
    return {"softmax": softmax * scores, "attention dropout": float(dropout * scores)}


def layer_nbytes(shape: TransformerShape, config: TrainingConfig) -> float:
    """Bytes that a layer keeps under the configuration's recompute."""
    whole = sum(layer_tensors(shape, config).values())
    split = config.tp if config.sequence_parallel else 1
    layer_input = param_nbytes(config) * config.tokens * shape.hidden / split
    if config.recompute == "full":
        return layer_input
    if config.recompute == "alternate":
        return (layer_input + whole) / 2
    if config.recompute == "op":
        return layer_input + _kept_by_op(shape, config)
    if config.recompute == "selective":
        core = {} if config.attention.startswith("flash") else attention_tensors(shape, config)
        return whole - sum(core.values())
    return whole


def _kept_by_op(shape: TransformerShape, config: TrainingConfig) -> float:
    """Results of every second matrix product and of attention (torchtitan's per-op policy)."""
    gate = 2 if shape.gated else 1
    per_token = (shape.query_dim + 2 * shape.kv_dim + gate * shape.ffn) / config.tp
    split = config.tp if config.sequence_parallel else 1
    products = config.tokens * (per_token + 2 * shape.hidden / split) / 2
    return param_nbytes(config) * (products + config.tokens * shape.query_dim / config.tp)
