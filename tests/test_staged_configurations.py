"""A recipe with a pipeline is a plan in stages: it computes what one process computes and sends what is predicted; its
parts are those of its keys, and what contradicts itself, the model or the cluster is refused by name."""

from dataclasses import replace
from functools import lru_cache

import pytest

import tests.pipeline_cases as cases
from autopar.api import planning as api
from autopar.api.captures import captured_model
from autopar.cost_models.compute import Rates
from autopar.errors import ArgumentError, AutoparError, BatchError, InfeasibleError, MeshError
from autopar.lower.messages import sent_by_rank
from autopar.lower.program import make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.report.plan_text import plan_text
from autopar.search.asked_mesh import asked_mesh
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import baseline_plan
from autopar.search.known.named_configuration import configured, parse_configuration
from autopar.search.known.staged_baselines import make_configuration
from autopar.search.pipeline_parts import part_of
from autopar.search.staged import stages as staging
from autopar.search.staged.stages import block_starts
from autopar.search.timeline.plan_timeline import plan_timeline
from autopar.search.timeline.staged_buckets import stages_in_buckets
from autopar.values.calls import Call
from autopar.values.cluster import load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.plan import Plan
from autopar.values.train_config import TrainConfig
from tests.process_group import ranks
from tests.search_cases import machine, squares
from tests.zoo import zoo

# Family, configuration and micro-batches of 4 samples each; T5's encoder and decoder have four blocks.
RUN = (
    ("gpt2", "megatron:tp=2,pp=2,mbs=4,recompute=full,zero=1,sp=on", 2),
    ("llama", "ulysses:cp=2,pp=2,zero=2,schedule=gpipe", 1),
    ("t5", "fsdp:pp=2,vpp=2,mbs=2", 4),
    ("t5", "ddp:pp=4,mbs=4,zero=1,recompute=full", 5),
)


def made_of(text: str, captured: CapturedModel, config: TrainConfig | None = None) -> Plan:
    mesh, count = configured(text, machine(), stage_mesh(text), False, 4 * captured.microbatches, captured.microbatches)
    assert count == captured.microbatches
    return make_configuration(text, captured, machine(), mesh, config or TrainConfig())


def stage_mesh(text: str) -> Mesh:
    return make_mesh((part_of(machine(), parse_configuration(text).pp).num_devices,))


@pytest.mark.parametrize(("family", "text", "microbatches"), RUN[::2])
def test_a_configuration_in_stages_computes_what_one_process_computes(
    family: str, text: str, microbatches: int
) -> None:
    captured, file = cases.case(family, microbatches)
    made = made_of(text, captured, TrainConfig(precision="fp64"))
    assert made.world == 4 and set(made.cuts) <= set(block_starts(captured))
    fused = stages_in_buckets(made, split_stages(captured, made.cuts), machine())
    for answers in ranks(4).run(cases.compared, file, [fused.to_json()]):
        loss_error, error, name = answers[0]
        assert loss_error <= 1e-10
        assert error <= 1e-8, name


@lru_cache
def llama_batch(batch: int) -> CapturedModel:
    model, kwargs = zoo("llama", batch=batch)
    model.config.num_hidden_layers = 4
    return captured_model(type(model)(model.config), Call(kwargs=kwargs), "fp32")[0]


@lru_cache
def llama(count: int) -> CapturedModel:
    return accumulate_gradients(llama_batch(4), count, lambda: llama_batch(4 * count))


def test_keys_are_what_the_plan_has() -> None:
    made = made_of("megatron:tp=2,pp=2,vpp=2,schedule=1f1b,zero=1", llama(2))
    assert (made.schedule, made.pipeline, made.num_stages, made.mesh.shape) == ("interleaved-1f1b", 2, 4, (1, 2))
    assert all("heads" in choice for stage in made.stages for name, choice in stage.choices.items() if "scaled" in name)
    assert str(parse_configuration("megatron:pp=2,vpp=2,tp=2")) == "megatron:tp=2,pp=2,virtual_stages=2"
    assert made.origin == "megatron:tp=2,pp=2,virtual_stages=2,schedule=1f1b,zero=1"
    assert made.estimate.bound == 0.0 and "none takes less" not in plan_text(made, ())
    plain = made_of("megatron:tp=2,pp=2,zero=1", llama(2))
    assert plain.schedule == "1f1b" and plain.num_stages == 2
    assert made.estimate.seconds["bubble"] < plain.estimate.seconds["bubble"], "what interleaving is for"


def test_backward_in_two_parts_is_priced() -> None:
    """Its bubble is smaller, its peak counted; the timeline of its ops takes as long as the estimate says."""
    text, captured = "megatron:tp=2,pp=2,schedule=zbv,zero=1", llama(4)
    made, plain = made_of(text, captured), made_of("megatron:tp=2,pp=2,zero=1", captured)
    assert (made.schedule, made.num_stages, made.origin) == ("zbv", 4, "megatron:tp=2,pp=2,schedule=zbv,zero=1")
    assert made.estimate.seconds["bubble"] < 0.6 * plain.estimate.seconds["bubble"], "what two parts are for"
    stages = split_stages(captured, made.cuts)
    assert plan_timeline(made, stages, machine()).seconds == pytest.approx(made.estimate.step_seconds, rel=1e-9)
    held = [stage.nbytes for stage in made.estimate.search.stages]
    assert held[0] == held[3] and held[1] == held[2] and max(held) == made.estimate.peak_nbytes


def test_micro_batches_in_flight_and_recompute_decide_memory() -> None:
    held = {
        text: made_of(text, llama(4)).estimate.memory["activations"]
        for text in ("ddp:pp=2,schedule=gpipe", "ddp:pp=2", "ddp:pp=2,recompute=full")
    }
    assert held["ddp:pp=2,schedule=gpipe"] > 1.5 * held["ddp:pp=2"] > 2 * held["ddp:pp=2,recompute=full"]


def test_stages_that_do_not_fit_are_planned_with_less_or_refused_with_bytes() -> None:
    """`fsdp:zero=2` leaves nothing open that saves memory; the least that is named is what it takes."""
    captured = llama(2)
    peak = made_of("ddp:pp=2", captured).estimate.peak_nbytes
    fits = made_of("ddp:pp=2", captured, TrainConfig(memory_nbytes=peak))
    assert fits.estimate.peak_nbytes <= peak and fits.config.memory_nbytes == peak
    with pytest.raises(InfeasibleError, match=r"its fullest rank needs .* GB of .* GB a device") as caught:
        made_of("ddp:pp=2", captured, TrainConfig(memory_nbytes=0.5 * peak))
    assert caught.value.least_nbytes is not None and 0.5 * peak <= caught.value.least_nbytes <= peak


@pytest.mark.parametrize("text", ["fsdp:pp=2", "ddp:pp=2,vpp=2"])
def test_stages_travel_in_buckets_if_they_fit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "copied_seconds", lambda *_: 0.0)  # starts are shorter here than copies
    captured = llama(2)
    made = made_of(text, captured)
    stages = split_stages(captured, made.cuts)
    fused = stages_in_buckets(made, stages, machine())
    alone = priced(replace(fused, stages=tuple(replace(s, buckets=(), ways={}) for s in fused.stages)), stages)
    assert sum(len(stage.buckets) for stage in fused.stages) >= 2
    assert fused.estimate.saved > 0
    assert fused.estimate.alone_seconds == pytest.approx(alone)
    assert alone <= made.estimate.step_seconds * (1 + 1e-9)
    before, after = (messages_of(captured, plan) for plan in (made, fused))
    assert after < before
    if (held := fused.estimate.peak_nbytes) > made.estimate.peak_nbytes:
        tight = replace(made, config=replace(made.config, memory_nbytes=held - 1))
        assert stages_in_buckets(tight, stages, machine()).estimate.peak_nbytes <= held - 1


def priced(plan: Plan, stages: tuple[CapturedModel, ...]) -> float:
    return staging.priced(plan, stages, machine(), part_of(machine(), plan.pipeline)).estimate.step_seconds


def messages_of(captured: CapturedModel, plan: Plan) -> int:
    """How many collectives one rank runs in a step."""
    stages = split_stages(captured, plan.cuts)
    return sum(calls for calls, _ in sent_by_rank(stages, plan, plan.stages_of(0), 0, on_host=True).values())


BAD: tuple[tuple[str, type[AutoparError], str], ...] = (
    ("ddp:pp=3", MeshError, r"3 pipeline ranks do not take equal parts of .*4 devices.*use one of 1, 2, 4"),
    ("ddp:pp=8", MeshError, "8 pipeline ranks do not"),
    ("megatron:tp=4,pp=2", MeshError, r"tp 4 does not divide the 2 devices of each of 2 pipeline ranks .*\[1, 2\]"),
    ("megatron:tp=2,pp=2,dp=2", MeshError, "dp 2 x tp 2 is not the 2 devices of each of 2 .*use dp=1"),
    ("ddp:vpp=2", ArgumentError, "virtual_stages and schedule are of a pipeline; add pp of 2 or more"),
    ("ddp:schedule=1f1b", ArgumentError, "virtual_stages and schedule are of a pipeline"),
    ("ddp:pp=2,schedule=zb-1p", ArgumentError, "schedule 'zb-1p' is none of gpipe, 1f1b, interleaved-1f1b, zbv"),
    ("ddp:pp=2,vpp=2,schedule=gpipe", ArgumentError, "ddp:.*schedule gpipe on 2 pipeline ranks needs one stage a rank"),
    ("ddp:pp=2,schedule=interleaved-1f1b", ArgumentError, "needs two or more stages a rank"),
    ("ddp:pp=2,vpp=3,schedule=zbv", ArgumentError, "zbv on 2 pipeline ranks needs two stages a rank, 4; got 6"),
    ("ddp:pp=4", ArgumentError, "1f1b on 4 pipeline ranks needs as many micro-batches, got 2"),
    ("ddp:pp=2,vpp=64", InfeasibleError, "128 stages need as many parts that read parameters; LlamaForCausalLM can be"),
    ("ddp:pp=2,mbs=3", BatchError, "8 is not divisible by 2 data-parallel ranks x micro-batch 3"),
)


@pytest.mark.parametrize(("text", "kind", "said"), BAD)
def test_what_contradicts_itself_is_refused_by_name(text: str, kind: type[AutoparError], said: str) -> None:
    with pytest.raises(kind, match=said):
        made_of(text, llama(2))


def test_interleaved_micro_batches_come_in_rounds() -> None:
    with pytest.raises(ArgumentError, match=r"5 .*use 4 or 6"):
        made_of("ddp:pp=2,vpp=2", llama(5))


def test_a_whole_model_on_one_device_a_rank() -> None:
    """Nothing is left of the recipe but its pipeline: dp = tp = 1."""
    made = made_of("megatron:tp=1,pp=4", llama(4))
    assert made.mesh.size == 1 and made.world == 4
    assert not any(kind.startswith("all") for kind in made.estimate.seconds)


def test_the_step_is_never_faster_than_the_whole_work_shared_out() -> None:
    text, captured = "fsdp:pp=2", llama(4)
    part, mesh = part_of(machine(), 2), make_mesh((2,))
    pricer = make_pricer(mesh=mesh, cluster=part, config=TrainConfig())
    whole = baseline_plan(text, make_program(captured), pricer, None).estimate.step_seconds
    assert made_of(text, captured).estimate.step_seconds >= whole / 2 * (1 - 1e-9)


def test_plan_takes_configurations_with_a_pipeline() -> None:
    """Micro-batches that nobody says are searched; those that the schedule does not run are left out."""
    model, inputs = squares()
    made = api.plan(model, inputs, cluster=machine(), baseline="fsdp:pp=2,mbs=1")
    assert made.num_stages > 1 and made.microbatches == 2 and made.mesh.shape == (2,)
    free = api.plan(model, inputs, cluster=machine(), baseline="fsdp:pp=2")
    assert free.estimate.step_seconds <= made.estimate.step_seconds * (1 + 1e-9)
    assert "needs as many micro-batches" in free.estimate.search.microbatches["1"]
    with pytest.raises(ArgumentError, match="the baseline fsdp:pp=2 has 2 pipeline ranks"):
        api.plan(model, inputs, cluster=machine(), baseline="fsdp:pp=2", pipeline=4)


def test_plan_takes_the_mesh_of_a_stage() -> None:
    """One arrangement, asked for: as good as the best of the search over meshes when that has no other."""
    model, inputs = squares()
    made = api.plan(model, inputs, cluster=machine(), mesh="2", pipeline=2, microbatches=2, relative_gap=0.02)
    assert made.num_stages > 1
    assert (made.mesh.shape, made.pipeline, made.microbatches, made.schedule) == ((2,), 2, 2, "1f1b")
    other = api.plan(model, inputs, cluster=machine(), mesh="1x2", pipeline=2, schedule="gpipe", relative_gap=0.02)
    assert other.num_stages > 1 and other.mesh.shape == (1, 2) and other.schedule == "gpipe"
    assert other.estimate.search.space is not None and "mesh 1x2" in other.estimate.search.space.space
    with pytest.raises(BatchError, match="3 micro-batches were asked, but the global batch has"):
        api.plan(model, inputs, cluster=machine(), mesh="2", pipeline=2, microbatches=3)
    with pytest.raises(InfeasibleError, match="runs 1 micro-batches on 2 pipeline ranks"):
        api.plan(model, inputs, cluster=machine(), mesh="2", pipeline=2, microbatches=1)


def test_what_is_asked_of_mesh_and_pipeline() -> None:
    cluster = load_cluster("2x8xh100")
    assert asked_mesh(cluster, None, 2)[1].shape == (8,)
    assert asked_mesh(cluster, "2x2", 4) == (4, make_mesh((2, 2)))
    assert asked_mesh(cluster, "auto", "auto") == (1, make_mesh((2, 8)))
    assert asked_mesh(cluster, "2x2", None, "auto", "megatron:pp=4,tp=2") == (4, make_mesh((2, 2)))
    for arguments, kind, said in (
        (("2x2", None), MeshError, "mesh 2x2 .* has 4 ranks, not the 16 devices of 2x8xh100.* 4 pipeline ranks of it"),
        (("2x2", 2), MeshError, "not the 8 devices of each of 2 pipeline ranks on 2x8xh100"),
        ((None, 3), MeshError, "3 pipeline ranks do not take equal parts .*use one of 1, 2, 4, 8, 16"),
        (("2x8", "auto"), MeshError, "is found with mesh auto, not 2x8"),
        (("2x8", None, "1f1b"), ArgumentError, "schedule 1f1b is that of a pipeline"),
        (("auto", None, "auto", "ddp"), MeshError, "baseline ddp is made for one mesh"),
    ):
        with pytest.raises(kind, match=said):
            asked_mesh(cluster, *arguments)  # type: ignore[arg-type]
