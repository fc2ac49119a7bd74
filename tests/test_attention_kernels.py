"""Which attention has no kernel of its own on a device, and what two products keep of it instead."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.lower.program import make_program
from autopar.rules.registry import rule_of
from autopar.search.costs.pricing import make_pricer
from autopar.values.cluster import load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.op_samples import SAMPLES

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("title", "dtype", "on_host", "on_gpu"),
    [
        ("plain", F64, False, True), ("plain", F32, False, False), ("plain", BF16, False, False),
        ("grouped", F64, False, True), ("grouped", F32, False, True), ("grouped", BF16, False, False),
        ("bias", F64, True, True), ("bias", F32, True, False), ("bias", BF16, True, False),
        ("float mask", F32, False, False),
    ],
)  # fmt: skip
def test_where_there_is_no_kernel(title: str, dtype: torch.dtype, on_host: bool, on_gpu: bool) -> None:
    [sample] = [s for s in SAMPLES if s.name == f"sdpa {title}"]
    rule = rule_of(sample.node(dtype))
    assert (rule.products_on_host, rule.products_on_gpu) == (on_host, on_gpu)


class Attention(nn.Module):
    def __init__(self, key_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(2, 4, 16, 8, dtype=dtype))
        self.key, self.value = (nn.Parameter(torch.empty(2, key_heads, 16, 8, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True, enable_gqa=True)
        return (y * x).sum()


@pytest.mark.parametrize(("key_heads", "dtype", "products"), [(4, F64, True), (2, F32, True), (2, BF16, False)])
def test_what_products_keep_on_a_gpu(key_heads: int, dtype: torch.dtype, products: bool) -> None:
    """Copies of query, key and value, and the weights, [2, 4, 16, 16]; a kernel keeps a statistic a row."""
    with torch.device("meta"):
        program = make_program(capture(Attention(key_heads, dtype), (torch.empty(2, 4, 16, 8, dtype=dtype),), {}))
    [op] = [op for op in program.ops if op.rule.is_attention]
    config = TrainConfig(precision="bf16")
    kept = {}
    for device in ("h100", "cpu"):
        pricer = make_pricer(mesh=make_mesh((1,)), cluster=load_cluster(f"1x{device}"), config=config)
        names = next((way,) for way in op.choices if pricer.target.is_allowed(op, (way,)))
        kept[device], saved = pricer.target.op(op, names).sizes.kept, pricer.target.saves(op)
        assert bool(saved[0]) == (not products or device == "cpu")
    statistics = 2 * 4 * 16 * (8 if dtype == F64 else 4)
    copies = (2 * 4 * 16 * 8 + 2 * 2 * key_heads * 16 * 8 + 2 * 4 * 16 * 16) * dtype.itemsize
    assert kept["cpu"] == statistics
    assert kept["h100"] == (copies if products else statistics)
