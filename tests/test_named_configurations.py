"""A recipe by name and keys is a plan: it computes what one process computes, sends what is predicted, and is that
recipe: what ZeRO's stages hold, what is split, what is run again."""

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf

from autopar.api.captures import captured_model
from autopar.errors import ArgumentError, AutoparError, BatchError, InfeasibleError, MeshError
from autopar.lower.emit import emit
from autopar.lower.live import Live
from autopar.lower.lowered_step import lower
from autopar.lower.program import Program, make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.promote_casts import promote_casts
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.attention_core import attention_core
from autopar.search.known.baselines import BASELINES, baseline_plan, make_baseline
from autopar.search.known.named_configuration import COMMON, KINDS, configured, parse_configuration
from autopar.values.calls import Call
from autopar.values.cluster import load_cluster
from autopar.values.graph import target_name
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.placement import Shard
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.plans_in_threads import Reference, errors_of, one_process
from tests.search_cases import captured_of, machine, program_of
from tests.zoo import zoo
from tests.zoo_graphs import zoo_graph

RUN = (
    ("llama", "megatron:tp=2,mbs=1,recompute=full,zero=1,sp=on"),
    ("gpt2", "megatron:tp=4,sp=on,recompute=full"),
    ("gpt2", "fsdp:recompute=full,mbs=1"),
    ("bert", "ulysses:cp=2,zero=2,mbs=2"),
    ("eager", "ddp:zero=2,mbs=1,recompute=selective"),
)


@lru_cache
def program_at(family: str, count: int, layers: int = 2) -> Program:
    """Of one of `count` micro-batches of eight samples; `eager` is a Llama whose attention is not one fused call."""
    if family != "eager" and layers == 2:
        return make_program(accumulate_gradients(zoo_graph(family, 8 // count), count, lambda: zoo_graph(family)))
    model, kwargs = zoo("llama" if family == "eager" else family)
    if family == "eager":
        model.set_attn_implementation("eager")
    if layers != 2:
        model.config.num_hidden_layers = layers
        model = hf.LlamaForCausalLM(model.config)
    return make_program(captured_model(model, Call(kwargs=kwargs), "fp32", microbatches=count)[0])


Made = tuple[StagePlan, Program, Pricer]


def made_of(text: str, family: str = "llama", layers: int = 2) -> Made:
    mesh, count = configured(text, machine(), make_mesh((4,)), False, 8)
    assert isinstance(count, int)
    program = program_at(family, count, layers)
    pricer = make_pricer(mesh=mesh, cluster=machine(), config=TrainConfig())
    return baseline_plan(text, program, pricer, None), program, pricer


def exact_model(family: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, kwargs = zoo("llama" if family == "eager" else family, dtype=torch.float64)
    if family == "eager":
        model.set_attn_implementation("eager")
    return model, kwargs


@lru_cache
def reference_of(family: str) -> Reference:
    model, kwargs = exact_model(family)
    captured = promote_casts(captured_model(model, Call(kwargs=kwargs), "fp64")[0])
    return one_process(captured, model, kwargs)


@pytest.mark.parametrize(("family", "text"), RUN[::2])
def test_a_configuration_computes_what_one_process_computes(family: str, text: str) -> None:
    model, kwargs = exact_model(family)
    cluster = load_cluster("4xcpu")
    mesh, count = configured(text, cluster, make_mesh((4,)), False, 8)
    assert isinstance(count, int)
    captured = promote_casts(captured_model(model, Call(kwargs=kwargs), "fp64", microbatches=count)[0])
    made = make_baseline(text, captured, cluster, mesh, TrainConfig(precision="fp64"))
    loss_error, gradient_error, parameter = errors_of(reference_of(family), made, captured)
    assert loss_error <= 1e-10
    assert gradient_error <= 1e-8, parameter


@pytest.mark.parametrize(("mbs", "stage"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (2, 3)])
def test_stages_of_zero_shard_what_they_say(stage: int, mbs: int) -> None:
    """Bytes of state, of gradients between micro-batches, and of copies between forward and backward."""
    made, program, pricer = made_of(f"ddp:zero={stage},mbs={mbs}")
    assert made.microbatches == 8 // (4 * mbs)
    found = Live(lower(made, program, pricer.target))
    live, turn = found.bytes, len(found.calls) - 1
    weights = sum(
        t.element_size * torch.Size(t.shape).numel() for t in program.tensors.values() if t.kind == "parameter"
    )
    part = pytest.approx(weights / 4, rel=1e-9)
    assert live["parameters"][0] == (weights if stage == 0 else part)
    assert live["optimizer"][0] == (2 * weights if stage == 0 else pytest.approx(weights / 2, rel=1e-9))
    if made.microbatches > 1:
        assert live["gradients"][turn] == (weights if stage < 2 else part)
    if stage in (1, 2):
        assert live["gathered"][turn] == pytest.approx(weights, rel=0.15)
    assert live["gathered"][turn] < (1 if stage == 0 else 0.5 * weights if stage == 3 else 1.01 * weights)
    lifetimes = {0: {"always"}, 1: {"step"} if mbs == 1 else {"microbatch"}, 2: {"microbatch"}, 3: {"use"}}
    assert set(made.lifetimes.values()) == lifetimes[stage]


def test_sequence_parallel_splits_what_lies_between_and_nothing_is_gathered_that_is_split() -> None:
    words = {}
    for said in ("on", "off"):
        made, program, pricer = made_of(f"megatron:tp=2,sp={said},zero=1")
        norms = [op for op in program.ops if "rsqrt" in str(op.node.target) and any(op.result_grads)]
        words[said] = {made.choices[op.name][1] for op in norms}
        results = {pricer.op(op, made.choices[op.name]).results[0].axes[1] for op in norms}
        assert results == ({Shard(1)} if said == "on" else results - {Shard(1)})
        for name, tensor in program.tensors.items():
            if tensor.kind == "parameter" and len(tensor.shape) == 1:
                assert not isinstance(made.layouts[name].axes[1], Shard), "norms are whole on tensor-parallel ranks"
                assert made.layouts[name].axes[0] == Shard(0)
    assert words["on"].isdisjoint(words["off"])


@pytest.mark.parametrize("text", ["ddp:recompute=full", "megatron:tp=2,sp=on,recompute=full"])
def test_full_recompute_keeps_what_enters_a_block_and_no_more(text: str) -> None:
    """Between the passes, of all that blocks make: their results, in the layouts in which they leave."""
    made, program, pricer = made_of(text)

    def between(case: tuple[StagePlan, Program, Pricer]) -> float:
        plan, program, pricer = case
        live = Live(lower(plan, program, pricer.target))
        return float(live.bytes["activations"][len(live.calls) - 1])

    held = between((made, program, pricer))
    assert held < 0.7 * between(made_of(text.replace("recompute=full", "recompute=none")))
    layer = (between(made_of(text, layers=4)) - held) / 2
    assert layer == 8 * 16 * 32 * 4 / 4, "a layer more keeps one tensor [batch, sequence, hidden] more, split over all"


def test_selective_recompute_runs_the_core_again_where_there_is_one() -> None:
    program = program_at("eager", 1)
    core = attention_core(program)
    targets = [target_name(op.node.target) for op in program.ops if op.name in core]
    assert sum("softmax" in t for t in targets) == 2
    assert sum("matmul" in t or "bmm" in t for t in targets) == 4
    assert not any(op.parameters for op in program.ops if op.name in core)
    assert attention_core(program_at("llama", 1)) == frozenset()
    made, *_ = made_of("ddp:recompute=selective", "eager")
    assert made.recompute and made.recompute <= core
    assert not made_of("ddp:recompute=selective")[0].recompute
    plain, *_ = made_of("ddp", "eager")
    assert made.estimate.peak_nbytes < plain.estimate.peak_nbytes
    assert made.estimate.seconds["recompute"] > plain.estimate.seconds["recompute"] == 0


def test_what_no_key_fixes_is_decided_by_the_search() -> None:
    """Fewer keys, a larger space: never dearer (within the gap that baselines are solved to)."""
    free = made_of("megatron:tp=2")[0].estimate.step_seconds
    for text in ("megatron:tp=2,sp=on", "megatron:tp=2,sp=off,zero=0"):
        assert made_of(text)[0].estimate.step_seconds >= free * (1 - 2e-3)
    for kind in BASELINES:
        assert str(parse_configuration(kind)) == kind
    text = "megatron:tp=8,micro_batch=1,zero=1,sequence_parallel=on,recompute=full"
    assert str(parse_configuration("megatron:sp=on,tp=8,mbs=1,recompute=full,zero=1")) == text


BAD: tuple[tuple[str, type[AutoparError], str], ...] = (
    ("zero3", ArgumentError, "unknown baseline 'zero3'; choose one of ddp, fsdp, megatron, ulysses"),
    ("ddp:tp=2", ArgumentError, "'tp=2' is no key of ddp.*dp, pp, virtual_stages"),
    ("fsdp:zero", ArgumentError, "'zero' is no key of fsdp with its value"),
    ("fsdp:zero=4", ArgumentError, "zero '4' is none of 0, 1, 2, 3"),
    ("megatron:tp=0", ArgumentError, "tp '0' is not a whole number from 1 on"),
    ("megatron:tp=2,tp=4", ArgumentError, "tp is given twice"),
    ("fsdp:recompute=op", ArgumentError, "recompute 'op' is none of none, selective, full"),
    ("megatron:tp=3", MeshError, r"tp 3 does not divide the 4 devices of .*use one of \[1, 2, 4\]"),
    ("megatron:tp=2,dp=4", MeshError, "dp 4 x tp 2 is not the 4 devices of .*use dp=2"),
    ("ddp:dp=2", MeshError, "dp 2 is not the 4 devices of .*use dp=4"),
    ("ddp:mbs=3", BatchError, "global batch 8 is not divisible by 4 data-parallel ranks x micro-batch 3.*12"),
    ("ulysses:cp=4", InfeasibleError, "2 .key/value. heads .* are not divisible by 4"),
)


@pytest.mark.parametrize(("text", "kind", "said"), BAD)
def test_bad_configurations_are_refused_by_name(text: str, kind: type[AutoparError], said: str) -> None:
    with pytest.raises(kind, match=said):
        made_of(text)


def test_a_mesh_that_is_asked_for_must_be_the_configurations() -> None:
    mesh = Mesh(shape=(2, 2), names=("data", "model"))
    assert configured("megatron:tp=2", machine(), mesh, True, 8) == (mesh, 1)
    with pytest.raises(MeshError, match=r"the last axis of mesh 2x2 .* has 2 ranks, tp says 4"):
        configured("megatron:tp=4", machine(), mesh, True, 8)
    with pytest.raises(ArgumentError, match="runs 4 micro-batches a step, microbatches says 2"):
        configured("megatron:tp=2,mbs=1", machine(), mesh, True, 8, 2)


@pytest.mark.parametrize("text", ["ddp", "ddp:zero=0,recompute=full"])
def test_what_does_not_fit_names_its_bytes(text: str) -> None:
    pricer = make_pricer(mesh=make_mesh((4,)), cluster=machine(), config=TrainConfig())
    fits = baseline_plan(text, program_of("gpt2"), pricer, None).estimate.peak_nbytes
    with pytest.raises(InfeasibleError, match=r"it needs 0.000\d+ GB of 9e-05 GB a device") as caught:
        baseline_plan(text, program_of("gpt2"), pricer, 9e4)
    assert caught.value.least_nbytes is not None and 9e4 < caught.value.least_nbytes <= 1.3 * fits


def test_every_key_is_one_of_simulate() -> None:
    from autopar.cli.simulate_rows import CONFIG_FIELDS

    assert {key for keys in KINDS.values() for key in keys} | set(COMMON) <= set(CONFIG_FIELDS)


def test_a_plan_of_a_configuration_is_legal_on_larger_meshes() -> None:
    captured = captured_of("llama")
    made: StagePlan = make_baseline(
        "megatron:tp=2,sp=on,zero=1", captured, machine(8), make_mesh((4, 2)), TrainConfig()
    )
    emit(captured, made)
