"""A model is named in three ways; what is named wrongly is told how to name it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.errors import ArgumentError, ModelSpecError
from autopar.models import load_model

LLAMA_8B = Path(__file__).parents[1] / "examples" / "llama3_8b"

SOURCE = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(4, width)
    def forward(self, x, y=None):
        return self.linear(x).square().mean()

def keywords(batch=2, width=3):
    return Tiny(width), {"x": torch.randn(batch, 4)}

def positions():
    return Tiny(3), (torch.randn(2, 4),)

def nothing():
    return 7

def reads():
    return Tiny(int(torch.ones(3).sum().item())), {}

def needs(width):
    return Tiny(width), {}
"""

TINY = {
    "llama": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96),
    "gpt2": dict(n_embd=32, n_layer=1, n_head=4, vocab_size=101, n_positions=64, bos_token_id=0, eos_token_id=0),
    "bert": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96
    ),
    "vit": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    ),
    "resnet": dict(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=4),
    "t5": dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=96, decoder_start_token_id=0),
    "whisper": dict(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=96, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "tiny_model_file.py"
    file.write_text(SOURCE)
    return str(file)


def config(tmp_path: Path, kind: str, **more: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **TINY[kind], **more}))
    return file


def test_a_function_in_a_file(source: str) -> None:
    loaded = load_model(f"{source}:keywords", batch=6, overrides={"width": "5"}, precision="bf16")
    assert loaded.name == "Tiny"
    assert loaded.kwargs["x"].shape == (6, 4) and loaded.kwargs["x"].is_meta
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16} == {loaded.kwargs["x"].dtype}
    assert capture(loaded.model, loaded.args, loaded.kwargs).parameters[0].shape == (5, 4)
    positional = load_model(f"{source}:positions", device="cpu")
    assert len(positional.args) == 1 and not positional.kwargs
    assert positional.args[0].device.type == "cpu"


def test_a_function_in_a_module(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(source).parent))
    assert load_model("tiny_model_file:keywords").kwargs["x"].shape == (2, 4)


@pytest.mark.parametrize("kind", TINY)
def test_a_config_of_each_family(kind: str, tmp_path: Path) -> None:
    loaded = load_model(f"hf:{config(tmp_path, kind)}", batch=2, device="cpu")
    again = load_model(f"hf:{tmp_path}", batch=2, device="cpu")
    tensors = {k: v for k, v in loaded.kwargs.items() if isinstance(v, Tensor)}
    assert all(len(v) == 2 and torch.equal(v, again.kwargs[k]) for k, v in tensors.items())
    loss = loaded.model(**loaded.kwargs).loss
    assert torch.isfinite(loss) and loaded.model.training
    for mine, other in zip(loaded.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_config_overrides_are_typed_and_derived_values_follow(tmp_path: Path) -> None:
    spec = f"hf:{config(tmp_path, 'llama', architectures=['LlamaForCausalLM'])}"
    overrides = {"hidden_size": "64", "attention_dropout": "0", "tie_word_embeddings": "true", "hidden_act": "gelu"}
    loaded = load_model(spec, batch=3, seq=7, overrides=overrides, precision="fp64")
    settings = loaded.model.config
    assert (settings.hidden_size, settings.head_dim, settings.hidden_act) == (64, 16, "gelu")
    assert settings.attention_dropout == 0.0 and isinstance(settings.attention_dropout, float)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.kwargs["input_ids"].shape == (3, 7) and loaded.kwargs["use_cache"] is False
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float64}


def test_llama_3_8b_needs_no_memory() -> None:
    loaded = load_model(f"hf:{LLAMA_8B}", batch=64, seq=8192, precision="bf16")
    assert sum(p.numel() for p in loaded.model.parameters()) == 8_030_261_248
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in loaded.model.parameters())
    shortened = load_model(f"hf:{LLAMA_8B}", batch=64, seq=8192, precision="bf16", overrides={"num_hidden_layers": "1"})
    captured = capture(shortened.model, shortened.args, shortened.kwargs)
    assert sum(value.nbytes for value in captured.constants.values()) < 2**20
    [attention] = [n for n in captured.graph.nodes if "scaled_dot_product" in n.name]
    assert attention.kwargs["is_causal"] and attention.kwargs["enable_gqa"] and attention.args[3] is None


SPEC_ERRORS = {
    "llama": "no colon",
    "llama-3-8b": "no colon.*autopar simulate and advise know that name",
    "no_such_file.py:build": "no file no_such_file.py",
    "no_such_module:build": "No module named",
    "FILE:keyword": "did you mean keywords",
    "FILE:nothing": "returned int",
    "FILE:reads": r"tiny_model_file.py:\d+.*without reading values",
    "hf:nowhere/config.json": "there is no nowhere/config.json",
}


@pytest.mark.parametrize("spec", SPEC_ERRORS)
def test_specs_that_name_nothing(spec: str, source: str) -> None:
    with pytest.raises(ModelSpecError, match=SPEC_ERRORS[spec]):
        load_model(spec.replace("FILE", source))


def test_configs_that_name_nothing(tmp_path: Path) -> None:
    file = config(tmp_path, "llama", architectures=["LlamaForCausalLm"])
    with pytest.raises(ModelSpecError, match="no model 'LlamaForCausalLm'"):
        load_model(f"hf:{file}")
    file = config(tmp_path, "llama", architectures=["LlamaModel"])
    with pytest.raises(ModelSpecError, match="takes no labels"):
        load_model(f"hf:{file}")
    file.write_text('{"model_type": "lama"}')
    with pytest.raises(ModelSpecError, match=r"did you mean .*llama"):
        load_model(f"hf:{file}")
    file.write_text("{")
    with pytest.raises(ModelSpecError, match="no JSON"):
        load_model(f"hf:{file}")
    with pytest.raises(ModelSpecError, match=f"; did you mean {file.name}"):
        load_model(f"hf:{file.with_name('confg.json')}")
    (tmp_path / "net.py").write_text("")
    with pytest.raises(ModelSpecError, match=r"there is no file .*nte\.py; .*; did you mean net\.py"):
        load_model(f"{tmp_path / 'nte.py'}:build")


def test_arguments_that_do_not_fit(tmp_path: Path, source: str) -> None:
    spec = f"hf:{config(tmp_path, 'gpt2')}"
    with pytest.raises(ArgumentError, match="did you mean n_layer"):
        load_model(spec, overrides={"n_layers": "3"})
    with pytest.raises(ArgumentError, match="give a int"):
        load_model(spec, overrides={"n_layer": "many"})
    with pytest.raises(ArgumentError, match="exceeds the model's max_position_embeddings 64"):
        load_model(spec, seq=65)
    with pytest.raises(ArgumentError, match="choose one of fp32, bf16, fp64"):
        load_model(spec, precision="fp8")
    with pytest.raises(ArgumentError, match="not a positive"):
        load_model(spec, batch=0)
    with pytest.raises(ArgumentError, match="has no sequence length"):
        load_model(f"hf:{config(tmp_path, 'vit')}", seq=3)
    with pytest.raises(ArgumentError, match="did you mean width"):
        load_model(f"{source}:keywords", overrides={"widht": "3"})
    with pytest.raises(ArgumentError, match="takes no 'seq'"):
        load_model(f"{source}:keywords", seq=3)
    with pytest.raises(ArgumentError, match="needs width"):
        load_model(f"{source}:needs")
