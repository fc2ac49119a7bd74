"""What a step of several micro-batches costs: what its graph sends, what ranks hold, and the search's own sum."""

import math
import random
from dataclasses import replace
from functools import lru_cache

import pytest

from autopar.lower.emit import emit
from autopar.lower.program import Program, make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.costs.evaluate import evaluate, evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.problem import Problem
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_plan
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.graph import CapturedModel
from autopar.values.lifetimes import ONCE_A_STEP
from autopar.values.mesh import make_mesh
from autopar.values.placement import Shard, local_shape
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine
from tests.test_search_evaluate import _sent_seconds
from tests.zoo_graphs import zoo_graph


@lru_cache
def captured_of(family: str, count: int, rows: int = 2) -> CapturedModel:
    """A micro-batch of `rows` samples, one of `count`."""
    return accumulate_gradients(zoo_graph(family, rows), count, lambda: zoo_graph(family, rows * count))


@pytest.mark.parametrize(("family", "count"), [("gpt2", 2), ("llama", 4), ("t5", 2), ("frozen_resnet", 4)])
def test_collectives_cost_what_the_step_sends(family: str, count: int) -> None:
    captured = captured_of(family, count)
    for seed, shape in enumerate([(4,), (2, 2)]):
        plan = random_plan(captured, make_mesh(shape), random.Random(seed))
        seconds = evaluate(plan, captured, machine()).seconds
        sent = _sent_seconds(emit(captured, plan), plan.mesh)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            assert seconds[kind] == pytest.approx(sent.get(kind, 0.0), rel=1e-6, abs=1e-15), kind


def problem_of(family: str, count: int, limit: float | None) -> tuple[Program, Pricer, Problem]:
    program = make_program(captured_of(family, count))
    pricer = make_pricer(mesh=make_mesh((4,)), cluster=machine(), config=TrainConfig())
    return program, pricer, build(program, pricer, limit=limit)


@pytest.mark.parametrize(("family", "squeeze"), [("llama", None), ("llama", 0.9), ("bert", 0.9), ("vit", 0.9)])
def test_the_search_prices_what_is_evaluated(family: str, squeeze: float | None) -> None:
    """The solution's seconds are the plan's, its memory no less than the plan's, under binding limits too."""
    program, pricer, problem = problem_of(family, 4, None)
    free = extract(problem, solve(problem.graph, relative_gap=1e-4), pricer.cluster, pricer.config, "ilp")
    peak = evaluate_program(free, program, pricer).peak_nbytes
    if squeeze is not None:
        _, _, problem = problem_of(family, 4, peak * squeeze)
    solution = solve(problem.graph, relative_gap=1e-4)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    estimate = evaluate_program(plan, program, pricer)
    assert estimate.step_seconds == pytest.approx(solution.seconds, rel=1e-6)
    if squeeze is not None:
        assert estimate.peak_nbytes <= peak * squeeze * 1.02
    assert plan.microbatches == 4
    emit(program.captured, plan)


def test_lifetimes_of_a_step_cost_once_and_of_a_use_every_time() -> None:
    captured = captured_of("llama", 4)
    plan = random_plan(captured, make_mesh((4,)), random.Random(5))
    seconds = {}
    for lifetime in ("step", "microbatch", "use"):
        own = replace(plan, lifetimes=dict.fromkeys(plan.lifetimes, lifetime))
        seconds[lifetime] = evaluate(own, captured, machine()).seconds
    assert seconds["step"]["all_gather"] < seconds["microbatch"]["all_gather"] < seconds["use"]["all_gather"]
    assert seconds["step"]["reduce_scatter"] < seconds["microbatch"]["reduce_scatter"]
    assert seconds["use"]["reduce_scatter"] == pytest.approx(seconds["microbatch"]["reduce_scatter"])
    for kind in ("forward", "backward", "optimizer"):
        assert seconds["step"][kind] == seconds["use"][kind]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_named_plans_of_micro_batches(name: str) -> None:
    """DDP reduces gradients once a step: what it sends beside the loss does not grow with micro-batches; FSDP does."""
    sent = {}
    for count in (2, 4):
        captured = captured_of("vit", count, rows=4)
        plan = make_baseline(name, captured, machine(), make_mesh((4,)), TrainConfig())
        assert name == "fsdp" or set(plan.lifetimes.values()) <= set(ONCE_A_STEP)
        sent[count] = sum(evaluate(plan, captured, machine()).seconds[k] for k in ("all_gather", "all_reduce"))
    low, high = (1.0, 1.2) if name == "ddp" else (1.5, 2.0)
    assert low <= sent[4] / sent[2] <= high


def test_gradients_and_copies_of_a_step_are_held_in_the_layout_in_use() -> None:
    """Between micro-batches: the whole copy, and the whole sum of gradients, of parameters stored in parts."""
    captured, mesh = captured_of("vit", 2, rows=4), make_mesh((4,))
    sharded = make_baseline("fsdp", captured, machine(), mesh, TrainConfig(optimizer="sgd"))
    memory = {}
    for lifetime in ("step", "use"):
        plan = replace(sharded, lifetimes=dict.fromkeys(sharded.lifetimes, lifetime))
        memory[lifetime] = evaluate(plan, captured, machine()).memory
    whole = sum(p.dtype.itemsize * math.prod(p.shape) for p in captured.parameters)
    stored = sum(
        p.dtype.itemsize * math.prod(local_shape(p.shape, sharded.layouts[p.placeholder], mesh))
        for p in captured.parameters
    )
    assert memory["use"]["gradients"] == stored
    assert memory["step"]["gradients"] == whole
    gathered = [
        p for p in captured.parameters if any(isinstance(a, Shard) for a in sharded.layouts[p.placeholder].axes)
    ]
    assert memory["step"]["gathered"] == sum(p.dtype.itemsize * math.prod(p.shape) for p in gathered)


@pytest.mark.parametrize("solver", ["ilp", "double-recursive"])
def test_planning_for_micro_batches(solver: str) -> None:
    captured = captured_of("gpt2", 4, rows=4)
    plan = make_plan(
        captured, machine(), make_mesh((2, 2)), TrainConfig(), SearchOptions(solver=solver, with_baselines=False)
    )
    assert plan.microbatches == 4
    assert plan.estimate.bound <= plan.estimate.step_seconds
    emit(captured, plan)
    # as many samples in one batch: no plan of a part may take longer four times than the whole with less to send
    whole = make_plan(
        captured_of("gpt2", 1, rows=16),
        machine(),
        make_mesh((2, 2)),
        TrainConfig(),
        SearchOptions(with_baselines=False),
    )
    assert plan.estimate.step_seconds >= whole.estimate.bound * (1 - 1e-9)
    assert plan.estimate.memory["activations"] < whole.estimate.memory["activations"]


def test_recompute_and_micro_batches_are_priced_together() -> None:
    """Under a limit that keeping everything does not meet, the solution still costs and holds what its plan does."""
    program, pricer, problem = problem_of("vit", 4, None)
    free = extract(problem, solve(problem.graph, relative_gap=1e-4), pricer.cluster, pricer.config, "ilp")
    limit = evaluate_program(free, program, pricer).peak_nbytes * 0.85
    problem = build(program, pricer, limit=limit, builder=RecomputeBuilder)
    solution = solve(problem.graph, relative_gap=1e-3)
    plan = extract(problem, solution, pricer.cluster, pricer.config, "ilp")
    estimate = evaluate_program(plan, program, pricer)
    assert estimate.step_seconds == pytest.approx(solution.seconds, rel=1e-6)
    assert estimate.peak_nbytes <= limit * 1.02
    emit(program.captured, plan)
