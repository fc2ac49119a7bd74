"""Products whose rows are no whole pieces of 16 bytes: an explanation names them, and says what their lengths cost."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.cost_models.compute import HOST
from autopar.lower.program import make_program
from autopar.report.explain_text import explain_text
from autopar.search.costs.pricing import make_pricer
from autopar.search.explanation.explain import explain
from autopar.search.explanation.odd_rows import odd_rows
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.train_config import TrainConfig

TOKENS, HIDDEN = 8192, 1024


class Head(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), labels)


def captured(words: int) -> CapturedModel:
    with torch.device("meta"):
        model = Head(words).to(torch.bfloat16)
        batch = {
            "x": torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16),
            "labels": torch.zeros(TOKENS, dtype=torch.long),
        }
    return capture(model, (), batch)


@pytest.mark.parametrize("device", ["h200", "h200-eager"])
def test_what_odd_rows_cost_is_what_padding_them_saves(device: str) -> None:
    """The head's products take that much less with the next multiple of 8 words."""
    cluster, mesh, config = load_cluster(f"1x{device}"), make_mesh((1,)), TrainConfig(precision="bf16")
    heads: dict[int, float] = {}
    for words in (50264, 50258, 50257):
        program, pricer = make_program(captured(words)), make_pricer(mesh=mesh, cluster=cluster, config=config)
        plan = make_plan(program.captured, cluster, mesh, config, SearchOptions(with_baselines=False))
        found = odd_rows(plan, program, pricer)
        [head] = [op for op in program.ops if op.rule.product is not None and op.operand_shapes[1][0] == words]
        price = pricer.op(head, plan.choices[head.name])
        heads[words] = price.forward + price.backward
        times = [odd.seconds / odd.padded for odd in found]
        assert times == pytest.approx({50257: [6.0], 50258: [2.7], 50264: []}[words], rel=0.02)
        for odd in found:
            assert (odd.name, odd.count, set(odd.rows)) == ("head", 1, {words, HIDDEN})
            assert odd.seconds == pytest.approx(heads[words])
            assert odd.lost == pytest.approx(heads[words] - heads[50264], rel=0.02)


def test_an_explanation_says_so() -> None:
    cluster, mesh = load_cluster("1xh200"), make_mesh((1,))
    for words, said in ((50257, True), (50264, False)):
        graph = captured(words)
        plan = make_plan(graph, cluster, mesh, TrainConfig(precision="bf16"), SearchOptions(with_baselines=False))
        text = explain_text(explain(one_stage(plan), graph, cluster, seconds=0.0))
        assert ("unaligned rows: head take" in text and "on a rank 50257;" in text) == said


def test_what_bytes_bind_is_not_said_to_take_longer() -> None:
    """One column: its operand is read once, however its one product is computed."""
    cluster, mesh, config = load_cluster("1xh200-eager"), make_mesh((1,)), TrainConfig(precision="bf16")
    program = make_program(captured(1))
    plan = make_plan(program.captured, cluster, mesh, config, SearchOptions(with_baselines=False))
    assert odd_rows(plan, program, make_pricer(mesh=mesh, cluster=cluster, config=config)) == ()


def test_a_host_knows_no_odd_rows() -> None:
    program, cluster, mesh = make_program(captured(50257)), load_cluster("1xcpu"), make_mesh((1,))
    config = TrainConfig(precision="fp32")
    plan = make_plan(program.captured, load_cluster("1xh100"), mesh, config, SearchOptions(with_baselines=False))
    device = replace(load_cluster("1xh100").device, name=HOST)
    host = make_pricer(mesh=mesh, cluster=replace(cluster, device=device), config=config)
    assert odd_rows(plan, program, host) == ()
