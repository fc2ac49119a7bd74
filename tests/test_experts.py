"""Mixtures of experts: their graphs hold no order of experts, compute what they computed, and split."""

import importlib
import random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ops.grouped_linear import grouped_linear
from autopar.passes.promote_casts import promote_casts
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan
from autopar.values.cluster import load_cluster
from autopar.values.custom_ops import defining_module
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Families, and what else their configurations want."""


def mixture(family: str) -> tuple[nn.Module, dict[str, Any]]:
    config = getattr(hf, f"{family}Config")(**{**SIZES, **OWN[family]})
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # some are made without values
        if not bool(parameter.isfinite().all()) or not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(3, 96, (8, 16))
    return model.double().train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def targets(captured: CapturedModel) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("family", sorted(OWN)[::2])
def test_random_plans_and_baselines_of_mixtures_equal_one_process(family: str) -> None:
    model, kwargs = mixture(family)
    captured = promote_casts(capture(model, (), kwargs))
    layers = 1 if family == "DeepseekV3" else 2
    assert targets(captured).count(grouped_linear) in (2 * layers, 3 * layers)
    assert not {torch.ops.aten.sort.default, torch.ops.aten.histc.default} & set(targets(captured))
    reference = one_process(captured, model, kwargs)
    mesh = make_mesh((2, 2))
    cluster, config = load_cluster("4xcpu"), TrainConfig(precision="fp64")
    plans = [random_plan(captured, mesh, random.Random(seed)) for seed in range(2)]
    plans += [make_baseline(name, captured, cluster, mesh, config) for name in ("ddp", "fsdp")]
    for plan in plans:
        loss_error, gradient_error, parameter = errors_of(reference, plan)
        assert loss_error <= 1e-10, f"loss off by {loss_error}"
        assert gradient_error <= 1e-8, f"gradient of {parameter} off by {gradient_error}"


class Sorted(nn.Module):
    """Rows of two experts, in their order and back; `leaks`: what else is made of the sorted rows."""

    def __init__(self, leaks: str) -> None:
        super().__init__()
        self.leaks = leaks
        self.gate = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).softmax(-1).topk(2, -1)
        ordered, order = ids.reshape(-1).sort()
        rows = x[order // 2]
        ends = torch.histc(ordered.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = rows if self.leaks == "no product" else torch.ops.aten._grouped_mm.default(rows, self.weight, ends)
        if self.leaks == "rows":
            y = y.cumsum(0)  # each row reads those before it
        if self.leaks != "no product":
            y = y * scores.reshape(-1)[order].unsqueeze(1)
        y = y[order.argsort()].reshape(-1, 2, 8).sum(1)
        return y.square().sum() + scores.sum() + (order.float().sum() if self.leaks == "order" else 0)


@pytest.mark.parametrize("leaks", ["", "rows", "order", "no product"])
def test_rows_that_meet_others_in_their_order_stay_sorted(leaks: str) -> None:
    torch.manual_seed(0)
    model, x = Sorted(leaks).bfloat16(), torch.randn(8, 8, dtype=torch.bfloat16)
    captured = capture(model, (x,), loss_fn=lambda loss: loss)
    found = targets(captured)
    assert (grouped_linear in found, torch.ops.aten.sort.default in found) == (not leaks, bool(leaks))


def test_a_librarys_op_is_found_by_the_module_that_registers_it() -> None:
    importlib.import_module("transformers.integrations.moe")
    assert defining_module(torch.ops.transformers.grouped_mm_fallback.default) == "transformers.integrations.moe"
    assert defining_module(torch.ops.aten.mm.default) is None


def test_a_grouped_linear_is_each_row_times_its_experts_matrix() -> None:
    torch.manual_seed(0)
    for k, num_experts in ((1, 3), (2, 5), (3, 2)):
        x, ids = torch.randn(4, 3, k, 6), torch.randint(num_experts, (4, 3, k))
        weight = torch.randn(num_experts, 6, 7)
        expected = torch.einsum("btki,btkio->btko", x, weight[ids])
        torch.testing.assert_close(grouped_linear(x, ids, weight), expected)
        torch.testing.assert_close(grouped_linear(x[..., :1, :], ids, weight)[..., 0, :], expected[..., 0, :])


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")
def test_a_compiled_grouped_linear_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    x, ids, weight = torch.randn(4, 3, 1, 6), torch.randint(5, (4, 3, 2)), torch.randn(5, 6, 7)
    outcomes = []
    for run in (grouped_linear, torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = run(leaves[0], ids, leaves[1])
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for eager, compiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(compiled, eager)
