"""Tiny models of the eight families, with real seeded tensors, and inputs whose labels are ignored unevenly."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

FAMILIES = ("gpt2", "llama", "mixtral", "bert", "vit", "resnet", "t5", "whisper")
SPLIT_FAMILIES = tuple("frozen_resnet" if family == "resnet" else family for family in FAMILIES)
"""Those that run in micro-batches: statistics of a batch norm in training are of the whole batch, so here they are
given."""


def zoo(
    name: str,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    batch: int = 8,
    seq: int = 16,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Any]]:
    """The family's model in training mode and the keywords of one call, labels included.

    Hidden size 32, 2 layers, 4 heads (2 key/value heads where grouped). GPT-2 has 101 words and ViT 17 tokens, so that
    some dims do not divide; labels are ignored in a pattern that differs from sample to sample.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, kwargs = _BUILDERS[name](dropout, batch, seq)
    kwargs = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    model = model.to(dtype).train()
    if name == "frozen_resnet":
        for module in model.modules():
            module.train(not isinstance(module, nn.BatchNorm2d))
    return model, kwargs


def _labels(batch: int, seq: int, vocabulary: int) -> Tensor:
    labels = torch.randint(3, vocabulary, (batch, seq))
    for sample in range(batch):
        labels[sample, seq - (sample * 3) % seq :] = -100
    return labels


def _text(batch: int, seq: int, vocabulary: int) -> dict[str, Any]:
    ids = torch.randint(3, vocabulary, (batch, seq))
    return {"input_ids": ids, "labels": _labels(batch, seq, vocabulary), "use_cache": False}


def _gpt2(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=101, n_positions=max(32, seq), **drops)
    return hf.GPT2LMHeadModel(config), _text(batch, seq, 101)


def _llama(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attention_dropout=dropout,
    )
    return hf.LlamaForCausalLM(config), _text(batch, seq, 96)


def _mixtral(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_local_experts=4,
        attention_dropout=dropout,
    )
    return hf.MixtralForCausalLM(config), _text(batch, seq, 96)


def _bert(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        max_position_embeddings=max(64, seq),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    kwargs = _text(batch, seq, 96)
    del kwargs["use_cache"]
    return hf.BertForMaskedLM(config), kwargs


def _vit(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ViTConfig(  # type: ignore[call-arg]
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return hf.ViTForImageClassification(config), _images(batch)


def _resnet(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=8)  # type: ignore[call-arg]
    return hf.ResNetForImageClassification(config), _images(batch)


def _images(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 8, (batch,))}


def _t5(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.T5Config(  # type: ignore[call-arg]
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=96,
        decoder_start_token_id=0,
        dropout_rate=dropout,
    )
    kwargs = _text(batch, seq, 96)
    kwargs["labels"] = kwargs["labels"][:, : max(4, seq * 3 // 4)].contiguous()
    return hf.T5ForConditionalGeneration(config), kwargs


def _whisper(dropout: float, batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=96,
        num_mel_bins=8,
        max_source_positions=seq,
        max_target_positions=seq,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )
    length = max(4, seq * 3 // 4)
    kwargs = {
        "input_features": torch.randn(batch, 8, 2 * seq),
        "labels": _labels(batch, length, 96),
        "use_cache": False,
    }
    return hf.WhisperForConditionalGeneration(config), kwargs


_BUILDERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
    "frozen_resnet": _resnet,
    "t5": _t5,
    "whisper": _whisper,
}
