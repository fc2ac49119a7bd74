"""A printed plan: every parameter and collective once, in words, within 120 columns."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.model_plan import ModelPlan, model_plan
from autopar.capture import capture
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.report.rows import plan_sections
from autopar.report.units import nbytes_text, percent_text, seconds_text
from autopar.report.words import choice_words
from autopar.search.known.random_plan import random_plan
from autopar.values.blocks import block_of, kind_of, ranges, relative, title
from autopar.values.calls import Call
from autopar.values.estimate import Estimate
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from autopar.values.search_report import SearchReport
from tests.search_cases import captured_of
from tests.zoo import FAMILIES, zoo


def planned(family: str, **arguments: Any) -> ModelPlan:
    with torch.device("meta"):
        model, kwargs = zoo(family)
    return autopar.plan(model, kwargs, **{"cluster": "4xcpu", "mesh": "2x2", "with_baselines": False, **arguments})


def test_a_llama_block_is_a_table_that_a_person_reads() -> None:
    text = str(planned("llama", baseline="megatron"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    start = next(i for i, line in enumerate(lines) if line.startswith("model.layers."))
    block = lines[start + 3 : next(i for i in range(start + 3, len(lines)) if not lines[i].strip())]
    assert len(block) <= 40
    for part in (
        "self_attn.q_proj: linear",
        "self_attn.q_proj.weight",
        "mlp.down_proj: linear",
        "input_layernorm.weight",
    ):
        assert any(line.strip().startswith(part) for line in block), part
    assert "split by batch on data, by columns on model" in text
    assert "by rows on model" in text and "by heads on model" in text


def test_how_parameters_are_stored_is_said() -> None:
    text = str(planned("gpt2", baseline="fsdp"))
    assert "(tied: lm_head.weight)" in text
    assert "gathered" in text and ", dim " in text
    assert "whole on every rank" in str(planned("gpt2", baseline="ddp"))


class Masking(nn.Module):
    """A buffer of who sees whom, cut to the sequence on every rank, meets the batch's own mask."""

    causal: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("causal", torch.ones(32, 32, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = self.causal[:8, :8][None] & mask[:, None, :].bool()
        x = self.layer(x)
        return ((x @ x.transpose(-1, -2)).masked_fill(~seen, -1e9).softmax(-1) @ x).square().mean()


def test_a_line_says_how_the_call_is_split_whose_placements_it_shows() -> None:
    inputs = {"x": torch.randn(8, 8, 16), "mask": torch.ones(8, 8, dtype=torch.long)}
    plan = autopar.plan(Masking(), inputs, cluster="2xcpu", mesh="2", baseline="ddp", with_baselines=False)
    text = str(plan)
    [line] = [line for line in text.splitlines() if line.strip().startswith("and")]
    assert "split by batch" in line and "S0" in line, text
    words = choice_words(plan.graph, plan.mesh)
    lines = [row for part in plan_sections(plan.locals[0], words) for row in part.rows if row.kind == "op"]
    assert not [row for row in lines if row.how.startswith("whole") and "S" in row.layout], text


def test_a_parameter_without_dims_is_a_scalar_and_what_was_chosen_is_said() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.temperature = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) / self.temperature).square().mean()

    plan = autopar.plan(Scaled(), torch.randn(8, 16), cluster="2xcpu", baseline="ddp", with_baselines=False)
    [line] = [line for line in str(plan).splitlines() if line.strip().startswith("temperature")]
    assert line.split()[1:6] == ["scalar,", "whole", "on", "every", "rank"]
    assert "assumed" not in str(plan)
    said = str(replace(plan, assumed=("precision fp32 (--precision)", "global batch 8 (--global-batch)")))
    assert said.splitlines()[1] == "assumed  precision fp32 (--precision), global batch 8 (--global-batch)"


@pytest.mark.parametrize("family", FAMILIES[1::2])
def test_every_parameter_and_message_has_its_line(family: str) -> None:
    """Of random plans, where nothing folds: messages of all lines are those predicted (gathers in backward aside)."""
    captured = captured_of(family)
    plan = random_plan(captured, make_mesh((2, 2)), random.Random(family))
    plan = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, "microbatch"))
    local = emit(captured, plan)
    found = plan_sections(local, choice_words(captured, plan.mesh))
    counted: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for section in found:
        for row in section.rows:
            for message in row.messages:
                key = (message.kind, tuple(plan.mesh.names[a] for a in message.axes))
                calls, nbytes = counted.get(key, (0, 0))
                counted[key] = (calls + section.count, nbytes + section.count * message.nbytes)
    assert counted == messages_of(local.captured, local.plan, on_host=True)
    used = {s.name for node in captured.graph.nodes for s in node.all_input_nodes}
    listed = sum(section.count for section in found for row in section.rows if row.kind == "parameter")
    assert listed >= sum(parameter.placeholder in used for parameter in captured.parameters)


def test_costs_bound_and_baselines_are_shown() -> None:
    plan = planned("llama", baseline="ddp")
    estimate = Estimate(
        seconds={"forward": 1.0, "all_reduce": 0.5, "all_to_all": 0.0},
        memory={"parameters": 3e9, "activations": 1e9},
        bound=1.47,
        baselines={"ddp": 3.0, "fsdp": "does not fit: needs 12.0 GB of 8.0 GB a device"},
    )
    text = str(replace(plan, estimate=estimate, stages=(replace(plan.single, buckets=()),)))
    said = " ".join(text.split())
    assert "step 1.50 s, proved within 2% of the best in the space searched: none takes less than 1.47 s" in said
    assert "memory 4.00 GB of 5.00 GB a device at the peak sent 500 ms of collectives" in said
    hidden = " ".join(str(replace(plan, estimate=replace(estimate, hidden=0.1))).split())
    assert "step 1.40 s as it runs, collectives beside compute for 100 ms" in hidden
    assert "proof 1.50 s with nothing beside compute: within 2% of the best" in hidden, (
        "one quantity, its bound, its gap"
    )
    assert "sent 500 ms of collectives, 400 ms of it exposed" in hidden
    slow = " ".join(str(replace(plan, estimate=replace(estimate, baselines={"one device": 1.51}))).split())
    assert "pays not: one device alone takes 1.51 s" in slow and " pays " not in hidden
    assert "all-reduce" in text and "33%" in text and "all-to-all" not in text.split("step time")[1]
    assert "2.00×" in text and "needs 12.0 GB of 8.0 GB" in text


def test_ops_without_a_rule_are_listed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grown = torch.linalg.matrix_exp(self.layer(x))
            return torch.nn.functional.normalize(grown).mean()

    captured = capture(Odd(), (torch.randn(4, 4),))
    plan = model_plan(
        one_stage(random_plan(captured, make_mesh((2,)), random.Random(0))),
        captured=captured,
        call=Call(args=(torch.randn(4, 4),)),
    )
    assert "ops without a rule (whole on every rank): aten.linalg_matrix_exp.default\n" in str(plan)
    assert "split as running them showed (discovered): aten.linalg_vector_norm.default\n" in str(plan)
    report = SearchReport(whole_seconds={"aten.linalg_matrix_exp.default": 0.25})
    estimate = Estimate(seconds={"forward": 1.0}, search=report)
    assert "aten.linalg_matrix_exp.default 250 ms, 25% of the step" in str(replace(plan, estimate=estimate))


def test_units() -> None:
    assert [seconds_text(s) for s in (0, 2.5e-8, 1.234e-6, 0.0456, 12.34, 300)] == [
        *("0", "25.0 ns", "1.23 µs", "45.6 ms", "12.3 s", "300 s")
    ]
    assert [nbytes_text(n) for n in (0, 999, 1000, 8.39e6, 1.5e12)] == ["0 B", "999 B", "1.00 kB", "8.39 MB", "1.50 TB"]
    assert [percent_text(p) for p in (0, 0.0012, 0.5)] == ["0%", "0.12%", "50%"]


def test_blocks_are_named_by_numbers_in_paths() -> None:
    assert block_of("model.layers.3.mlp.up") == "model.layers.3" and block_of("model.norm") == ""
    assert block_of("stages.0.layers.1.conv", 2) == "stages.0.layers.1" and block_of("a.0.b", 2) == "a.0"
    assert kind_of("stages.0.layers.1") == "stages.*.layers.*"
    assert relative("a.0.b", "a.0") == "b" and relative("c", "a.0") == "c" and relative("a.0", "a.0") == ""
    assert ranges([5, 0, 1, 2]) == "0-2, 5"
    assert title(["h.0", "h.1", "h.3"]) == "h.0-1, 3" and title(["a.0.b.1", "a.1.b.0"]) == "a.*.b.*"
