"""Stages: what a plan in stages costs, how few seconds it can take, and that the search finds the best of them."""

import itertools
import random
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.api import planning as api
from autopar.cost_models.pipeline import COMPUTE, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import make_order
from autopar.cost_models.timeline import simulate
from autopar.errors import ArgumentError, MeshError
from autopar.lower.emit import emit_stage
from autopar.lower.lowered_step import lower
from autopar.lower.program import make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.report.plan_text import plan_text
from autopar.search.costs.evaluate import charges_of
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.joint.candidates import CandidateSpace
from autopar.search.joint.mesh_search import search_meshes
from autopar.search.known.staged_baselines import make_configuration
from autopar.search.meshes import parts
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.search.staged.rounds import rounds
from autopar.search.staged.stages import balanced, block_starts, choose_cuts, priced, staged
from autopar.search.timeline.staged_buckets import in_buckets
from autopar.values.cluster import Cluster
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.mesh import make_mesh
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, squares
from tests.zoo_graphs import zoo_graph

MICROBATCHES = 4


def makespan(schedule: str, p: int, m: int, chunks: int, forward: list[float], backward: list[float]) -> float:
    order = make_order(schedule, p, m, chunks)
    stages = [
        StageWork(actions={"F": (Segment(COMPUTE, f),), "B": (Segment(COMPUTE, b),)})
        for f, b in zip(forward, backward, strict=True)
    ]
    return float(simulate(make_pipeline(order, stages).tasks).finish.max())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_no_uneven_stages_beat_the_rounds_of_their_schedule(schedule: str) -> None:
    """Thousands of drawn stage times, one stage far slower among them; equal ones meet the bound of 1f1b and gpipe."""
    draw = random.Random(0)
    for _ in range(150):
        p, chunks = draw.randint(1, 5), 2 if schedule == "interleaved-1f1b" else 1
        m = p * draw.randint(1, 3) if chunks > 1 else draw.randint(1, 12)
        spread = draw.choice((0.0, 0.3, 1.0, 4.0))
        times = [[draw.random() * np.exp(draw.gauss(0, spread)) + 1e-3 for _ in range(p * chunks)] for _ in range(2)]
        total = sum(map(sum, times))
        assert makespan(schedule, p, m, chunks, *times) >= rounds(schedule, p, m).passing * total / p * (1 - 1e-9)
        if chunks == 1 and m > p:
            equal = makespan(schedule, p, m, 1, [1.0] * p, [2.0] * p)
            assert equal == pytest.approx(rounds(schedule, p, m).passing * 3.0)


def test_balanced_is_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(50):
        count, stages = draw.randint(1, 8), draw.randint(1, 4)
        if stages > count:
            continue
        seconds = [draw.random() for _ in range(count)]

        def worst(cuts: tuple[int, ...], seconds: list[float] = seconds) -> float:
            ends = (0, *cuts, len(seconds))
            return max(sum(seconds[a:b]) for a, b in pairwise(ends))

        found = balanced(seconds, stages)
        assert len(found) == stages - 1
        assert worst(found) == pytest.approx(min(map(worst, combinations(range(1, count), stages - 1))))


@cache
def graph(family: str) -> CapturedModel:
    part = zoo_graph(family, 1, batch=MICROBATCHES)
    return accumulate_gradients(part, MICROBATCHES, lambda: zoo_graph(family, batch=MICROBATCHES))


@cache
def whole(family: str) -> tuple[StagePlan, Pricer]:
    cluster, mesh = parts(machine(4))[2], make_mesh((2,))
    plan = make_plan(
        graph(family), cluster, mesh, TrainConfig(), SearchOptions(relative_gap=1e-2, with_baselines=False)
    )
    return plan, make_pricer(mesh=mesh, cluster=cluster, config=TrainConfig())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_cost_what_the_whole_costs(family: str) -> None:
    """The stages' seconds add up to the whole plan's, but for what no stage owns and each computes (rotary tables)."""
    plan, pricer = whole(family)
    program = make_program(graph(family))
    cuts = choose_cuts(plan, program, pricer, 2)
    assert set(cuts) <= set(block_starts(graph(family)))
    made, stages = staged(plan, program, pricer, 2, "1f1b", cuts)
    made = priced(made, stages, machine(4), pricer.cluster)
    charges = charges_of(lower(plan, program, pricer.target), pricer)
    passing = sum(c.seconds for c in charges if c.kind != "optimizer" and plan.lifetimes.get(c.name) not in ONCE_A_STEP)
    found = [stage.seconds for stage in made.estimate.search.stages]
    tables = sum(op.position for op in program.ops if not any(op.result_grads)) > 0
    assert sum(found) == pytest.approx(passing / MICROBATCHES, rel=0.01 if tables else 1e-9)
    assert sum(found) >= passing / MICROBATCHES * (1 - 1e-9)
    least = rounds("1f1b", 2, MICROBATCHES).passing * sum(found) / 2
    assert made.estimate.step_seconds >= least
    made.check(graph(family))
    locals_ = [emit_stage(stages, made.stages, number) for number in range(2)]
    assert "2 stages on 2 pipeline ranks" in plan_text(made, locals_) and ", 1f1b in 4 micro" in plan_text(
        made, locals_
    )


def test_a_pipeline_needs_less_memory_of_a_device_than_one_stage() -> None:
    plan, pricer = whole("llama")
    program = make_program(graph("llama"))
    made, stages = staged(plan, program, pricer, 2, "1f1b", choose_cuts(plan, program, pricer, 2))
    one = priced(made, stages, machine(4), pricer.cluster).estimate
    many, _ = staged(plan, program, pricer, 2, "gpipe", made.cuts)
    assert one.peak_nbytes < plan.estimate.peak_nbytes
    assert priced(many, stages, machine(4), pricer.cluster).estimate.peak_nbytes > one.peak_nbytes


def test_the_joint_search_plans_stages() -> None:
    model, inputs = squares()
    made = api.plan(model, inputs, cluster=machine(2), mesh="auto", pipeline=2, relative_gap=0.02)
    assert made.num_stages == made.world == 2
    best = api.plan(model, inputs, cluster=machine(2), mesh="auto", relative_gap=0.02, with_baselines=False)
    assert best.estimate.step_seconds <= made.estimate.step_seconds
    assert best.estimate.bound <= made.estimate.bound * (1 + 1e-9)
    with pytest.raises(MeshError, match="3 pipeline ranks"):
        api.plan(model, inputs, cluster=machine(2), mesh="auto", pipeline=3)
    with pytest.raises(ArgumentError, match="not searched"):
        api.plan(model, inputs, cluster=machine(2), mesh="auto", schedule="zbv")


def test_no_named_stages_are_below_what_is_proved_of_every_collective_alone() -> None:
    """The bound is one for every mesh of two pipeline ranks and number of micro-batches; buckets leave it as it is."""

    def part(count: int) -> CapturedModel:
        return accumulate_gradients(zoo_graph("llama", 4 // count, batch=4), count, lambda: zoo_graph("llama", batch=4))

    machine = slow_starts()
    found, _ = search_meshes(
        4,
        lambda batch: zoo_graph("llama", batch, batch=4),
        machine,
        TrainConfig(),
        SearchOptions(relative_gap=0.02, buckets=True),
        CandidateSpace(pipelines=(2,), schedule="1f1b"),
    )
    assert found.num_stages == 2 and not any(stage.buckets for stage in found.stages)
    named = []
    for text, count in itertools.product(("ddp:pp=2", "fsdp:pp=2", "fsdp:pp=2,zero=2", "megatron:pp=2,tp=2"), (2, 4)):
        if count == 2 or text.startswith("megatron"):  # else a micro-batch is less than a sample a rank
            made = make_configuration(text, part(count), machine, make_mesh((2,)), TrainConfig())
            named.append(made.estimate.step_seconds)
    assert 0 < found.estimate.bound <= min(named)
    assert found.estimate.step_seconds <= min(named) * (1 + 0.02)
    together = in_buckets(found, part(found.microbatches), machine).estimate
    assert together.search.is_in_buckets and together.saved > 0 and together.bounded_alone
    assert together.gap == pytest.approx(1 - found.estimate.bound / together.alone_seconds, abs=1e-9)


def slow_starts() -> Cluster:
    """Four ranks that many small messages cost most."""
    cluster = machine(4)
    return replace(cluster, levels=tuple(replace(level, alpha=20 * level.alpha) for level in cluster.levels))
