"""The models that race: GPT-2-, Llama-, BERT- and ViT-like, of two blocks, hidden 128, fp32, eight samples a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.llama import LlamaSize, make_llama

HIDDEN, HEADS, LAYERS, WORDS, BATCH, SEQ = 128, 8, 2, 512, 8, 32
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, vocab_size=WORDS, n_positions=SEQ, **drops)
    return hf.GPT2LMHeadModel(config), {**_text(), "use_cache": False}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return make_llama(LlamaSize(hidden=HIDDEN, layers=LAYERS, heads=HEADS, vocabulary=WORDS, batch=BATCH, seq=SEQ))


def bert() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **drops, vocab_size=WORDS, max_position_embeddings=SEQ)), _text()


def vit() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = hf.ViTConfig(**SHAPE, **drops, image_size=32, patch_size=4, num_labels=8)  # type: ignore[call-arg]
    return hf.ViTForImageClassification(config), {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(8, (BATCH,)),
    }


def wide() -> tuple[nn.Module, dict[str, Any]]:
    """Of `benchmarks.weaving`: as much to compute as to send over some hundred Mbit/s."""
    return make_llama(LlamaSize(hidden=2 * HIDDEN, layers=LAYERS, heads=HEADS, vocabulary=WORDS, batch=16, seq=64))


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model in training mode with seeded weights, and the keywords of a call with the global batch."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # it remarks on words and losses that these small models do without
    torch.manual_seed(0)
    model, batch = {**MODELS, "wide": wide}[name]()
    return model.train(), batch


def _text() -> dict[str, Any]:
    ids = torch.randint(WORDS, (BATCH, SEQ))
    return {"input_ids": ids, "labels": ids.clone()}
