"""Every class of transformers' causal language models, and others, at a tiny size: hidden 32, two layers, 96 words."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.foreign_check import Foreign

BATCH, SEQ, WORDS, PIXELS = 4, 16, 96, 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "ff_expansion_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8, "d_kv": 8, "state_size": 8, "vocab_size": WORDS},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_topk": 2},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_k": 2, "top_k": 2},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sliding_window": 8},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_num_heads": 8, "mamba_head_dim": 8},
    **{"ssm_state_size": 8, "n_groups": 2, "mamba_n_groups": 2, "chunk_size": 8, "mamba_chunk_size": 8},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"image_size": PIXELS, "patch_size": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    **{"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS, "lru_width": 32},
}
LATENT = (
    "AXK1", "AXK2", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "LongcatFlash", "MiniCPM3",
    "YoutuV", "KimiLinear",
)  # fmt: skip
"""Families whose keys come from one latent vector: as many heads for keys as for queries."""
OWN: dict[str, dict[str, Any]] = {
    "GptOssConfig": {"layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    **{f"{name}Config": {"num_key_value_heads": 4} for name in LATENT},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    **{
        f"{name}Config": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
        for name in ("ConvNext", "ConvNextV2")
    },
    "BigBirdConfig": {"attention_type": "original_full"},
    "RegNetConfig": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 8},
}
OTHERS = {
    "ForMaskedLM": "Albert BigBird ConvBert Deberta DebertaV2 DistilBert Electra Esm FNet ModernBert MPNet "
    "Nystromformer RoFormer Roberta",
    "ForConditionalGeneration": "Bart MBart Pegasus UMT5",
    "ForImageClassification": "Beit ConvNext ConvNextV2 DeiT Dinov2 RegNet",
}
"""Families by the class that is trained, which is no causal language model."""


def models() -> dict[str, Callable[[], Foreign]]:
    """By class name."""
    hf.logging.set_verbosity_error()
    found = {}
    for config, classes in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for kind in classes if isinstance(classes, tuple) else (classes,):
            found[kind.__name__] = partial(_make, kind, config)
    for head, families in OTHERS.items():
        for name in families.split():
            found[name + head] = partial(_make, getattr(hf, name + head), getattr(hf, f"{name}Config"))
    return dict(sorted(found.items()))


def _make(kind: Any, config: Any) -> Foreign:
    model = kind(tiny(config))
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def images() -> dict[str, Any]:
        return {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS), "labels": torch.randint(2, (BATCH,))}

    def inputs() -> dict[str, Any]:
        ids = torch.randint(3, WORDS, (BATCH, SEQ))
        labels = ids.clone()
        for sample in range(BATCH):
            labels[sample, SEQ - (sample * 3) % SEQ :] = -100
        return {"input_ids": ids, "labels": labels, **extra}

    return Foreign(model=model, inputs=images if kind.__name__.endswith("ImageClassification") else inputs)


def tiny(kind: Any) -> Any:
    """A configuration with `SIZES` for every field and part that it has; its own probabilities of dropout stay."""
    parts = {name: tiny(part) for name, part in getattr(kind, "sub_configs", {}).items() if _is_config(part)}
    default = kind()
    known = set(inspect.signature(kind.__init__).parameters) | set(default.to_dict()) | set(kind.attribute_map)
    sizes = {key: value for key, value in (SIZES | OWN.get(kind.__name__, {})).items() if key in known}
    return kind(**(sizes | parts))


def _is_config(part: Any) -> bool:
    return isinstance(part, type) and part is not hf.AutoConfig and issubclass(part, hf.PreTrainedConfig)
