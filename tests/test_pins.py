"""Pins are hard constraints of every search: honoured exactly, with a bound, at a cost that is never below zero."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ImpossiblePinError, PinError, PlanFileError, PlanMismatchError
from autopar.lower.pinned import find_pinned, violations
from autopar.lower.program import Program
from autopar.report.plan_text import plan_text
from autopar.search.costs.folding import fold_program
from autopar.search.explanation.pin_costs import lifted_pins
from autopar.search.known.baselines import make_baseline
from autopar.search.planner import make_plan, plan_program
from autopar.search.search_options import SearchOptions
from autopar.values.mesh import make_mesh
from autopar.values.pins import joined, parse_pin, pins_of
from autopar.values.pins_file import load_pins
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import errors_of, one_process
from tests.random_pins import pinned_pricer, random_pins
from tests.report_cases import llama
from tests.search_cases import captured_of, exact_of, machine, pricer_of, program_of
from tests.zoo import zoo

GAP = 1e-3
OPTIONS = SearchOptions(relative_gap=GAP, with_baselines=False)
HEADS = {"*.self_attn.*": {"model": "heads"}}
MEGATRON = {
    "*": {"data": "batch", "lifetime": "always"},
    "*.linear*": {"model": ["columns", "rows"]},
    "*attention*": {"model": "heads"},
    "*embed*": {"model": ["vocabulary", "whole"]},
}


def planned(pins: dict[str, Any], mesh: tuple[int, ...] = (2, 2), **options: Any) -> StagePlan:
    """The best plan of the tiny Llama under pins."""
    config = TrainConfig(pins=pins_of(pins))
    return make_plan(captured_of("llama"), machine(), make_mesh(mesh), config, replace(OPTIONS, **options))


def broken(plan: StagePlan, program: Program) -> list[str]:
    return list(violations(find_pinned(program, plan.config.pins), [plan]))


@cache
def free() -> StagePlan:
    return planned({})


@pytest.mark.parametrize(("family", "mesh"), [("llama", (2, 2)), ("gpt2", (4,))])
def test_random_pins_are_honoured_with_a_bound_at_a_cost_of_zero_or_more(family: str, mesh: tuple[int, ...]) -> None:
    program, rng, pricer = program_of(family), random.Random(family), pricer_of(mesh)
    for _ in range(2):
        pins = random_pins(program, pricer, rng)
        own = pinned_pricer(pricer, pins)
        plan = plan_program(program, own, OPTIONS)
        assert broken(plan, program) == [], pins.texts
        assert plan.estimate.in_turn_seconds * (1 - GAP) <= plan.estimate.bound
        for text, config in [*lifted_pins(own.config)][-2:]:
            without = plan_program(program, pinned_pricer(pricer, config.pins), OPTIONS)
            assert without.estimate.bound <= plan.estimate.in_turn_seconds, text


def test_four_lines_pin_megatron() -> None:
    """The layout of parameters, and the seconds, of the baseline."""
    baseline = make_baseline("megatron", captured_of("llama"), machine(), make_mesh((2, 2)), TrainConfig())
    plan = planned(MEGATRON, relative_gap=1e-6)
    assert plan.layouts == baseline.layouts and set(plan.lifetimes.values()) == {"always"}
    assert plan.estimate.in_turn_seconds == pytest.approx(baseline.estimate.in_turn_seconds, rel=1e-6)
    assert plan.estimate.in_turn_seconds > free().estimate.in_turn_seconds


def test_a_few_annotations_decide_nearly_everything() -> None:
    """As in MindSpore: the first projections of each block are pinned, and what is between and around them follows."""
    pins = {
        "input:*": {"data": "shard(0)"},
        "*.[gu]*_proj": {"data": "batch", "model": "columns"},
        "*.[qkv]_proj": {"data": "batch", "model": "columns"},
    }
    program, plan = program_of("llama"), planned(pins)
    pinned = find_pinned(program, plan.config.pins)
    trained = [op for op in program.ops if any(op.result_grads)]
    assert len(pinned.choices) < len(trained) / 5
    words = {op.name: plan.choices[op.name] for op in trained if op.rule.is_attention or op.module.endswith("act_fn")}
    assert {choice[1] for choice in words.values()} <= {"heads", "dim2"}, "attention and activation follow on model"
    assert "*.[gu]*_proj: data=batch, model=columns" in plan_text(one_stage(plan), ()), "no markup"
    inside = [op for op in trained if op.module.startswith("model.layers")]
    assert all(plan.choices[op.name][0] in ("dim0", "batch") for op in inside), "everything follows on data"


def test_equal_blocks_that_are_pinned_otherwise_decide_apart() -> None:
    program, pins = program_of("llama"), pins_of({"model.layers.0": {"model": "batch"}})
    whole, apart = (len(fold_program(program, pins=p).instances) for p in (pins_of({}), pins))
    assert apart > whole
    both = pins_of({"model.layers.0-1": {"model": "batch"}})
    assert len(fold_program(program, pins=both).instances) == whole, "pinned alike they are one"
    plan = planned({"model.layers.0": {"model": "batch"}, "model.layers.1.mlp.*": {"model": ["columns", "rows"]}})
    assert broken(plan, program) == []


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"model.layers.0": {"recompute": True}}, "run"),
        ({"forbid": ["recompute"]}, "keeps"),
    ],
    ids=["again", "never"],
)
def test_recompute_is_as_pinned_whether_memory_binds_or_not(pins: dict[str, Any], words: str) -> None:
    program, graph = program_of("llama"), captured_of("llama")
    limit = None if words == "run" else 0.97 * free().estimate.peak_nbytes
    config = TrainConfig(pins=pins_of(pins), memory_nbytes=limit)
    plan = make_plan(graph, machine(), make_mesh((2, 2)), config, replace(OPTIONS, relative_gap=0.05))
    modules = {op.module.rpartition("layers.")[2][:1] for op in program.ops if op.name in plan.recompute}
    assert modules == ({"0"} if words == "run" else set()) and not (words == "keeps" and plan.remade)


def test_a_technique_that_is_demanded_is_done_wherever_it_can_be() -> None:
    """Megatron's sequence parallelism: norms by sequence, on whatever axis; and sharded parameters, gathered."""
    program = program_of("llama")
    plan = planned({"demand": ["sequence parallel", "fsdp"]})
    norms = [op for op in program.ops if op.parameters and op.module.endswith("norm")]
    assert norms and all("dim1" in plan.choices[op.name] for op in norms)
    assert set(plan.lifetimes.values()) <= {"use", "microbatch", "always"}
    assert all("S" in str(plan.layouts[spec.placeholder]) for spec in program.captured.parameters)


def test_the_double_recursion_honours_pins() -> None:
    plan = planned(MEGATRON, solver="double-recursive")
    assert broken(plan, program_of("llama")) == [] and plan.origin == "double-recursive"
    with pytest.raises(Exception, match="honours all pins"):
        planned({"model.layers.0": {"recompute": True}}, solver="double-recursive")


def test_baselines_are_those_within_the_pins() -> None:
    plan = planned(HEADS, with_baselines=True)
    assert isinstance(plan.estimate.baselines["megatron"], float)
    assert str(plan.estimate.baselines["ddp"]).startswith("ddp is not within the pins: ")
    assert broken(plan, program_of("llama")) == []


def test_a_baseline_whose_technique_is_forbidden_says_that() -> None:
    plan = planned({"forbid": ["fsdp"]}, with_baselines=True)
    assert plan.estimate.baselines["fsdp"] == "fsdp is not within the pins: 'forbid: fsdp' forbids it"
    assert isinstance(plan.estimate.baselines["ddp"], float)


@pytest.mark.parametrize(
    ("name", "pins", "blocks"),
    [
        ("ddp", {"model.layers.1": {"recompute": True}}, {"1"}),
        ("fsdp:recompute=full", {"model.layers.1": {"recompute": False}}, {"0"}),
    ],
    ids=["again", "never"],
)
def test_named_configurations_run_again_what_pins_say(name: str, pins: dict[str, Any], blocks: set[str]) -> None:
    program, config = program_of("llama"), TrainConfig(pins=pins_of(pins))
    plan = make_baseline(name, captured_of("llama"), machine(), make_mesh((4,)), config)
    modules = {op.name: op.module.rpartition("layers.")[2][:1] for op in program.ops}
    assert {modules[op] for op in plan.recompute} == blocks and broken(plan, program) == []
    assert {modules[tensor] for tensor in plan.remade if tensor in modules} <= blocks


def test_micro_batches_keep_lifetimes() -> None:
    pins = pins_of({"*": {"lifetime": "microbatch"}, "*norm*": {"lifetime": "step"}})
    graph = llama(microbatches=2)
    plan = make_plan(graph, machine(), make_mesh((4,)), TrainConfig(pins=pins_of({"*norm*": "step"})), OPTIONS)
    assert {plan.lifetimes[name] for name in plan.lifetimes if "norm" in name} <= {"step", "always"}
    with pytest.raises(PinError, match="contradict each other about how long copies"):
        make_plan(graph, machine(), make_mesh((4,)), TrainConfig(pins=pins), OPTIONS)


@pytest.mark.parametrize(
    ("pins", "error", "message"),
    [
        ({"*.atention.*": {"model": "heads"}}, PinError, "matches no parameter, module, call or input .*self_attn"),
        ({"input:ids": {"data": "shard(0)"}}, PinError, "matches no input of Llama.*near are input_ids"),
        ({"*.self_attn.*": {"modell": "heads"}}, PinError, "axis 'modell'.*did you mean model"),
        ({"*.self_attn.*": {"model": "head"}}, PinError, r"is split by head; it offers batch.*did you mean heads\?"),
        ({"*.self_attn.*": {"model": ["heads", "shard(0)"]}}, PinError, "mixes placements and words"),
        ({"lm_head.weight": {"model": "shard(3)"}}, PinError, r"has such a dim; shapes are \(96, 32\)"),
        ({"lm_head.weight": {"model": "partial"}}, PinError, "whole or split, never partial"),
        ({"*.self_attn.*": {"*": "heads"}}, ImpossiblePinError, "on all axes of mesh 2x2"),
        ({"*.0\n": {"data": "batch"}}, PinError, r"pins: lines: expected .* found '\*\.0"),
        ({"forbid": ["recompte"]}, PinError, "unknown technique 'recompte'.*did you mean recompute"),
        ({"forbid": ["fsdp"], "demand": ["fsdp"]}, PinError, "both forbidden and demanded"),
        ({"*": {"lifetime": "ever"}}, PinError, "unknown lifetime 'ever'"),
        ({"model.layers.3-1": {"recompute": True}}, PinError, "3-1 is no range"),
        ({"demand": ["expert parallel"]}, PinError, "no call of LlamaForCausalLM can be split so"),
        (
            {"model.layers.0": {"data": "batch"}, "model.layers.0.mlp": {"data": "whole"}},
            ImpossiblePinError,
            "and pin 'model.layers.0.mlp: data=whole'.* pins leave it no choice",
        ),
        (
            {"*.q_proj.weight": {"data": "shard(0)"}, "*.0.*.weight": {"data": "replicate"}},
            ImpossiblePinError,
            "q_proj.weight .* cannot be stored so on mesh 2x2",
        ),
        (
            {"model.norm.weight": {"data": "shard(0)"}, "model.norm": {"data": "batch"}, "forbid": ["fsdp"]},
            ImpossiblePinError,
            "'forbid: fsdp': model.norm.weight cannot be stored and live so",
        ),
        ({"model.layers.0": {"recompute": True}, "forbid": ["recompute"]}, PinError, "contradicts"),
        ({"lm_head": {"recompute": True}}, ImpossiblePinError, "nothing that it matches can be run again"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_is_said_with_what_is_near(pins: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(pins)


@pytest.mark.parametrize(
    "given",
    [
        {**MEGATRON, "forbid": ["recompute"], "demand": ["data parallel"]},
        {"op:model.layers.0-3.*": {"recompute": False, "data": ["shard(0)", "partial"]}, "input:x": "replicate"},
    ],
    ids=["words", "kinds"],
)
def test_a_pin_in_words_is_the_pin(given: dict[str, Any]) -> None:
    """What is printed may be given again: `--pin` reads it."""
    pins = pins_of(given)
    assert joined(map(parse_pin, pins.texts)) == pins


@pytest.mark.parametrize(
    "text", ["heads", "*.attn.*: ", ": model=heads", "*: model=heads, model=rows", "*: recompute=2", "*: true"]
)
def test_what_is_no_line_says_how_one_is_written(text: str) -> None:
    with pytest.raises(
        PinError, match=r"form PATTERN: AXIS=WORD|says two things|recompute is true or false|write recompute=true"
    ):
        parse_pin(text)


def test_files_say_what_python_says(tmp_path: Path) -> None:
    given = {"*.attn.*": {"model": "heads", "recompute": False}, "*embed*": "replicate", "forbid": ["fsdp"]}
    lines = ['forbid = ["fsdp"]', "[pins]", '"*.attn.*" = { model = "heads", recompute = false }']
    (tmp_path / "pins.toml").write_text("\n".join([*lines, '"*embed*" = "replicate"']))
    body = {"pins": {name: given[name] for name in ("*.attn.*", "*embed*")}, "forbid": ["fsdp"]}
    (tmp_path / "pins.json").write_text(json.dumps(body))
    assert load_pins(tmp_path / "pins.toml") == load_pins(tmp_path / "pins.json") == pins_of(given)
    for text, message in (("pins = 1", "pins: expected"), ("pin = {}", "unknown key"), ("[pins", "no TOML")):
        (tmp_path / "pins.toml").write_text(text)
        with pytest.raises(PinError, match=message):
            load_pins(tmp_path / "pins.toml")


def planned_blocks(pins: dict[str, Any], **asked: Any) -> autopar.ModelPlan:
    """The plan of two blocks of two layers."""
    block = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    model = torch.nn.Sequential(*(torch.nn.Sequential(*block) for _ in range(2)))
    asked = {"cluster": machine(), "check": False, "with_baselines": False, **asked}
    return autopar.plan(model, torch.ones(8, 16), loss_fn=lambda output: output.square().mean(), pins=pins, **asked)


def test_stages_honour_pins_and_say_what_they_cost() -> None:
    """Of the search of two stages, whose blocks are pinned otherwise."""
    pins = {"?.0": {"data": "columns"}, "1": {"recompute": True}}
    plan = planned_blocks(pins, mesh="2", pipeline=2, microbatches=2)
    assert plan.num_stages == 2 and plan.broken_pins() == []
    assert not plan.stages[0].recompute and plan.stages[1].recompute
    found = plan.explain()
    assert [other.without for other in found.pins] == [*plan.config.pins.texts, "all pins together"]
    assert all(other.bound <= plan.estimate.in_turn_seconds for other in found.pins)
    for wrong in ({"1": {"recompute": False}}, {"0": {"recompute": True}}):
        config = replace(plan.config, pins=pins_of(wrong))
        with pytest.raises(PlanMismatchError, match="does not honour the pins that it records"):
            replace(plan, config=config).legal()
    with pytest.raises(PinError, match="pins demand a pipeline"):
        planned_blocks({"demand": ["pipeline"]}, mesh="4")


def test_plans_nearby_run_again_what_pins_want() -> None:
    plan = planned_blocks({"1": {"recompute": True}}, mesh="4")
    assert "run again in backward, blocks: 0: linear; 1: relu" in str(plan)
    nearby = plan.explain().alternatives
    assert {other.plan.recompute for other in nearby if other.plan is not None} == {frozenset({"linear_2", "relu_1"})}
    assert not any("run again in backward" in other.without for other in nearby)


def test_an_axis_of_no_mesh_that_is_searched_is_said() -> None:
    with pytest.raises(PinError, match=r"pins speak of modle.* its axes are data, model; did you mean model\?"):
        planned_blocks({"*": {"modle": "batch"}}, mesh="auto")


def test_heads_that_do_not_divide_say_what_there_is() -> None:
    with pytest.raises(ImpossiblePinError, match=r"2 heads cannot be shared out over 4; it can be whole, batch"):
        planned({"*.self_attn.*": {"data": "heads"}}, (4,))


def test_a_saved_plan_records_its_pins() -> None:
    plan = one_stage(planned(HEADS))
    text = plan.to_json()
    assert plan_from_json(text).config.pins == pins_of(HEADS)
    body = json.loads(text)
    body["config"]["pins"]["forbid"] = ["nothing"]
    with pytest.raises(PlanFileError, match="unknown technique 'nothing'"):
        plan_from_json(json.dumps(body))


def test_a_pinned_plan_trains_as_one_process() -> None:
    """With an input handed over otherwise than it is read, a stored shard, and a block that is run again."""
    pins = {
        **HEADS,
        "input:input_ids": {"data": "shard(1)"},
        "*embed*.weight": {"data": "shard(1)", "model": "replicate"},
        "model.layers.1": {"recompute": True},
        "output:model.layers.0": {"model": "shard(1)"},
    }
    graph, (model, kwargs) = exact_of("llama"), zoo("llama", dtype=torch.float64)
    config = TrainConfig(precision="fp64", pins=pins_of(pins))
    plan = make_plan(graph, machine(), make_mesh((2, 2)), config, OPTIONS)
    loss, gradients, _ = errors_of(one_process(graph, model, kwargs), plan)
    assert loss <= 1e-10 and gradients <= 1e-8
    assert str(plan.layouts["input_ids"].axes[0]) == "S1" and plan.recompute
