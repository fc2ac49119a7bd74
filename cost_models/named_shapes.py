"""Which well-known transformers can be named without a file? Sizes as their papers or configs print them."""

from dataclasses import replace

from autopar.cost_models.transformer import TransformerShape
from autopar.errors import ArgumentError
from autopar.values.choices import near


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> TransformerShape:
    return TransformerShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden,
        vocab=vocab, positions=positions, linear_bias=True, qkv_bias=True, norm_vectors=2, dropout=True, tied=True,
    )  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> TransformerShape:
    return TransformerShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn, vocab=vocab,
        gated=True,
    )  # fmt: skip


# GPT: Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 3; GPT-2's config.json. Llama: their config.json.
_SHAPES = {
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt-1.7b": _gpt(24, 2304, 24),
    "gpt-3.6b": _gpt(30, 3072, 32),
    "gpt-7.5b": _gpt(36, 4096, 32),
    "gpt-18b": _gpt(40, 6144, 48),
    "gpt-22b": _gpt(48, 6144, 64),
    "gpt-39b": _gpt(48, 8192, 64),
    "gpt-76b": _gpt(60, 10240, 80),
    "gpt-175b": _gpt(96, 12288, 96),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256),
}
NAMES = tuple(_SHAPES)


def named_shape(name: str) -> TransformerShape:
    """The shape of that name.

    Raises:
        ArgumentError: if there is none.
    """
    if name not in _SHAPES:
        raise ArgumentError(f"model {name!r} is not one of {', '.join(NAMES)}, nor hf:config.json{near(name, NAMES)}")
    return replace(_SHAPES[name], name=name)
