"""Which model does the demo train? A byte-level Llama of Hugging Face transformers, unmodified, with random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GLOBAL_BATCH = 8
SEQUENCE = 128


def llama() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """A Llama of 5.3 million float32 parameters (grouped-query attention) and the keyword inputs to capture it with.

    `input_ids` and `labels` are int64 (GLOBAL_BATCH, SEQUENCE). Two calls, in any two processes, give equal weights;
    torch's global random state is left as it was.
    """
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(GLOBAL_BATCH, SEQUENCE, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens.clone()}
