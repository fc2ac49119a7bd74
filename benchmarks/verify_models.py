"""Is a plan of any model of Hugging Face's the model? Random plans of families that tests do not know, and a search.

    python -m benchmarks.verify_models [--models Gemma2,OPT] [--plans 4] [--seed 0]

Each family's own classes at hidden 32 and two layers, in float64, untouched but for sizes and dropout: captured, split
over four ranks (threads of this process) at random, `4` and `2x2` in turn, and planned on `2x2`. Loss and gradients
must be those of one process (1e-10 and 1e-8, relative), and every collective as predicted. Exit code 1 if any family
fails. A model that its own library cannot build or run so small is left out, and said.
"""

import argparse
import inspect
import operator
import random
import sys
import time
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.passes.promote_casts import promote_casts
from autopar.rules.registry import rule_of
from autopar.search.known.random_plan import random_plan
from autopar.values.mesh import make_mesh
from tests.plans_in_threads import errors_of, one_process

HEADS = {
    "ForCausalLM": "Apertus Arcee BioGpt Bloom CodeGen Cohere Cohere2 Ernie4_5 Exaone4 Falcon Gemma Gemma2 Glm Glm4 "
    "GPTBigCode GPTJ GPTNeo GPTNeoX Granite Helium HunYuanDenseV1 Mamba Mistral Mpt Nemotron Olmo Olmo2 Olmo3 OPT "
    "Persimmon Phi Phi3 Qwen2 Qwen3 RecurrentGemma SeedOss SmolLM3 StableLm Starcoder2 "
    "DeepseekV2 DeepseekV3 Dots1 Ernie4_5_Moe FlexOlmo Glm4Moe GptOss GraniteMoe GraniteMoeShared Jamba "
    "MiniMax Mixtral Olmoe Qwen2Moe Qwen3Moe",
    "LMHeadModel": "XLNet",
    "ForMaskedLM": "Albert BigBird ConvBert Deberta DebertaV2 DistilBert Electra Esm FNet ModernBert MPNet "
    "Nystromformer RoFormer Roberta",
    "ForConditionalGeneration": "Bart MBart Pegasus UMT5",
    "ForImageClassification": "Beit ConvNext ConvNextV2 DeiT Dinov2 RegNet",
}
"""Which class of a family is trained."""
BATCH, SEQ, WORDS, PIXELS = 8, 16, 96, 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "d_inner"), 32
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8, "d_kv": 8, "state_size": 8, "vocab_size": WORDS},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_k": 2},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"image_size": PIXELS, "patch_size": 4, "groups_width": 8, "window_size": 8},
}
DROP = "drop"
"""What the names of probabilities of dropout have in them."""
OWN: dict[str, dict[str, Any]] = {
    **{name: {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2} for name in ("ConvNext", "ConvNextV2")},
    "RegNet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8},
    "GptOss": {"layer_types": ["sliding_attention", "full_attention"]},
    **{name: {"num_key_value_heads": 4} for name in ("DeepseekV2", "DeepseekV3")},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
}


def built(name: str, head: str) -> tuple[nn.Module, dict[str, Any]]:
    """The family's model in training mode, and the keywords of a call."""
    kind = getattr(hf, f"{name}Config")
    known = set(inspect.signature(kind.__init__).parameters) | set(kind().to_dict()) | set(kind.attribute_map)
    sizes = {key: value for key, value in (SIZES | OWN.get(name, {})).items() if key in known}
    drops = {key: 0.0 for key, value in kind().to_dict().items() if DROP in key and _is_number(value)}
    torch.manual_seed(0)
    model = getattr(hf, name + head)(kind(**drops, **sizes)).double().train()
    if head == "ForImageClassification":
        pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, dtype=torch.float64)
        return model, {"pixel_values": pixels, "labels": torch.randint(2, (BATCH,))}
    ids = torch.randint(3, WORDS, (BATCH, SEQ))
    labels = ids.clone()
    for sample in range(BATCH):
        labels[sample, SEQ - (sample * 3) % SEQ :] = -100
    plain = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model, {"input_ids": ids, "labels": labels, **plain}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def runs(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the loss is a number; experts in a loop, since torch's grouped product takes no float64."""
    before = model.config._experts_implementation
    model.set_experts_implementation("eager")
    found: Tensor = model(**kwargs).loss
    model.set_experts_implementation(before)
    return bool(found.isfinite())


def verified(model: nn.Module, kwargs: dict[str, Any], plans: int, rng: random.Random) -> str:
    """What was seen; raises AssertionError where a plan is not the model."""
    captured = promote_casts(capture(model, (), kwargs))
    reference = one_process(captured, model, kwargs)
    worst = [0.0, 0.0]
    for number in range(plans):
        plan = random_plan(captured, make_mesh(((4,), (2, 2))[number % 2]), rng)
        loss, gradient, parameter = errors_of(reference, plan)
        assert loss <= 1e-10 and gradient <= 1e-8, f"plan {number}: loss off by {loss}, {parameter} by {gradient}"
        worst = [max(worst[0], loss), max(worst[1], gradient)]
    made = autopar.plan(model, kwargs=kwargs, cluster="4xcpu", mesh="2x2", precision="fp64", relative_gap=0.05)
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    calls, whole = len(nodes), sum(not rule_of(node).known for node in nodes if node.target is not operator.getitem)
    without = f" ({whole} whole)" if whole else ""
    return f"{calls:4} calls{without}, loss {worst[0]:.0e}, gradient {worst[1]:.0e}, gap {made.estimate.gap:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="")
    parser.add_argument("--plans", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    hf.logging.set_verbosity_error()
    families = {name: head for head, names in HEADS.items() for name in names.split()}
    chosen = arguments.models.split(",") if arguments.models else list(families)
    counts = {"good": 0, "left out": 0, "failed": 0}
    for name in chosen:
        began = time.monotonic()
        try:
            model, kwargs = built(name, families[name])
            assert runs(model, kwargs)
        except Exception as error:
            counts["left out"] += 1
            print(
                f"{name:16} left out, it does not run so small: {type(error).__name__}: {str(error)[:90]}", flush=True
            )
            continue
        try:
            said, kind = verified(model, kwargs, arguments.plans, random.Random(f"{name} {arguments.seed}")), "good"
        except (AssertionError, CaptureError) as error:
            said, kind = f"{type(error).__name__}: {error}", "failed"
        counts[kind] += 1
        print(f"{name:16} {kind}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
