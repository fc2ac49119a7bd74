"""Which transformer? Its shape in eight numbers and a few switches, its parameters and its floating-point operations.

Parameters are counted as transformers' models hold them (a test compares). Model flops of one step, a multiply-add
counting two, forward once and backward twice:

    6 * tokens * (parameters in matrix products) + attention
    attention: 12 * layers * tokens * seq * heads * head_dim, halved if the causal mask is honoured

Korthikanti et al. 2022, arXiv:2205.05198, appendix A, has the first form; sources differ in the second, in counting the
input embedding, and in counting what is recomputed: `mfu` names the convention it uses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ArgumentError
from autopar.values.choices import near


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder-only transformer. `ffn` is the width of one expert's MLP where there are experts.

    `gated`: the MLP has gate, up and down products (SwiGLU) instead of two. `linear_bias`, `qkv_bias`: vectors added
    after the products. `norm_vectors`: 1 for RMSNorm, 2 for LayerNorm. `qk_norm`: heads are normalised. `positions`:
    rows of a learned position embedding.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    kv_heads: int
    head_dim: int
    name: str = "transformer"
    gated: bool = False
    tied: bool = False
    linear_bias: bool = False
    qkv_bias: bool = False
    norm_vectors: int = 1
    qk_norm: bool = False
    positions: int = 0
    dropout: bool = False
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocab", "ffn", "kv_heads", "head_dim", "experts"):
            if getattr(self, field) < 1:
                raise ArgumentError(f"{self.name}: {field} {getattr(self, field)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"{self.name}: {self.heads} heads are not a multiple of {self.kv_heads} key/value heads"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ArgumentError(f"{self.name}: {self.experts_per_token} experts a token of {self.experts} experts")

    @property
    def query_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def attention_params(shape: TransformerShape) -> int:
    """Parameters of one layer's attention, its norm included."""
    h, q, kv = shape.hidden, shape.query_dim, shape.kv_dim
    biases = (q + 2 * kv if shape.qkv_bias else 0) + (h if shape.linear_bias else 0)
    qk_norm = 2 * shape.head_dim if shape.qk_norm else 0
    return h * (q + 2 * kv) + q * h + biases + qk_norm + shape.norm_vectors * h


def layer_parameters(shape: TransformerShape, tp: int, ep: int = 1) -> list[tuple[int, bool]]:
    """Parameter tensors of one layer on one rank of `tp` and `ep`: (elements, is a norm's)."""
    h, query, keys, wide = shape.hidden, shape.query_dim // tp, max(shape.kv_dim // tp, shape.head_dim), shape.ffn // tp
    inputs = [query, keys, keys]
    attention = [h * n for n in inputs] + (inputs if shape.qkv_bias else [])
    mlp = [h * wide] * (3 if shape.gated else 2)
    bias = [h] if shape.linear_bias else []
    router = [h * shape.experts] if shape.experts > 1 else []
    products = [*attention, h * query, *bias, *router]
    products += (mlp + ([wide] if bias else []) + bias) * (shape.experts // ep)
    norms = [h] * (2 * shape.norm_vectors) + ([shape.head_dim] * 2 if shape.qk_norm else [])
    return [(count, False) for count in products] + [(count, True) for count in norms]


def expert_params(shape: TransformerShape) -> int:
    """Parameters of one MLP: the only one, or one expert's."""
    products = 3 if shape.gated else 2
    return products * shape.hidden * shape.ffn + (shape.ffn + shape.hidden if shape.linear_bias else 0)


def layer_params(shape: TransformerShape) -> int:
    """Parameters of one layer, all experts and the router among them."""
    router = shape.hidden * shape.experts if shape.experts > 1 else 0
    return attention_params(shape) + shape.experts * expert_params(shape) + router + shape.norm_vectors * shape.hidden


def embedding_params(shape: TransformerShape) -> int:
    """Parameters in front of the first layer."""
    return (shape.vocab + shape.positions) * shape.hidden


def num_params(shape: TransformerShape) -> int:
    """All parameters, a tied head counted once."""
    head = 0 if shape.tied else shape.vocab * shape.hidden
    return embedding_params(shape) + shape.layers * layer_params(shape) + shape.norm_vectors * shape.hidden + head


def product_params(shape: TransformerShape) -> int:
    """Parameters that a token is multiplied with: the head but not the input embedding, only the experts it visits."""
    h, q, kv = shape.hidden, shape.query_dim, shape.kv_dim
    mlp = (3 if shape.gated else 2) * h * shape.ffn * shape.experts_per_token
    router = h * shape.experts if shape.experts > 1 else 0
    return shape.layers * (h * (q + 2 * kv) + q * h + mlp + router) + shape.vocab * h


def model_flops(shape: TransformerShape, tokens: float, seq: int, *, causal: bool) -> float:
    """Flops of a step over `tokens` tokens in sequences of `seq`, nothing recomputed; `causal` halves attention."""
    attention = 12 * shape.layers * tokens * seq * shape.query_dim * (0.5 if causal else 1.0)
    return 6 * tokens * product_params(shape) + attention


def hardware_flops(shape: TransformerShape, tokens: float, seq: int) -> float:
    """Flops with every layer's forward run twice: 96 B s l h^2 (1 + s/6h + V/16lh) for a GPT.

    Narayanan et al. 2021, arXiv:2104.04473, equation 3: layers count four forwards, the head three, attention is whole.
    """
    layers = product_params(shape) - shape.vocab * shape.hidden + 2 * shape.layers * seq * shape.query_dim
    return tokens * (8 * layers + 6 * shape.vocab * shape.hidden)


def shape_from_config(config: Mapping[str, Any], name: str = "model") -> TransformerShape:
    """The shape that a transformers config.json describes.

    Raises:
        ArgumentError: if its `model_type` has no entry in `READERS`, or a size is missing.
    """
    kind = config.get("model_type")
    if kind not in READERS:
        known = sorted(READERS)
        raise ArgumentError(
            f"{name}: model_type {kind!r} has no shape here; known are {', '.join(known)}{near(str(kind), known)}"
        )
    names = {**_NAMES, **READERS[kind]["names"]}
    required = ("hidden", "layers", "heads", "vocab")
    missing = [names[key] for key in required if config.get(names[key]) is None]
    if missing:
        raise ArgumentError(f"{name}: the config of a {kind} has no {', '.join(missing)}")
    hidden, layers, heads, vocab = (int(config[names[key]]) for key in required)
    switches = dict(READERS[kind]["switches"])
    tied = bool(config.get("tie_word_embeddings", switches.pop("tied", False)))
    if kind == "llama" and config.get("attention_bias"):
        switches["qkv_bias"] = True
    return TransformerShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        tied=tied,
        ffn=int(config.get(names["ffn"]) or 4 * hidden),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        positions=int(config.get(names["positions"], 0)) if names["positions"] else 0,
        experts=int(config.get("num_local_experts") or 1),
        experts_per_token=int(config.get("num_experts_per_tok") or 1),
        **switches,
    )


_NAMES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "vocab": "vocab_size",
    "ffn": "intermediate_size", "positions": "",
}  # fmt: skip
_GPT2 = {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn": "n_inner", "positions": "n_positions"}
_LLAMA: dict[str, Any] = {"names": {}, "switches": {"gated": True}}
_GPT_SWITCHES = {"linear_bias": True, "qkv_bias": True, "norm_vectors": 2, "dropout": True}
# model_type -> the config's own names of sizes, and what such models are like
READERS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": {"names": {}, "switches": {"gated": True, "qkv_bias": True}},
    "qwen3": {"names": {}, "switches": {"gated": True, "qk_norm": True}},
    "gpt2": {"names": _GPT2, "switches": {**_GPT_SWITCHES, "tied": True}},
    "gpt_neox": {"names": {}, "switches": _GPT_SWITCHES},
}
