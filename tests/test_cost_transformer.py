"""Shapes: parameters as transformers' models hold them, flops as the papers' formulas have them."""

import random
from typing import Any

import pytest
import torch

from autopar.cost_models.named_shapes import NAMES, named_shape
from autopar.cost_models.transformer import (
    TransformerShape,
    hardware_flops,
    model_flops,
    num_params,
    product_params,
    shape_from_config,
)
from autopar.errors import ArgumentError

transformers = pytest.importorskip("transformers")

COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 160}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "intermediate_size": 176, **COMMON},
    {"model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, **COMMON},
    {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True, **COMMON},
    {"model_type": "mistral", "intermediate_size": 112, "num_key_value_heads": 4, **COMMON},
    {"model_type": "mixtral", "intermediate_size": 80, "num_local_experts": 6, "num_experts_per_tok": 2, **COMMON},
    {"model_type": "qwen2", "intermediate_size": 128, "num_key_value_heads": 2, **COMMON},
    {"model_type": "qwen3", "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 8, **COMMON},
    {"model_type": "gpt_neox", "intermediate_size": 256, **COMMON},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 160, "n_positions": 40},
]


@pytest.mark.parametrize("raw", CONFIGS, ids=lambda raw: raw["model_type"])
def test_parameters_are_those_of_the_model(raw: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[raw["model_type"]](**{k: v for k, v in raw.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters())
    # what the user's file leaves out is the config class's default, in both
    assert num_params(shape_from_config(config.to_dict())) == expected


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2", 0.124), ("gpt2-xl", 1.558), ("gpt-175b", 175), ("gpt-530b", 530), ("gpt-1t", 1008), ("llama-2-7b", 6.738),
     ("llama-2-13b", 13.016), ("llama-2-70b", 68.977), ("llama-3-8b", 8.030), ("llama-3-70b", 70.554),
     ("llama-3.1-405b", 405.85)],
)  # fmt: skip
def test_named_models_have_the_size_of_their_name(name: str, billions: float) -> None:
    assert num_params(named_shape(name)) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("seed", range(20))
def test_flops_are_the_papers_formulas(seed: int) -> None:
    """Narayanan et al. 2021, equation 3 (recomputed), and Korthikanti et al. 2022, appendix A (not)."""
    rng = random.Random(seed)
    heads, batch, s, layers, v = (
        rng.randint(1, 64),
        rng.randint(1, 9),
        rng.randint(1, 4096),
        rng.randint(1, 99),
        50000,
    )
    h = heads * rng.choice([64, 96, 128])
    shape = TransformerShape(
        layers=layers, hidden=h, heads=heads, kv_heads=heads, head_dim=h // heads, ffn=4 * h, vocab=v
    )
    hardware = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops(shape, batch * s, s) == pytest.approx(hardware)
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(shape, batch * s, s, causal=False) == pytest.approx(model)
    halved = model - 6 * batch * layers * s**2 * h
    assert model_flops(shape, batch * s, s, causal=True) == pytest.approx(halved)


def test_a_token_visits_only_its_experts() -> None:
    raw = CONFIGS[4]
    dense = {k: v for k, v in raw.items() if "experts" not in k}
    dense |= {"model_type": "mistral", "intermediate_size": 2 * raw["intermediate_size"]}
    router = 3 * 64 * 6
    assert product_params(shape_from_config(raw)) == product_params(shape_from_config(dense)) + router


def test_what_no_shape_is_known_for_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model_type 'mamba' has no shape here; known are gpt2"):
        shape_from_config({"model_type": "mamba"})
    with pytest.raises(ArgumentError, match="has no hidden_size, vocab_size"):
        shape_from_config({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2})
    with pytest.raises(ArgumentError, match=r"'llama3-8b' is not one of gpt2.*; did you mean llama-3-8b"):
        named_shape("llama3-8b")
    with pytest.raises(ArgumentError, match="6 heads are not a multiple of 4 key/value heads"):
        TransformerShape(layers=1, hidden=6, heads=6, kv_heads=4, head_dim=1, ffn=1, vocab=1)


def test_every_name_has_a_shape() -> None:
    assert all(named_shape(name).name == name for name in NAMES)
